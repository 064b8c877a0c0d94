"""The mean of every rank's flat buffer, on every rank, to the bit the same.

Ranks of one host reduce in shared memory: each lays its buffer into its segment of a shared window, each sums its part
of all segments into one result, and all read that. Between hosts, ranks with the same place on their host sum their
part over MPI. Two meetings per exchange: one to agree on what is exchanged, one when the result is complete.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oars.engine.world import World

_BLOCK = 1 << 16  # elements summed at a time, so that they stay in the core's cache


class Exchange:
    """Averages ``inbox`` over ranks into ``result``; both are shared memory, typed views of the same layout."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.capacity = 0
        self.generation = 0  # grows whenever buffers move: views of them must be made anew
        self.inbox = np.empty(0, np.uint8)
        self.result = np.empty(0, np.uint8)
        self._segments: list[np.ndarray] = []
        self._windows: list[Any] = []
        local = world.allgather(world.local_size)
        self._even = len(set(local)) == 1
        hosts = world.size != world.local_size
        # Between hosts: all places in step where hosts have equally many ranks, else the first of each host for all.
        place = world.local_rank if self._even else min(world.local_rank, 1)
        self._across = world.comm.Split(place, world.rank) if hosts else None

    def agree(self, header: np.ndarray) -> np.ndarray:
        """Every rank's header (int64), one line a rank. No rank goes on before all are here."""
        return self.world.allgather_alike(header)

    def reserve(self, nbytes: int) -> None:
        """Make room for ``nbytes`` in every buffer; all ranks ask for the same."""
        if nbytes <= self.capacity:
            return
        from mpi4py import MPI

        for window in self._windows:
            window.Free()
        node = self.world.node
        self.capacity = -(-max(nbytes, 1 << 16) // 4096) * 4096
        mine = MPI.Win.Allocate_shared(self.capacity, 1, comm=node)
        shared = MPI.Win.Allocate_shared(self.capacity if node.rank == 0 else 0, 1, comm=node)
        self._windows = [mine, shared]
        self._segments = [np.asarray(mine.Shared_query(r)[0], np.uint8) for r in range(node.size)]
        self.inbox = self._segments[node.rank]
        self.result = np.asarray(shared.Shared_query(0)[0], np.uint8)
        self.generation += 1

    def average(self, spans: list[tuple[int, int, Any]]) -> None:
        """Average these spans (first byte, elements, dtype) of all inboxes; every rank has agreed before."""
        for start, count, dtype in spans:
            self._average_span(start, count, np.dtype(dtype))
        self.world.barrier_on_node()

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
            self._across.Allreduce(MPI.IN_PLACE, own)
            np.multiply(own, share, out=own)
