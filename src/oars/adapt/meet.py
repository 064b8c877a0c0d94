"""What the ranks say to each other for Keras and TensorFlow: NumPy arrays in, NumPy arrays out.

Here a tensor of the script is the global one on every rank. Inside a model's call a rank computes on its own rows of
it, and the results are joined again. The convention of gradients is PyTorch's (``torch/rows/collectives.py``): of a
tensor that all ranks hold alike the true gradient is the mean of the ranks' gradients, of rows a rank holds N times
its own.

Every result is, to the bit, the same on all ranks. A message that meets a death raises ``RankLost``; inside compiled
code, which cannot be left, nothing more is said until the step has run to its end and is done again (``quiet``).
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from oars import debug
from oars.engine.world import RankLost, World
from oars.exchange.allreduce import Exchange
from oars.exchange.compressed import exchange_by
from oars.plan import Plan

if TYPE_CHECKING:
    import keras
    from numpy.typing import DTypeLike

    from oars.rank.record import Record

WHOLE, PART, OWN = range(3)  # of an embedding's gradient, see ``slices``
_SMALL = 1 << 15  # bytes that every rank takes from every other and sums by itself


def end(text: str) -> NoReturn:
    """End the run: what is wrong is the user's to change."""
    print(f"oars: {text}", file=sys.__stderr__, flush=True)
    raise SystemExit(2)


class OutOfStep(Exception):
    """Ranks came to different places of the script, or hold other data. Shown as one line."""


