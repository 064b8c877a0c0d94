"""``--sync gossip``: what an optimizer's weights and momenta do after its step (see ``exchange/gossip.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter  # as it is now: scripts are given another clock later
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from oars.adapt.torch.backward.flat_buffers import Weights, real, weights_of
from oars.adapt.torch.context import ctx
from oars.exchange.allreduce import span_of
from oars.exchange.codes import code_of
from oars.exchange.gossip import Gossip

# State that is a sum of gradients, of either sign. All else may be a mean of squares, which may not become negative.
_MOMENTA = {"momentum_buffer", "exp_avg", "grad_avg"}
_TAIL = 8  # bytes behind the weights: how many batches their rank has learnt from since all were averaged
_PIECE = 1 << 15  # values


class Talks:
    """Every optimizer's gossip."""

    def __init__(self) -> None:
        self.heard: dict[int, int] = {}  # rank -> how many of its batches are, in part, in weights of others
        self._of: WeakKeyDictionary[Optimizer, Gossip] = WeakKeyDictionary()
        # What is talked about, and which of it are weights or momenta: laid out anew only where all ranks meet.
        self._said: WeakKeyDictionary[Optimizer, tuple[Weights, list[bool]]] = WeakKeyDictionary()
        wire = ctx.plan.wire
        self._code: Any = None if wire == "fp32" else code_of(wire)

    def step(self, optimizer: Optimizer, number: int, learnt: int) -> None:
        """An optimizer has made a step: take over what was heard meanwhile, and talk on."""
        began = perf_counter()
        gossip = self._gossip(optimizer, number)
        if not gossip.idle():
            self._take(optimizer, gossip, wait=False)
        if gossip.idle():
            self._say(optimizer, gossip, learnt)
        ctx.world.seconds += perf_counter() - began

    def _gossip(self, optimizer: Optimizer, number: int) -> Gossip:
        if optimizer not in self._of:
            self._of[optimizer] = Gossip(ctx.world, number, ctx.plan.rotate, ctx.plan.seed)
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
                    self._say(optimizer, gossip, learnt)
                self._take(optimizer, gossip, wait=True)
            gossip.round = max(rounds)
        self._said.clear()

    def _say(self, optimizer: Optimizer, gossip: Gossip, learnt: int) -> None:
        """Send weights and momenta as they are now, coded."""
        said, _ = self._spoken_of(optimizer)
        if self._code is None:
            room = gossip.room(said.layout.nbytes + _TAIL)
            said.lay_in(room[:-_TAIL])
        else:
            buffer = np.zeros(said.layout.nbytes, np.uint8)
            said.lay_in(buffer)
            parts = [self._code.encode(span_of(buffer, span).astype(np.float32)) for span in said.layout.spans]
            room = gossip.room(sum(map(len, parts)) + _TAIL)
            np.concatenate(parts, out=room[:-_TAIL])
        room[-_TAIL:] = np.array([learnt], np.int64).view(np.uint8)
        gossip.begin()

    def _meant(self, optimizer: Optimizer, message: np.ndarray) -> list[torch.Tensor]:
        """The tensors that a message holds."""
        said, _ = self._spoken_of(optimizer)
        if self._code is None:
            return said.layout.views(message[:-_TAIL])
        buffer, at = np.zeros(said.layout.nbytes, np.uint8), 0
        for span in said.layout.spans:
            count = span[1]
            width = len(self._code.encode(np.zeros(count, np.float32)))
            span_of(buffer, span)[:] = self._code.decode(message[at : at + width], count)
            at += width
        return said.layout.views(buffer)

    def _take(self, optimizer: Optimizer, gossip: Gossip, wait: bool) -> None:
        sent, source = gossip.sent, gossip.heard_from
        heard = gossip.heard(wait)
        if heard is None:
            return
        self.heard[source] = max(self.heard.get(source, 0), int(heard[-_TAIL:].copy().view(np.int64)[0]))
        said, signed = self._spoken_of(optimizer)
        with torch.no_grad():
            for mine, any_sign, own, other in zip(said.tensors, signed, self._meant(optimizer, sent),
                                                  self._meant(optimizer, heard), strict=True):
                for some, own_, other_ in _pieces(real(mine), own, other):
                    if any_sign:
                        some.add_((other_ - own_).to(some.device, some.dtype), alpha=0.5)
                    else:  # what was said long ago must not make it negative
                        some.lerp_(other_.to(some.device, some.dtype), 0.5)

    def _spoken_of(self, optimizer: Optimizer) -> tuple[Weights, list[bool]]:
        """An optimizer's weights, then all of its state that is shaped like them; and which may have any sign."""
        if optimizer not in self._said:
            weights = weights_of(optimizer)
            state = [(value, name in _MOMENTA) for p in weights for name, value in optimizer.state.get(p, {}).items()
                     if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == p.shape]
            self._said[optimizer] = (Weights([*weights, *(value for value, _ in state)]),
                                     [True] * len(weights) + [signed for _, signed in state])
        return self._said[optimizer]


def _pieces(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Tensors of one shape in pieces that stay in a core's cache, where they can be cut."""
    if not all(x.is_cpu and x.is_contiguous() for x in tensors):
        return [tensors]
    return zip(*(x.view(-1).split(_PIECE) for x in tensors), strict=True)
