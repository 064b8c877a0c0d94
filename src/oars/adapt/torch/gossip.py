"""``--sync gossip``: what an optimizer's weights and momenta do after its step (see ``exchange/gossip.py``)."""

from __future__ import annotations

from time import perf_counter  # as it is now: scripts are given another clock later
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from oars.adapt.torch.buckets import Weights, weights_of
from oars.adapt.torch.context import ctx
from oars.exchange.codes import code_of
from oars.exchange.gossip import Gossip

# State that is a sum of gradients, of either sign. All else may be a mean of squares, which may not become negative.
_MOMENTA = {"momentum_buffer", "exp_avg", "grad_avg"}
_HEAD = 8  # bytes before the weights: how many batches their rank has learnt from since all were averaged


class Talks:
    """Every optimizer's gossip."""

    def __init__(self) -> None:
        self.heard: dict[int, int] = {}  # rank -> how many of its batches are, in part, in weights of others
        self._of: WeakKeyDictionary[Optimizer, Gossip] = WeakKeyDictionary()
        # What is talked about, and which of it are weights or momenta: laid out anew only where all ranks meet.
        self._said: WeakKeyDictionary[Optimizer, tuple[Weights, list[bool]]] = WeakKeyDictionary()
        wire = ctx.plan["wire"]
        self._code: Any = None if wire == "fp32" else code_of(wire)

    def step(self, optimizer: Optimizer, number: int, learnt: int) -> None:
        """An optimizer has made a step: take over what was heard meanwhile, and talk on."""
        began = perf_counter()
        gossip = self._gossip(optimizer, number)
        if not gossip.idle():
            self._take(optimizer, gossip, wait=False)
        if gossip.idle():
            gossip.begin(self._copy(optimizer, learnt))
        ctx.world.seconds += perf_counter() - began

    def _gossip(self, optimizer: Optimizer, number: int) -> Gossip:
        if optimizer not in self._of:
            self._of[optimizer] = Gossip(ctx.world, number, ctx.plan["rotate"], ctx.plan["seed"])
        return self._of[optimizer]

    def fall_silent(self, numbers: dict[Optimizer, int], learnt: int) -> None:
        """All ranks have stopped training: hear out what was said, so that nothing said counts on one side only."""
        every = [(optimizer, self._gossip(optimizer, number)) for optimizer, number in numbers.items()]
        begun = ctx.world.allgather({gossip.number: (gossip.idle(), gossip.round)[1] for _, gossip in every})
        for optimizer, gossip in every:
            rounds = [of.get(gossip.number, 0) for of in begun]
            if not all(rounds):  # somebody has made no step, or has dropped this optimizer
                gossip.drop()
            while not gossip.idle() or (all(rounds) and gossip.round < max(rounds)):
                if gossip.idle():
                    gossip.begin(self._copy(optimizer, learnt))
                self._take(optimizer, gossip, wait=True)
            gossip.round = max(rounds)
        self._said.clear()

    def _copy(self, optimizer: Optimizer, learnt: int) -> np.ndarray:
        """Weights and momenta as they are now, coded, for others to read."""
        said, _ = self._spoken_of(optimizer)
        buffer = np.zeros(said.layout.nbytes, np.uint8)
        said.lay_in(buffer)
        head = np.array([learnt], np.int64).view(np.uint8)
        parts = [buffer] if self._code is None else [
            self._code.encode(buffer[start : start + count * np.dtype(dtype).itemsize].view(dtype).astype(np.float32))
            for start, count, dtype in said.layout.spans]
        return np.concatenate([head, *parts])

    def _meant(self, optimizer: Optimizer, copy: np.ndarray) -> list[torch.Tensor]:
        """The tensors that a copy holds."""
        said, _ = self._spoken_of(optimizer)
        if self._code is None:
            return said.layout.views(copy[_HEAD:].copy())
        buffer, at = np.zeros(said.layout.nbytes, np.uint8), _HEAD
        for start, count, dtype in said.layout.spans:
            width = len(self._code.encode(np.zeros(count, np.float32)))
            into = buffer[start : start + count * np.dtype(dtype).itemsize].view(dtype)
            into[:] = self._code.decode(copy[at : at + width], count)
            at += width
        return said.layout.views(buffer)

    def _take(self, optimizer: Optimizer, gossip: Gossip, wait: bool) -> None:
        sent, source = gossip.sent, gossip.heard_from
        copy = gossip.heard(wait)
        if copy is None:
            return
        self.heard[source] = max(self.heard.get(source, 0), int(copy[:_HEAD].view(np.int64)[0]))
        said, signed = self._spoken_of(optimizer)
        with torch.no_grad():
            for mine, any_sign, own, other in zip(said.tensors, signed, self._meant(optimizer, sent),
                                                  self._meant(optimizer, copy), strict=True):
                mine = torch.view_as_real(mine) if mine.is_complex() else mine
                if any_sign:
                    mine.add_((other - own).to(mine.device, mine.dtype), alpha=0.5)
                else:  # what was said long ago must not make it negative
                    mine.lerp_(other.to(mine.device, mine.dtype), 0.5)

    def _spoken_of(self, optimizer: Optimizer) -> tuple[Weights, list[bool]]:
        """An optimizer's weights, then all of its state that is shaped like them; and which may have any sign."""
        if optimizer not in self._said:
            weights = weights_of(optimizer)
            state = [(value, name in _MOMENTA) for p in weights for name, value in optimizer.state.get(p, {}).items()
                     if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == p.shape]
            self._said[optimizer] = (Weights([*weights, *(value for value, _ in state)]),
                                     [True] * len(weights) + [signed for _, signed in state])
        return self._said[optimizer]