class Meet:
    """The ranks of a run, as an adapter of Keras or TensorFlow sees them. ``meet`` is the only instance."""

    def __init__(self) -> None:
        self.world: World = None  # type: ignore[assignment]  # on one rank
        self.record: Record = None  # type: ignore[assignment]  # until an adapter begins
        self.plan = Plan()
        self.backend = "tensorflow"  # Keras's
        self.keras_on_jax = False  # so JAX's gradients may be those of models on own rows
        self.rank, self.size = 0, 1
        self.lost = False  # a rank died in a compiled step: its results are void
        self.era = 0  # how often ranks were lost
        self.fitting = False  # in a step of ``fit``, which tells the record by itself
        self.inside = 0  # in a call that runs on own rows, or one that is whole: nothing in it is cut
        self.split: Any = None  # ... and the share of it, if it is one on own rows
        self.calls = 0  # on own rows, so far
        self.splits = False  # whether there are any
        self.separate = False  # in a step of training that asks nobody (--sync local)
        self.unite: Callable[[], None] = lambda: None  # what such steps have left is averaged before all else
        self.partial = False  # some of these give gradients that are not yet the mean over ranks
        self.leads = False  # no other adapter recovers from losses
        self._exchange: Any = None  # exact
        self._coded: Any = None  # for gradients, as --wire says
        self._left: dict = {}  # what codes had lost when the step under way began
        self._numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of models that ran on own rows
        self._shapes: set[tuple[int, ...]] = set()  # of their weights
        self._models: tuple[int, ...] = ()  # called last
        self._gradients = 0  # taken since

    def start(self, world: World, plan: Plan, record: Record) -> None:
        """Take part in ``world``."""
        self.world, self.plan, self.record = world, plan, record
        if world.phase is None:  # else PyTorch's adapter is there, and this one is imported by some library
            world.adopt()
            world.phase = lambda: "step"
            self.leads = True
        self.rank, self.size, self.era = world.rank, world.size, world.era
        self._exchange, self._coded = Exchange(world), exchange_by(world, plan.wire)

    def check_plan(self) -> None:
        """Not all of the ways in which ranks can keep together are for us."""
        plan, here = self.plan, f"is not for Keras on {self.backend}"
        sync = plan.sync
        if sync == "server" or (sync == "gossip" and self.backend != "torch"):
            end(f"--sync {sync} {here}: use --sync local, or leave it out")
        if plan.every == "auto" and self.backend != "torch":
            end(f"--every auto {here}: give a number of steps, as in --every 8")
        if plan.warmup and self.backend != "torch":
            end(f"--warmup {plan.warmup} {here}: leave it out")

    def renew(self) -> None:
        """After a loss: from here on batches are cut for the ranks that are left."""
        self.world.adopt()
        self.rank, self.size, self.era = self.world.rank, self.world.size, self.world.era
        self.lost = False
        if debug.on:
            debug.say(f"era {self.era}: batches are cut for ranks {self.world.members}, and this step is done again")
        if self._coded.lossy:
            self._coded.left = dict(self._left)

    def begin(self) -> None:
        """A step begins, or begins anew after a loss: then what codes have lost is what it was here."""
        if self._coded.lossy:
            self._left = dict(self._coded.left)

    # -- whose gradients these are

    def called(self, model: keras.Model) -> None:
        """A model runs on own rows, or will do so in what is compiled now."""
        self.splits = self.record.split = True
        if model not in self._numbers:
            if debug.on:
                debug.say(f"the model {model.name} is split: its rows do not depend on each other")
            self._numbers[model] = self.calls
            self._shapes |= {tuple(v.shape) for v in model.trainable_variables}
        self.calls += 1
        if self._gradients:
            self._models, self._gradients = (), 0
        if self._numbers[model] not in self._models:
            self._models += (self._numbers[model],)

    def are_weights(self, shapes: list[tuple]) -> bool:
        """Whether gradients of these shapes can be those of models' weights."""
        known = all(shape in self._shapes for shape in shapes)
        if self._coded.lossy and not known:
            self.record.notice("gradients of variables that are no weights of a Keras model are sent in fp32")
        return known

    def coded(self, shapes: list[tuple], dtype: DTypeLike) -> tuple[list, Any] | None:
        """How gradients of weights travel, if not as they are: as which matrices, and whose error is theirs to add."""
        if not self._coded.lossy:
            return None
        self._gradients += 1
        places, at = [], 0
        for shape in shapes:
            if len(shape) > 1:  # Keras's kernels have their outputs last
                places.append((at, (prod(shape[:-1]), shape[-1])))
            at += prod(shape) * np.dtype(dtype).itemsize
        return places, (self._models, self._gradients, tuple(shapes))

    def step(self, loss: float | None, rows: int) -> None:
        """Tell the record of a step; what is compiled splits in each what it did when it was traced."""
        self.record.split |= self.splits
        self.record.step(loss, rows)

    def own(self, rows: int) -> tuple[int, int]:
        """This rank's first row of ``rows`` and how many it has: contiguous, differing by at most one."""
        each, more = divmod(rows, self.size)
        return self.rank * each + min(self.rank, more), each + (self.rank < more)

    def computed(self, rows: int) -> tuple[int, int]:
        """The same, but a rank without rows computes on a stand-in, whose result is dropped."""
        first, count = self.own(rows)
        return (first, count) if count or not rows else (min(first, rows - 1), 1)

    # -- messages

    def quiet(self, message: Callable[..., Any], *args: Any) -> Any:
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
            raise OutOfStep(f"a model gave {len(rows)} rows for {counts[self.rank]}: "
                            "its rows are not those of its input")
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

    def same(self, array: np.ndarray) -> bool:
        """Whether all ranks hold the same, to the bit."""
        self.current(self.era)
        every = self.world.allgather_alike(np.array([zlib.crc32(array.tobytes()), array.nbytes]))
        return bool((every == every[0]).all())

    def slices(self, values: np.ndarray, indices: np.ndarray, cut: bool, shared: bool) -> int:
        """What ranks have of an embedding's gradient: ``WHOLE``, all of it, where a model runs whole; ``PART``, a part
        of each line, where all look up the same (positions); ``OWN``, lines of their own rows of the batch.

        The model that looked up was ``cut``; what it looks up is ``shared``, the same for whatever rows (``probe``).
        """
        self.current(self.era)
        every = self.world.allgather_alike(np.array([zlib.crc32(indices.tobytes()), len(indices),
                                                    zlib.crc32(values.tobytes())]))
        same = (every == every[0]).all(0)
        return WHOLE if same.all() and not cut else PART if same[:2].all() and shared else OWN

    def total(self, array: np.ndarray) -> np.ndarray:
        """Summed over ranks."""
        self.current(self.era)
        if array.nbytes <= _SMALL:
            return self.world.allgather_alike(np.ascontiguousarray(array)).sum(0, dtype=array.dtype)
        return self.mean(array) * array.dtype.type(self.size)

    def gradients(self, array: np.ndarray, coded: tuple[list, Any] | None = None, step: bool = True) -> np.ndarray:
        """Averaged over ranks, and a step for the record, unless ``fit`` counts."""
        self.check_plan()
        if self.plan.sync == "local":
            self.record.notice("in a training loop of the script, gradients are averaged at every step, as with --sync "
                               "allreduce: --sync local is for fit and train_on_batch",
                               "train by fit or train_on_batch, or leave out --sync local", "exchange")
        averaged = self.mean(array, coded)
        if step and not self.fitting:
            self.step(None, 0)
        return averaged

    def mean(self, array: np.ndarray, coded: tuple[list, Any] | None = None) -> np.ndarray:
        """Averaged over ranks, in shared memory where they share a host; or ``coded``, as ``--wire`` says."""
        self.current(self.era)
        exchange, nbytes, flat = self._exchange if coded is None else self._coded, array.nbytes, array.reshape(-1)
        ready = exchange.holds(nbytes)
        if ready:
            exchange.inbox[:nbytes].view(array.dtype)[:] = flat
        every = exchange.agree(np.array([nbytes, array.dtype.num, ready]))  # behind it, all inboxes are filled
        if (every[:, :2] != every[0, :2]).any():
            sizes = sorted(set(every[:, 0].tolist()))
            raise OutOfStep(f"the ranks exchange arrays of different sizes ({sizes} bytes): the script does not do the "
                            "same on every rank")
        if not every[:, 2].all():
            exchange.reserve(nbytes)
            exchange.inbox[:nbytes].view(array.dtype)[:] = flat
            exchange.agree(every[0])
        exchange.average([(0, array.size, array.dtype)], *(coded or ()))
        if debug.on:
            debug.say(f"exchanged {nbytes} bytes")
        return exchange.result[:nbytes].view(array.dtype).reshape(array.shape).copy()


def _bytes(rows: np.ndarray, width: int) -> np.ndarray:
    return rows.reshape(-1).view(np.uint8).reshape(len(rows), width)


meet = Meet()


@contextmanager
def inside(share: Any = None) -> Any:
    """Nothing in here is cut; with ``share``, it runs on these rows."""
    before = meet.split
    meet.inside += 1
    meet.split = share if share is not None else before
    try:
        yield
    finally:
        meet.inside -= 1
        meet.split = before
