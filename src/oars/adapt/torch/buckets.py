"""Where gradients lie in the exchange's flat buffers."""

from __future__ import annotations

import weakref
import zlib
from math import prod
from typing import Any

import numpy as np
import torch

from oars.exchange.allreduce import Exchange

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class Plan:
    """One set of leaves that get gradients together: their order (by serial) and their places."""

    def __init__(self, leaves: dict[int, Any]) -> None:
        self.dead = False
        # Sparse gradients, and those with a graph of their own, do not fit a flat buffer.
        odd = {s: p for s, p in leaves.items() if p.grad.layout is not torch.strided or p.grad.requires_grad}
        flat = {s: p for s, p in leaves.items() if s not in odd}
        self._odd = [weakref.ref(p, self._died) for p in odd.values()]
        self._refs = [weakref.ref(p, self._died) for p in flat.values()]
        self.serials = list(leaves)
        kinds = [(s, tuple(p.shape), str(p.dtype), s in odd) for s, p in leaves.items()]
        self.digest = zlib.crc32(repr(kinds).encode())
        self._complex = any(p.is_complex() for p in flat.values())
        self._shapes = [(*p.shape, 2) if p.is_complex() else tuple(p.shape) for p in flat.values()]
        self._carried = [_carried(p.dtype) for p in flat.values()]
        self._lay_out()
        self._generation = -1
        self._inbox: list[torch.Tensor] = []
        self._result: list[torch.Tensor] = []

    def _lay_out(self) -> None:
        self._offsets, self.nbytes = [0] * len(self._shapes), 0
        self.spans: list[tuple[int, int, Any]] = []  # (first byte, elements, dtype)
        for dtype in _NUMPY:
            start = self.nbytes
            for i, shape in enumerate(self._shapes):
                if self._carried[i] is dtype:
                    self._offsets[i] = self.nbytes
                    self.nbytes += prod(shape) * dtype.itemsize
            if self.nbytes > start:
                self.spans.append((start, (self.nbytes - start) // dtype.itemsize, _NUMPY[dtype]))
            self.nbytes = -(-self.nbytes // 64) * 64

    def _died(self, _: Any) -> None:
        self.dead = True  # the ids this plan goes by may soon mean other tensors

    def gradients(self) -> list[torch.Tensor]:
        """The leaves' gradients, to be laid in and taken out."""
        grads: list[Any] = [ref().grad for ref in self._refs]  # type: ignore[union-attr]
        return [torch.view_as_real(g) if g.is_complex() else g for g in grads] if self._complex else grads

    def odd(self) -> list[Any]:
        """The leaves whose gradients travel one by one."""
        return [ref() for ref in self._odd]

    def lay_in(self, exchange: Exchange, gradients: list[torch.Tensor]) -> None:
        """Copy gradients into this rank's inbox."""
        if self._generation != exchange.generation:
            self._inbox, self._result = self._views(exchange.inbox), self._views(exchange.result)
            self._generation = exchange.generation
        if gradients:
            torch._foreach_copy_(self._inbox, gradients)

    def take_out(self, gradients: list[torch.Tensor]) -> None:
        """Copy the averages into the gradients."""
        torch._foreach_copy_(gradients, self._result)

    def _views(self, buffer: np.ndarray) -> list[torch.Tensor]:
        flat = torch.from_numpy(buffer)
        return [flat[o : o + prod(s) * d.itemsize].view(d).view(s)
                for o, s, d in zip(self._offsets, self._shapes, self._carried, strict=True)]


def _carried(dtype: torch.dtype) -> torch.dtype:
    """In what precision a gradient crosses."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
