"""The mean of every rank's flat buffer, on every rank, to the bit the same.

Ranks of one host reduce in shared memory: each lays its buffer into its own segment, each sums its part of all
segments into one result, and all read that. Between hosts, ranks with the same place on their host sum their part over
MPI. Two meetings per exchange: one to agree on what is exchanged, one when the result is complete.

The memory is anonymous (``memfd``): other ranks open it through /proc, and nothing stays behind, however a rank ends.
"""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from oars.engine.world import World

_BLOCK = 1 << 16  # elements summed at a time, so that they stay in the core's cache

Span = tuple[int, int, Any]  # of a flat buffer: first byte, elements, dtype


class Exchange:
    """Averages ``inbox`` over ranks into ``result``; both are shared memory, typed views of the same layout."""

    lossy = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.capacity = 0
        self.generation = 0  # grows whenever buffers move: views of them must be made anew
        self.inbox = np.empty(0, np.uint8)
        self.result = np.empty(0, np.uint8)
        self._segments: list[np.ndarray] = []
        self._comm: Any = None  # of which ranks these are buffers: another one after every loss

    def agree(self, header: np.ndarray) -> np.ndarray:
        """Every rank's header (int64), one line a rank. No rank goes on before all are here."""
        return self.world.allgather_alike(header)

    def holds(self, nbytes: int) -> bool:
        """Whether buffers of that size can be used as they are."""
        return nbytes <= self.capacity and self._comm is self.world.comm

    def reserve(self, nbytes: int) -> None:
        """Make room for ``nbytes`` in every buffer; all ranks ask for the same."""
        world = self.world
        capacity = -(-max(nbytes, 1 << 16) // 4096) * 4096
        mine = _Memory(capacity * (2 if world.local_rank == 0 else 1))  # the first of a host has the result as well
        every = world.allgather((world.local_size, world.node, mine.path))
        on_host = [path for _, node, path in every if node == world.node]
        problem = None
        try:
            views = [mine.view if path == mine.path else _Memory(0, path).view for path in on_host]
        except OSError as error:  # its owner died, or we may not look into /proc
            problem = error
        world.allgather(None)  # all have it open: the paths may go
        mine.forget()
        if problem is not None:
            raise problem
        self._segments = [view[:capacity] for view in views]
        self.inbox = self._segments[world.local_rank]
        self.result = views[0][capacity:]
        self._even = len({size for size, _, _ in every}) == 1
        self._across = None
        if world.size != world.local_size:
            # Between hosts: all places in step where hosts have equally many ranks, else the first of each for all.
            place = world.local_rank if self._even else min(world.local_rank, 1)
            self._across = world.split(place)
        self.capacity, self._comm = capacity, world.comm
        self.generation += 1

    def average(self, spans: list[Span], shapes: list[tuple[int, tuple[int, ...]]] | None = None,
                of: Hashable = None) -> None:
        """Average these spans (first byte, elements, dtype) of all inboxes; every rank has agreed before.

        For who makes use of it (``compressed.py``): the tensors in them (first byte, shape), and whose they are.
        """
        def work() -> None:
            with np.errstate(all="ignore"):  # what the script has NumPy raise is for its own numbers
                for start, count, dtype in spans:
                    self._average_span(start, count, np.dtype(dtype))

        self.world.together("exchange", work)
        self.world.exchanged += sum(count * np.dtype(dtype).itemsize for _, count, dtype in spans)

    def _average_span(self, start: int, count: int, dtype: np.dtype) -> None:
        stop = start + count * dtype.itemsize
        parts = [s[start:stop].view(dtype) for s in self._segments]
        result = self.result[start:stop].view(dtype)
        n, r = self.world.local_size, self.world.local_rank
        if self._across is not None and not self._even:
            n, r = 1, r  # the first rank of each host does it all
        if r >= n:
            return
        line = 64 // dtype.itemsize  # parts begin at cache lines, so that no two ranks write to one
        lines = -(-count // line)
        low, high = lines * r // n * line, min(lines * (r + 1) // n * line, count)
        share = dtype.type(1) / dtype.type(self.world.size)
        for b in range(low, high, _BLOCK):
            e = min(b + _BLOCK, high)
            out = result[b:e]
            if len(parts) == 1:
                np.copyto(out, parts[0][b:e])
            else:
                np.add(parts[0][b:e], parts[1][b:e], out=out)
            for part in parts[2:]:
                np.add(out, part[b:e], out=out)
            if self._across is None:
                np.multiply(out, share, out=out)
        if self._across is not None:
            from mpi4py import MPI

            own = result[low:high]
            self.world.sent += own.nbytes
            self._across.Allreduce(MPI.IN_PLACE, own)
            np.multiply(own, share, out=own)


@contextmanager
def _no_limit() -> Iterator[None]:
    """A limit for the sizes of files, which the script may have set, holds for memory like ours too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class _Memory:
    """Memory that other processes of this host can map: made here, or opened by the path another rank gave."""

    def __init__(self, nbytes: int, path: str | None = None) -> None:
        self._named = ""
        if path is not None:
            fd = os.open(path, os.O_RDWR)
        elif hasattr(os, "memfd_create"):
            fd = os.memfd_create("oars", os.MFD_CLOEXEC)
        else:
            fd, self._named = tempfile.mkstemp(prefix="oars-")
        if path is None:
            with _no_limit():
                os.ftruncate(fd, nbytes)
        self._map = mmap.mmap(fd, 0)
        self.view = np.frombuffer(self._map, np.uint8)
        self._fd = fd if path is None else -1
        self.path = path or self._named or f"/proc/{os.getpid()}/fd/{fd}"
        if path is not None:
            os.close(fd)

    def forget(self) -> None:
        """Everybody who needs it has it open."""
        os.close(self._fd)
        if self._named:
            os.unlink(self._named)


def span_of(buffer: np.ndarray, span: Span) -> np.ndarray:
    """The numbers of a span of a buffer."""
    start, count, dtype = span
    return buffer[start : start + count * np.dtype(dtype).itemsize].view(dtype)
