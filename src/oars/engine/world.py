"""World: the ranks of a run and the collectives they share, in MPI's words.

``World.over_mpi()`` joins the MPI job this process was started in. Every collective adds the time it took to
``seconds``, so that a run can say what share of its time went into talking.

MPI spins while it waits. Where there are more ranks than cores that takes the core from the very rank that is waited
for, so there a *patient* world looks a few times and then sleeps between looks.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from oars.engine.board import Board


class World:
    """All ranks of a run. Collectives must be called by every rank, in the same order."""

    def __init__(self, comm: Any, board: Board, patient: bool = False) -> None:
        from mpi4py import MPI

        self.board = board
        self.patient = patient

        self._mpi = MPI
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank: int = self.node.rank
        self.local_size: int = self.node.size
        self.seconds = 0.0

    @classmethod
    def over_mpi(cls, board: Board, patient: bool = False) -> World:
        """The world of the MPI job this process belongs to."""
        from mpi4py import MPI

        return cls(MPI.COMM_WORLD, board, patient)

    def _wait(self, request: Any) -> None:
        for _ in range(20):
            if request.Test():
                return
            os.sched_yield()
        while not request.Test():
            time.sleep(2e-5)

    def allreduce(self, array: np.ndarray) -> np.ndarray:
        """Sum ``array`` over all ranks, in place, and return it."""
        self.board.enter("allreduce")
        began = time.perf_counter()
        if self.patient:
            self._wait(self.comm.Iallreduce(self._mpi.IN_PLACE, array))
        else:
            self.comm.Allreduce(self._mpi.IN_PLACE, array)
        self.seconds += time.perf_counter() - began
        self.board.leave()
        return array

    def allgather_rows(self, rows: np.ndarray, counts: list[int], whole: np.ndarray) -> None:
        """Concatenate every rank's ``rows`` (C-contiguous; rank r holds ``counts[r]`` of them) into ``whole``."""
        self.board.enter("allgather_rows")
        began = time.perf_counter()
        width = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
        row_type = self._mpi.BYTE.Create_contiguous(width).Commit()
        try:
            starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).tolist()
            self.comm.Allgatherv([rows, len(rows), row_type], [whole, counts, starts, row_type])
        finally:
            row_type.Free()
        self.seconds += time.perf_counter() - began
        self.board.leave()

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (any picklable object), in rank order."""
        self.board.enter("allgather")
        began = time.perf_counter()
        values = self.comm.allgather(value)
        self.seconds += time.perf_counter() - began
        self.board.leave()
        return values

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """``root``'s value, on every rank."""
        self.board.enter("broadcast")
        began = time.perf_counter()
        value = self.comm.bcast(value, root)
        self.seconds += time.perf_counter() - began
        self.board.leave()
        return value

    def allgather_alike(self, mine: np.ndarray) -> np.ndarray:
        """Every rank's ``mine``, one line a rank; all have the same shape."""
        self.board.enter("allgather_alike")
        began = time.perf_counter()
        every = np.empty((self.size, *mine.shape), mine.dtype)
        if self.patient:
            self._wait(self.comm.Iallgather(mine, every))
        else:
            self.comm.Allgather(mine, every)
        self.seconds += time.perf_counter() - began
        self.board.leave()
        return every

    def barrier_on_node(self) -> None:
        """Wait until every rank of this host is here."""
        self.board.enter("barrier")
        began = time.perf_counter()
        if self.patient:
            self._wait(self.node.Ibarrier())
        else:
            self.node.Barrier()
        self.seconds += time.perf_counter() - began
        self.board.leave()
