"""The mean of every rank's flat buffer, on every rank, to the bit the same.

Ranks of one host reduce in shared memory: each lays its buffer into its own segment, each sums its part of all
segments into one result, and all read that. Between hosts, ranks with the same place on their host average their part
over MPI (``across.py``); where hosts have unequally many ranks, as many of each do that as the smallest has. Two
meetings per exchange: one to agree on what is exchanged, one when the result is complete.

The memory is anonymous (``memfd``): other ranks open it through /proc, and nothing stays behind, however a rank ends.
"""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from time import sleep  # as it is now: scripts are given another clock later
from typing import Any

import numpy as np

from oars.engine.world import World
from oars.exchange.across import MOST, Across

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
        self.overlaps = self._several()  # whether parts of it gain by leaving before all is there
        self.across: Across | None = None  # how this rank averages with other hosts, if it does
        self.laid = np.empty(0, np.int64)  # what ranks of this host have laid in, by their places; see ``early.py``
        self._segments: list[np.ndarray] = []
        self._places = 0  # so many ranks of each host average with other hosts; 0: there are none
        self._comm: Any = None  # of which ranks these are buffers: another one after every loss

    def agree(self, header: np.ndarray) -> np.ndarray:
        """Every rank's header (int64), one line a rank. No rank goes on before all are here."""
        return self.world.allgather_alike(header)

    def holds(self, nbytes: int) -> bool:
        """Whether buffers of that size can be used as they are."""
        return nbytes <= self.capacity and self._comm is self.world.comm

    def reserve(self, nbytes: int) -> None:
        """Make room for ``nbytes`` in every buffer; all ranks ask for the same."""
        self.forsake()
        world = self.world
        capacity = -(-max(nbytes, 1 << 16) // 4096) * 4096
        # The first of a host has the result as well, and behind it a cache line for each rank.
        mine = _Memory(capacity if world.local_rank else 2 * capacity + 64 * world.local_size)
        every = world.allgather((world.node, mine.path))
        on_host = [path for node, path in every if node == world.node]
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
        self.result = views[0][capacity : 2 * capacity]
        self.laid = views[0][2 * capacity :].view(np.int64)[::8]
        self.across, self._places, self.overlaps = None, 0, self._several()
        if world.size != world.local_size:
            self._places = min(Counter(node for node, _ in every).values())
            comm = world.split(min(world.local_rank, self._places))
            if world.local_rank < self._places:
                self.across = Across(world, comm)
        self.capacity, self._comm = capacity, world.comm
        self.generation += 1

    def _several(self) -> bool:
        world = self.world
        return not self.lossy and 1 < len({world.node_of[rank] for rank in world.members}) <= MOST

    def forsake(self) -> None:
        """What is under way is of no use any more, on any rank. These buffers are not used again."""
        if self.across is not None and (left := self.across.abandon()):
            self.world.abandoned.append((left, self.inbox, self.result))
        self._comm = None

    def average(self, spans: list[Span], shapes: list[tuple[int, tuple[int, ...]]] | None = None,
                of: Hashable = None) -> None:
        """Average these spans (first byte, elements, dtype) of all inboxes; every rank has agreed before.

        For who makes use of it (``compressed.py``): the tensors in them (first byte, shape), and whose they are.
        """
        def work() -> None:
            try:
                for span in spans:
                    self.begin(span)
                self.wait()
            except Exception:
                self.forsake()
                raise

        self.world.together("exchange", work)
        self.world.exchanged += sum(count * np.dtype(dtype).itemsize for _, count, dtype in spans)

    def begin(self, span: Span) -> None:
        """Average this rank's part of a span: at once, or, with other hosts, what is there when ``wait`` is over. All
        ranks of this host have laid it in. Its numbers in the inbox are of no use afterwards."""
        start, count, dtype = span[0], span[1], np.dtype(span[2])
        stop = start + count * dtype.itemsize
        parts = [s[start:stop].view(dtype) for s in self._segments]
        result = self.result[start:stop].view(dtype)
        n, r = self._places or self.world.local_size, self.world.local_rank
        if r >= n:
            return
        line = 64 // dtype.itemsize  # parts begin at cache lines, so that no two ranks write to one
        lines = -(-count // line)
        low, high = lines * r // n * line, min(lines * (r + 1) // n * line, count)
        with np.errstate(all="ignore"):  # what the script has NumPy raise is for its own numbers
            if self.across is None:
                _sum(parts, result, low, high, dtype.type(1) / dtype.type(self.world.size))
                return
            if len(parts) > 1:  # no other rank looks at our part of our inbox
                _sum(parts, parts[r], low, high)
        if self.across.hosts <= MOST:
            self.across.start(parts[r][low:high], result[low:high])
        else:
            self.across.allreduce(parts[r][low:high], result[low:high])

    def wait(self) -> None:
        """Wait until what this rank has begun is in the result. Between hosts that takes its time: nobody spins."""
        tries = 0
        while self.across is not None and not self.across.poll():
            tries += 1
            if tries > 20:
                sleep(2e-5)
            else:
                os.sched_yield()


def _sum(parts: list[np.ndarray], into: np.ndarray, low: int, high: int, share: Any = None) -> None:
    """The sum of all parts from ``low`` to ``high``, or a share of it; ``into`` may be one of them."""
    room = np.empty(min(_BLOCK, high - low), into.dtype) if len(parts) > 1 and share is None else into
    for b in range(low, high, _BLOCK):
        e = min(b + _BLOCK, high)
        out = into[b:e] if room is into else room[: e - b]
        if len(parts) == 1:
            np.copyto(out, parts[0][b:e])
        else:
            np.add(parts[0][b:e], parts[1][b:e], out=out)
        for part in parts[2:]:
            np.add(out, part[b:e], out=out)
        if share is not None:
            np.multiply(out, share, out=out)
        elif room is not into:
            np.copyto(into[b:e], out)


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
