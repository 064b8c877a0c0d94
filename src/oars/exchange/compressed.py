"""The mean of every rank's buffer from fewer bytes: ``--wire``.

Every rank codes its own buffer, all send the codes to all, and each adds up what they mean, in the same order: so the
mean is, to the bit, the same everywhere. What a code has lost is kept by the rank that coded, and added the next time;
nothing is lost for good, it comes later.

``powersgd:R`` sends two thin matrices for each large one (Vogels et al. 2019): M is near P Qᵀ, with Q from the last
time, P = M Q averaged over ranks and made orthogonal, then Q = Mᵀ P averaged. What is no matrix, or too small a one to
gain from it, travels as it is.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

import numpy as np

from oars.engine.world import World
from oars.exchange.allreduce import Exchange, Span, span_of
from oars.exchange.codes import Code, code_of

Shapes = list[tuple[int, tuple[int, ...]]]  # first byte and shape of each tensor in the buffers


class Compressed(Exchange):
    """An exchange whose averages travel in fewer bytes. Its buffers are this rank's own."""

    lossy = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.left: dict[tuple, np.ndarray] = {}  # what codes have lost, by what is averaged together

    def reserve(self, nbytes: int) -> None:
        """Make room for ``nbytes``."""
        self.capacity = -(-max(nbytes, 1 << 16) // 4096) * 4096
        self.inbox, self.result = np.zeros(self.capacity, np.uint8), np.zeros(self.capacity, np.uint8)
        self._comm = self.world.comm
        self.generation += 1

    def average(self, spans: list[Span], shapes: Shapes | None = None, of: Hashable = None) -> None:
        """As Exchange's; what it leaves in ``result`` is the mean of what the codes mean."""
        if not spans:
            return
        key = (of, *((start, count) for start, count, _ in spans))
        mine = np.concatenate([span_of(self.inbox, span).astype(np.float32, copy=False) for span in spans])
        if key in self.left:
            mine += self.left[key]
        mean, meant = self._mean(mine, spans, shapes or [])
        left = mine - meant
        np.nan_to_num(left, copy=False, nan=0, posinf=0, neginf=0)  # what was not finite has been reported
        self.left[key] = left  # only now: an average that met a death is done again
        at = 0
        for span in spans:
            span_of(self.result, span)[:] = mean[at : at + span[1]]
            at += span[1]

    def _mean(self, mine: np.ndarray, spans: list[Span], shapes: Shapes) -> tuple[Any, Any]:
        """The mean over ranks of what was sent, and what this rank's own part of it means."""
        raise NotImplementedError


class Coded(Compressed):
    """Every value by a code: ``fp16``, ``bf16``, ``int8``, ``topk``."""

    def __init__(self, world: World, code: Code) -> None:
        super().__init__(world)
        self._code = code

    def _mean(self, mine: np.ndarray, spans: list[Span], shapes: Shapes) -> tuple[Any, Any]:
        data = self._code.encode(mine)
        every = self.world.allgather_alike(data)
        mean = np.zeros(len(mine), np.float32)
        for line in every:
            mean += self._code.decode(line, len(mine))
        mean /= np.float32(len(every))
        return mean, self._code.decode(data, len(mine))


class LowRank(Compressed):
    """``powersgd:R``."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world)
        self.rank = rank
        self._bases: dict[tuple, np.ndarray] = {}  # Q of each matrix, by where it lies

    def _mean(self, mine: np.ndarray, spans: list[Span], shapes: Shapes) -> tuple[Any, Any]:
        places = _places(spans, shapes)
        matrices = [(at, shape) for at, shape in places if self._pays(shape)]
        rest = np.ones(len(mine), bool)
        for at, shape in matrices:
            rest[at : at + prod(shape)] = False
        views = [mine[at : at + prod(shape)].reshape(shape) for at, shape in matrices]
        keys = [(len(mine), at, *shape) for at, shape in matrices]
        bases = [self._bases[k] if k in self._bases else _start(k, self.rank) for k in keys]
        ps = [m @ q for m, q in zip(views, bases, strict=True)]
        message = self._summed(np.concatenate([*(p.reshape(-1) for p in ps), mine[rest]]))
        mean = np.zeros(len(mine), np.float32)
        mean[rest] = message[len(message) - int(rest.sum()) :]
        meant = np.where(rest, mine, np.float32(0))
        at, halves = 0, []
        for p in ps:
            halves.append(_orthogonal(message[at : at + p.size].reshape(p.shape)))
            at += p.size
        qs = [m.T @ p for m, p in zip(views, halves, strict=True)]
        message = self._summed(np.concatenate([*(q.reshape(-1) for q in qs), np.zeros(1, np.float32)]))
        at = 0
        for key, (first, shape), p, q in zip(keys, matrices, halves, qs, strict=True):
            every = message[at : at + q.size].reshape(q.shape)
            mean[first : first + prod(shape)] = (p @ every.T).reshape(-1)
            meant[first : first + prod(shape)] = (p @ q.T).reshape(-1)
            self._bases[key] = every
            at += q.size
        return mean, meant

    def _pays(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and self.rank * (shape[0] + shape[1]) < prod(shape) / 2

    def _summed(self, values: np.ndarray) -> np.ndarray:
        return self.world.allreduce(np.ascontiguousarray(values, np.float32)) / np.float32(self.world.size)


def _places(spans: list[Span], shapes: Shapes) -> list[tuple[int, tuple[int, int]]]:
    """For each tensor of two dimensions or more: its first element among those of all spans, and it as a matrix."""
    places = []
    at = 0
    for start, count, dtype in spans:
        width = np.dtype(dtype).itemsize
        for first, shape in shapes:
            if start <= first < start + count * width and len(shape) > 1 and 0 not in shape:
                places.append((at + (first - start) // width, (shape[0], prod(shape[1:]))))
        at += count
    return places


def _start(key: tuple, rank: int) -> np.ndarray:
    """The first Q of a matrix, the same on every rank."""
    return np.random.Generator(np.random.PCG64(list(key))).standard_normal((key[-1], rank), dtype=np.float32)


def _orthogonal(p: np.ndarray) -> np.ndarray:
    """Columns of length 1 at right angles to each other (Gram and Schmidt), or of nothing."""
    p = p.astype(np.float64)
    for i in range(p.shape[1]):
        for j in range(i):
            p[:, i] -= (p[:, j] @ p[:, i]) * p[:, j]
        length = np.linalg.norm(p[:, i])
        p[:, i] /= length if length > 1e-12 else np.inf
    return p.astype(np.float32)


def exchange_by(world: World, wire: str) -> Exchange:
    """The exchange for a checked ``--wire``."""
    if wire == "fp32":
        return Exchange(world)
    kind, _, value = wire.partition(":")
    return LowRank(world, int(value)) if kind == "powersgd" else Coded(world, code_of(wire))
