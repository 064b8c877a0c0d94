"""What the ranks say to each other for Keras and TensorFlow: NumPy arrays in, NumPy arrays out.

Here a tensor of the script is the global one on every rank. Inside a model's call a rank computes on its own rows of
it, and the results are joined again. The convention of gradients is PyTorch's (``adapt/torch/wire.py``): of a tensor
that all ranks hold alike the true gradient is the mean of the ranks' gradients, of rows a rank holds N times its own.

Every result is, to the bit, the same on all ranks. A message that meets a death raises ``RankLost``; inside compiled
code, which cannot be left, nothing more is said until the step has run to its end and is done again (``quiet``).
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from oars.engine.world import RankLost, World
from oars.exchange.allreduce import Exchange

_SMALL = 1 << 15  # bytes that every rank takes from every other and sums by itself


class Apart(Exception):
    """Ranks came to different places of the script, or hold other data. Shown as one line."""


class Meet:
    """The ranks of a run, as an adapter of Keras or TensorFlow sees them. ``meet`` is the only instance."""

    def __init__(self) -> None:
        self.world: Any = None
        self.record: Any = None
        self.plan: dict = {}
        self.rank, self.size = 0, 1
        self.lost = False  # a rank died in a compiled step: its results are void
        self.era = 0  # how often ranks were lost
        self.fitting = False  # in a step of ``fit``, which tells the record by itself
        self.inside = 0  # in a call that runs on own rows, or one that is whole: nothing in it is cut
        self.split: Any = None  # ... and the share of it, if it is one on own rows
        self.calls = 0  # on own rows, so far
        self.partial = False  # some of these give gradients that are not yet the mean over ranks
        self.leads = False  # no other adapter recovers from losses
        self._exchange: Any = None

    def start(self, world: World, plan: dict, record: Any) -> None:
        """Take part in ``world``."""
        self.world, self.plan, self.record = world, plan, record
        if world.phase is str:  # else PyTorch's adapter is there, and this one is imported by some library
            world.adopt()
            world.phase = lambda: "step"
            self.leads = True
        self.rank, self.size, self.era = world.rank, world.size, world.era
        self._exchange = Exchange(world)

    def check_plan(self) -> None:
        """Ranks keep together by fp32 gradients of every step here; a run that wants another way is not for us."""
        for option, usual in (("sync", "allreduce"), ("wire", "fp32")):
            if (wanted := self.plan.get(option, usual)) != usual:
                raise SystemExit(f"oars: --{option} {wanted} is for PyTorch's own loops: leave it out with Keras and "
                                 "TensorFlow")

    def renew(self) -> None:
        """After a loss: from here on batches are cut for the ranks that are left."""
        self.world.adopt()
        self.rank, self.size, self.era = self.world.rank, self.world.size, self.world.era
        self.lost = False

    def own(self, rows: int) -> tuple[int, int]:
        """This rank's first row of ``rows`` and how many it has: contiguous, differing by at most one."""
        each, more = divmod(rows, self.size)
        return self.rank * each + min(self.rank, more), each + (self.rank < more)

    def computed(self, rows: int) -> tuple[int, int]:
        """The same, but a rank without rows computes on a stand-in, whose result is dropped."""
        first, count = self.own(rows)
        return (first, count) if count or not rows else (min(first, rows - 1), 1)

    # -- messages

    def quiet(self, message: Any, *args: Any) -> Any:
        """``message``, from within compiled code: after a loss, zeros of the right shape instead."""
        if not self.lost:
            try:
                return message(*args)
            except RankLost:
                self.lost = True
        return None

    def current(self, era: int) -> None:
        """Rows from before a loss are of no use, whoever noticed it: another adapter may have gone on already."""
        if era != self.world.era:
            raise RankLost

    def gather(self, rows: np.ndarray, total: int) -> np.ndarray:
        """Every rank's rows, joined; this rank's are the first of ``rows`` (the rest is a stand-in)."""
        self.current(self.era)
        counts = [total // self.size + (r < total % self.size) for r in range(self.size)]
        if len(rows) != max(counts[self.rank], 1):
            raise Apart(f"a model gave {len(rows)} rows for {counts[self.rank]}: its rows are not those of its input")
        mine = np.ascontiguousarray(rows[: counts[self.rank]])
        whole = np.empty((total, *rows.shape[1:]), rows.dtype)
        width = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
        if width and total:
            self.world.allgather_rows(_bytes(mine, width), counts, _bytes(whole, width))
        return whole

    def concat(self, rows: np.ndarray) -> np.ndarray:
        """Every rank's rows, joined; each knows only how many it has itself."""
        self.current(self.era)
        counts = self.world.allgather_alike(np.array([len(rows)]))[:, 0].tolist()
        whole = np.empty((sum(counts), *rows.shape[1:]), rows.dtype)
        width = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
        if width and len(whole):
            self.world.allgather_rows(_bytes(np.ascontiguousarray(rows), width), counts, _bytes(whole, width))
        return whole

    def same(self, *arrays: np.ndarray) -> bool:
        """Whether all ranks hold the same, to the bit."""
        self.current(self.era)
        mine = functools.reduce(lambda crc, array: zlib.crc32(array.tobytes(), crc), arrays, 0)
        told = self.world.allgather_alike(np.array([mine, sum(array.nbytes for array in arrays)]))
        return bool((told == told[0]).all())

    def total(self, array: np.ndarray) -> np.ndarray:
        """Summed over ranks."""
        self.current(self.era)
        if array.nbytes <= _SMALL:
            return self.world.allgather_alike(np.ascontiguousarray(array)).sum(0, dtype=array.dtype)
        return self.mean(array) * array.dtype.type(self.size)

    def gradients(self, array: np.ndarray) -> np.ndarray:
        """Averaged over ranks, and a step for the record, unless ``fit`` counts."""
        self.check_plan()
        averaged = self.mean(array)
        if not self.fitting:
            self.record.step(None, 0)
        return averaged

    def mean(self, array: np.ndarray) -> np.ndarray:
        """Averaged over ranks, in shared memory where they share a host."""
        self.current(self.era)
        exchange, nbytes, flat = self._exchange, array.nbytes, array.reshape(-1)
        ready = exchange.holds(nbytes)
        if ready:
            exchange.inbox[:nbytes].view(array.dtype)[:] = flat
        told = exchange.agree(np.array([nbytes, array.dtype.num, ready]))  # behind it, all inboxes are filled
        if (told[:, :2] != told[0, :2]).any():
            raise Apart(f"the ranks exchange arrays of different sizes ({sorted(set(told[:, 0].tolist()))} bytes): "
                        "the script does not do the same on every rank")
        if not told[:, 2].all():
            exchange.reserve(nbytes)
            exchange.inbox[:nbytes].view(array.dtype)[:] = flat
            exchange.agree(told[0])
        exchange.average([(0, array.size, array.dtype)])
        return exchange.result[:nbytes].view(array.dtype).reshape(array.shape).copy()


def _bytes(rows: np.ndarray, width: int) -> np.ndarray:
    return rows.reshape(-1).view(np.uint8).reshape(len(rows), width)


meet = Meet()
