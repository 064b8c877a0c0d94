"""Are the ranks' weights the same, to the bit? A few bytes a step tell, for the ranks are equal by construction.

The state is looked at as bytes, in *blocks*. At every exchange of gradients each rank hashes some blocks, and the hash
travels with what the ranks agree on anyway. How many blocks is chosen by all ranks alike, from the time that the last
looks took and the time between exchanges: no more than ``SHARE`` of it goes into looking. A *round* is once through all
blocks: what differs is found within one. Where all of it can be looked at in that share of one step, it is.

The hash folds a block into lines by xor, at the speed of memory, and mixes the lines with odd numbers, so that one
changed bit always changes it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from oars.engine.world import World

SHARE = 0.0025  # of the time
BLOCK = 1 << 18  # bytes: what is looked at in one piece
_LINE = 512  # numbers of 8 bytes
_SMALL = 1 << 12  # bytes: up to here a checksum is faster
_MASK = (1 << 64) - 1
_ODD = np.random.Generator(np.random.PCG64(22)).integers(0, 1 << 63, _LINE, dtype=np.uint64) * 2 + 1
_MIX = 0x9E3779B97F4A7C15
_EACH, _BYTE = 600.0, 0.04  # ns that a block and a byte take, to begin with: what is measured is taken relative to it


def digest(data: np.ndarray, start: int = 0) -> int:
    """64 bits that depend on every bit of these bytes (uint8), and on where it is."""
    if data.nbytes <= _SMALL:
        return (zlib.crc32(data.data, start & 0xFFFFFFFF) + (start << 1) * _MIX) & _MASK
    whole = data.nbytes // (8 * _LINE) * 8 * _LINE
    lines = data[:whole].view(np.uint64) if data.ctypes.data % 8 == 0 else data[:whole].copy().view(np.uint64)
    folded = np.bitwise_xor.reduce(lines.reshape(-1, _LINE), axis=0)
    found = int((folded * _ODD).sum(dtype=np.uint64))
    if whole != data.nbytes:
        found += zlib.crc32(data[whole:].data) << 1
    return (start * _MIX + found) & _MASK


class Line(NamedTuple):
    """What a rank says at an exchange, as numbers that travel with its header."""

    hash: int  # of what it looked at
    spent: int  # ns, on looking
    passed: int  # ns since the exchange before
    asks: int  # whether it wants all to be looked at next time


class Rounds:
    """Which blocks are looked at at the next exchange; the same on every rank, for it comes from what all received."""

    def __init__(self, every: int = 0) -> None:
        self.every = every  # exchanges between two looks at all of it; 0: as the time allows
        self.begin([])

    def begin(self, sizes: list[int]) -> None:
        """The blocks are these, by their bytes; a new round begins."""
        self.costs, self.factor = [_EACH + _BYTE * nbytes for nbytes in sizes], 1.0  # as ranks have it that join
        self.at, self.count, self.credit, self._whole = 0, 0, 0.0, sum(self.costs)
        self.all_next = False
        self._chosen: range = range(0)

    def choose(self) -> range:
        """The blocks to be looked at now: those from here on for which there is time, or all."""
        self.count += 1
        n = len(self.costs)
        if self.all_next or (self.every and self.count % self.every == 0):
            self._chosen = range(n)
        elif self.every:
            self._chosen = range(0)
        else:
            stop, left = self.at, self.credit
            while stop < n and (left := left - self.costs[stop] * self.factor) >= 0:
                stop += 1
            self._chosen = range(self.at, stop)
        return self._chosen

    def learn(self, lines: list[list[int]]) -> bool:
        """Every rank's ``Line``, by rank. Whether a round is over with this."""
        spent, passed = max(line[1] for line in lines), max(line[2] for line in lines)
        looked = sum(self.costs[i] for i in self._chosen)
        if looked and spent:
            self.factor += 0.2 * (min(100.0, max(0.1, spent / looked)) - self.factor)
        whole = self._whole * self.factor
        used = 0.0 if self.all_next else looked * self.factor  # what was asked for is not counted
        self.credit = min(self.credit + SHARE * passed, whole) - used
        self.all_next = any(line[3] for line in lines)
        if not len(self._chosen):
            return False
        self.at = self._chosen.stop % len(self.costs)
        return self.at == 0


def judged(hashes: list[dict[str, int]]) -> dict[str, tuple[int | None, list[int]]]:
    """What differs, by name: a rank that has it right (None: nobody knows), and those that have it otherwise.

    ``hashes``: of every rank, what it has under each name. Right is what more ranks have than anything else, and at
    least two. What some rank does not have is not judged.
    """
    found: dict[str, tuple[int | None, list[int]]] = {}
    for name in hashes[0]:
        if not all(name in of for of in hashes):
            continue
        votes = Counter(of[name] for of in hashes).most_common(2)
        if len(votes) == 1:
            continue
        (first, most), (_, second) = votes
        clear = most > max(1, second)
        right = next(r for r, of in enumerate(hashes) if of[name] == first) if clear else None
        found[name] = right, [r for r, of in enumerate(hashes) if of[name] != first] if clear else list(
            range(len(hashes)))
    return found


def broadcast(world: World, data: np.ndarray, source: int) -> None:
    """These bytes, as rank ``source`` has them, on every rank."""
    for start in range(0, data.nbytes, 1 << 24):
        part = data[start : start + (1 << 24)]
        if world.rank != source:
            part[:] = 0
        world.allreduce(part)
