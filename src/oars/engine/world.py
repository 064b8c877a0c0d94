"""World: the ranks of a run and the collectives they share, in MPI's words.

``World.over_mpi()`` joins the MPI job this process was started in. Every collective adds the time it took to
``seconds``, so that a run can say what share of its time went into talking.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class World:
    """All ranks of a run. Collectives must be called by every rank, in the same order."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank: int = self.node.rank
        self.local_size: int = self.node.size
        self.seconds = 0.0
        self._ops = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "or": MPI.BOR, "and": MPI.BAND}

    @classmethod
    def over_mpi(cls) -> World:
        """The world of the MPI job this process belongs to."""
        from mpi4py import MPI

        return cls(MPI.COMM_WORLD)

    def allreduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """Combine ``array`` over all ranks, in place, and return it."""
        began = time.perf_counter()
        self.comm.Allreduce(self._mpi.IN_PLACE, array, self._ops[op])
        self.seconds += time.perf_counter() - began
        return array

    def allgather_rows(self, rows: np.ndarray, counts: list[int], whole: np.ndarray) -> None:
        """Concatenate every rank's ``rows`` (C-contiguous; rank r holds ``counts[r]`` of them) into ``whole``."""
        began = time.perf_counter()
        width = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
        row_type = self._mpi.BYTE.Create_contiguous(width).Commit()
        try:
            starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).tolist()
            self.comm.Allgatherv([rows, len(rows), row_type], [whole, counts, starts, row_type])
        finally:
            row_type.Free()
        self.seconds += time.perf_counter() - began

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (any picklable object), in rank order."""
        began = time.perf_counter()
        values = self.comm.allgather(value)
        self.seconds += time.perf_counter() - began
        return values

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """``root``'s value, on every rank."""
        began = time.perf_counter()
        value = self.comm.bcast(value, root)
        self.seconds += time.perf_counter() - began
        return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        began = time.perf_counter()
        self.comm.Barrier()
        self.seconds += time.perf_counter() - began

    def abort(self, code: int) -> None:
        """End every rank of the job at once."""
        self.comm.Abort(code)
