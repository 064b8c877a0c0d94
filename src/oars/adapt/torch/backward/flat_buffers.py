"""Where gradients, and weights, lie in the exchange's flat buffers."""

from __future__ import annotations

import weakref
import zlib
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oars.adapt.torch.context import ctx
from oars.exchange.allreduce import Exchange, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim.optimizer import Optimizer

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class Layout:
    """Tensors of these shapes behind each other, those of one precision together."""

    def __init__(self, shapes: list[tuple[int, ...]], kinds: list[torch.dtype]) -> None:
        self._tensors, self.nbytes = [(0, s, d) for s, d in zip(shapes, kinds, strict=True)], 0
        self.spans: list[Span] = []
        for dtype in _NUMPY:
            start = self.nbytes
            for i, (_, shape, of) in enumerate(self._tensors):
                if of is dtype:
                    self._tensors[i] = (self.nbytes, shape, of)
                    self.nbytes += prod(shape) * dtype.itemsize
            if self.nbytes > start:
                self.spans.append((start, (self.nbytes - start) // dtype.itemsize, _NUMPY[dtype]))
            self.nbytes = -(-self.nbytes // 64) * 64
        self.shapes = [(first, shape) for first, shape, _ in self._tensors]

    def spans_of(self, some: Iterable[int]) -> list[Span]:
        """Where these tensors lie, by their numbers."""
        found: list[Span] = []
        for first, shape, kind in sorted((self._tensors[i] for i in some), key=lambda t: t[0]):
            count, dtype = prod(shape), _NUMPY[kind]
            if found and found[-1][2] is dtype and found[-1][0] + found[-1][1] * kind.itemsize == first:
                found[-1] = (found[-1][0], found[-1][1] + count, dtype)
            elif count:
                found.append((first, count, dtype))
        return found

    def size_of(self, i: int) -> int:
        """Bytes of a tensor."""
        _, shape, kind = self._tensors[i]
        return prod(shape) * kind.itemsize

    def views(self, buffer: np.ndarray) -> list[torch.Tensor]:
        """The tensors that lie in a buffer."""
        flat = torch.from_numpy(buffer)
        return [flat[o : o + prod(s) * d.itemsize].view(d).view(s) for o, s, d in self._tensors]


class Packing:
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
        self.layout = laid_out(list(flat.values()))
        self.nbytes, self.spans, self.shapes = self.layout.nbytes, self.layout.spans, self.layout.shapes
        self._generation = -1
        self._inbox: list[torch.Tensor] = []
        self._result: list[torch.Tensor] = []

    def _died(self, _: weakref.ref) -> None:
        self.dead = True  # the ids by which this is found may soon mean other tensors

    def gradients(self) -> list[torch.Tensor]:
        """The leaves' gradients, to be laid in and taken out."""
        grads: list[Any] = [ref().grad for ref in self._refs]  # type: ignore[union-attr]
        return [torch.view_as_real(g) if g.is_complex() else g for g in grads] if self._complex else grads

    def leaf(self, i: int) -> Any:
        """The leaf in a place, if there is one."""
        return self._refs[i]()

    def values(self) -> int:
        """A digest of the leaves themselves; never 0."""
        every: list[Any] = [ref() for ref in (*self._refs, *self._odd)]
        return 1 << 32 | zlib.crc32(repr([digest_of(p) for p in every]).encode())

    def odd(self) -> list[Any]:
        """The leaves whose gradients travel one by one."""
        return [ref() for ref in self._odd]

    def lay_in(self, exchange: Exchange, gradients: list[torch.Tensor], some: list[int] | None = None) -> None:
        """Copy gradients into this rank's inbox: of all leaves, or of some, by their places in the plan.

        Without what was there before the backward: the sum of that and of a rank's part is rounded, differently on each
        rank, and a gradient that is zero on one process (a critic's last bias, fakes against samples) would not be.
        """
        if self._generation != exchange.generation:
            self._inbox, self._result = self.layout.views(exchange.inbox), self.layout.views(exchange.result)
            self._generation = exchange.generation
        if gradients:
            torch._foreach_copy_(self._inbox if some is None else [self._inbox[i] for i in some], gradients)
            for i, held in self.held(some):
                self._inbox[i].sub_(held.to("cpu"))

    def take_out(self, gradients: list[torch.Tensor]) -> None:
        """Copy the averages into the gradients."""
        torch._foreach_copy_(gradients, self._result)
        for i, held in self.held():
            gradients[i].add_(held)

    def held(self, some: list[int] | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """What leaves held before, equal on all ranks, by their places; not where it is zero or not finite."""
        base = ctx.gradients.base
        for i in () if not base else range(len(self._refs)) if some is None else some:
            if (known := base.get(id(self._refs[i]()))) is None:
                continue
            held = real(known[1])
            if held.layout is torch.strided and held.numel():
                low, high = held.aminmax()
                if -torch.inf < low <= high < torch.inf and (low < 0 or high > 0):
                    yield i, held


class Weights:
    """Tensors that are averaged themselves: one optimizer's parameters, or what else ranks have changed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.layout = laid_out(tensors)
        self.digest = zlib.crc32(repr([(tuple(t.shape), str(t.dtype)) for t in tensors]).encode())

    def lay_in(self, buffer: np.ndarray) -> None:
        """Copy them into a buffer."""
        with torch.no_grad():
            for view, tensor in zip(self.layout.views(buffer), self.tensors, strict=True):
                view.copy_(real(tensor))

    def take_out(self, buffer: np.ndarray) -> None:
        """Copy what is in a buffer into them."""
        with torch.no_grad():
            for view, tensor in zip(self.layout.views(buffer), self.tensors, strict=True):
                real(tensor).copy_(view)

    def distance(self, buffer: np.ndarray) -> float:
        """How far they are from what is in a buffer, relative to its length."""
        with torch.no_grad():
            views = self.layout.views(buffer)
            squares = sum(float((view - real(t).to("cpu", view.dtype)).square().sum())
                          for view, t in zip(views, self.tensors, strict=True))
            length = sum(float(view.square().sum()) for view in views)
        return (squares / length) ** 0.5 if length else 0.0


def weights_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """What an optimizer steps, in the order in which all ranks came by it: a script may give it in a set's, which is
    that of addresses."""
    every = [p for group in optimizer.param_groups for p in group["params"] if p.is_floating_point() or p.is_complex()]
    return sorted(every, key=ctx.gradients.serial) if ctx.world is not None else every


def digest_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that are equal to the bit."""
    flat = real(tensor.detach()).to("cpu").reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def laid_out(tensors: list[Any]) -> Layout:
    """Where tensors like these lie in a buffer."""
    return Layout([(*t.shape, 2) if t.is_complex() else tuple(t.shape) for t in tensors],
                  [carried(t.dtype) for t in tensors])


def carried(dtype: torch.dtype) -> torch.dtype:
    """In what precision a gradient crosses."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
