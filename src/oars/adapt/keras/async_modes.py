"""Ranks on their own: what ``--sync local`` makes of ``fit`` and ``train_on_batch`` (docs/sync.md).

In a step of training a rank is given, in place of the batch, its own rows of it N times over. The model runs on them
once (they are its share of such a batch), what comes out is repeated as often, and nobody is asked: a mean is that of
own rows, a sum is of the size of the global one. After K steps all meet, and go on from the mean of their weights.
Whatever else is done with a model (evaluation, saving, callbacks behind an epoch) begins with a meeting at which
everything is averaged: weights, moving statistics, metrics. From there on it is exact, until the next step.

A death is noticed where ranks meet. What the dead had learnt since the last average is lost with it: the others put
back what they had then, and learn from the same batches again, cut for the living.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from oars.adapt.meet import end, meet
from oars.engine.world import RankLost
from oars.exchange.allreduce import Exchange
from oars.exchange.compressed import Shapes, exchange_by
from oars.exchange.local import Round

if TYPE_CHECKING:
    from types import ModuleType

    import keras

ROUND, ALL = range(2)
PLACES = ("ended a round", "looked at a model, or came to its end")
# What of a model is looked at, or set, when all ranks' weights are one.
UNITED = ("evaluate", "predict", "test_on_batch", "predict_on_batch", "save", "save_weights", "export", "get_weights",
           "set_weights", "load_weights")
Values = tuple[list, list, list, list]  # of weights, other variables, the optimizer's, metrics'


class Separate:
    """When ranks are on their own, and where they meet."""

    def __init__(self, wire: ModuleType, stateless: bool) -> None:
        plan, world = meet.plan, meet.world
        self.wire, self.stateless = wire, stateless  # JAX: a train function is given the values, and gives new ones
        self.every = int(plan.every)
        self.exact, self.exchange = Exchange(world), exchange_by(world, plan.wire)
        self.rounds: WeakKeyDictionary[Any, Round] = WeakKeyDictionary()
        self.made = 0  # rounds
        self.model: Any = None  # the one that was trained last
        self.function: Any = None  # its train function
        self.start: Any = None  # its values after the last average
        self.batches: list[list] = []  # of the round
        self.rows = self.steps = 0  # this rank's of the round; steps since all was averaged
        self.seen = 0  # a digest of all batches so far
        self.busy = False

    # -- training

    def step(self, model: keras.Model, function: Callable, args: tuple) -> Any:
        """One call of a model's train function, on own rows."""
        batches = list(itertools.islice(args[-1], model.steps_per_execution))
        if not batches:
            raise StopIteration
        if self.model is not model and self.steps:
            meet.record.notice("models are trained in turn: the ranks meet and average at every change")
            self.unite()
        self.model, self.function = model, function
        if not self.batches:
            self._begin(model, batches[0], args[:-1])
        out = self._run(args[:-1], batches)
        self.batches.append(batches)
        self.steps += len(batches)
        if sum(map(len, self.batches)) >= self.every:
            values = self._average(ROUND, out[1] if self.stateless else self._values())
            if self.stateless:
                return out[0], values
            self._assign(values)
        return out

    def _begin(self, model: keras.Model, batch: Any, state: tuple) -> None:
        """A round begins: all ranks have the same weights."""
        if not self.stateless:
            model._symbolic_build(data_batch=batch)  # so that all variables are there
        self.start = state[0] if self.stateless else self._values()
        if model not in self.rounds:
            self.made += 1
            self.rounds[model] = Round(self.made, self.exchange, self.exact, meet.plan.outer)
        if not self.steps and self.rounds[model].by_change:
            self.rounds[model].begin(_Flat(self.start[0]).buffer.view(np.uint8))

    def _run(self, state: tuple, batches: list) -> Any:
        """The train function, on own rows of these batches."""
        own = [self._own(batch) for batch in batches]
        self.rows += sum(rows for _, rows in own)
        meet.separate = True
        try:
            return self.function(*state, iter([batch for batch, _ in own]))
        finally:
            meet.separate = False

    def _own(self, batch: Any) -> tuple[Any, int]:
        """Own rows of a batch, as often as there are ranks; and how many they are."""
        from keras import tree

        rows = {self.wire.rows_of(self.wire.constant(leaf)) for leaf in tree.flatten(batch) if hasattr(leaf, "shape")}
        if len(rows) != 1 or None in rows:
            end(f"--sync local splits batches by rows, but the parts of this batch have {rows or 'no'} rows: use "
                 "--sync allreduce")
        count = rows.pop()
        first, mine = meet.own(count) if count >= meet.size else (0, count)  # of a smaller one all have all

        def own(x: Any) -> Any:
            return self.wire.repeated(self.wire.constant(x)[first : first + mine]) if hasattr(x, "shape") else x

        return tree.map_structure(own, batch), mine

    def saw(self, digest: int) -> None:
        """A batch has come; ranks compare what they saw when they meet."""
        self.seen = zlib.crc32(digest.to_bytes(4, "little"), self.seen)

    # -- meetings

    def unite(self) -> None:
        """All ranks come here: from here on everything is the same on all of them."""
        if not self.steps or meet.separate or self.busy:
            return
        self.busy = True
        try:
            if self.stateless:
                self.model.jax_state_sync()
            self._assign(self._average(ALL, self._values()))
        finally:
            self.busy = False
        self.steps = 0

    def _average(self, place: int, values: Values) -> Values:
        """The values that all go on from; after a death, those that the living come to."""
        while True:
            try:
                rows = self._met(place)
                rest = self._rest(values) if place == ALL else {}
                share = len(rows) * rows[meet.rank] / rows.sum() if rows.any() else 1.0
                weights = self._mean(self.rounds[self.model], values[0], share)
                self.start = (weights, *([rest.get((i, j), v) for j, v in enumerate(part)]
                                         for i, part in enumerate(values[1:])))
                self.batches, self.rows = [], 0
                return self.start
            except RankLost:
                self.wire.renew()
                values = self._again()

    def _again(self) -> Values:
        """What was learnt since the last average, learnt again by those who are left."""
        self.rows, state = 0, self.start
        if not self.stateless:
            self._assign(state)
        for batches in self.batches:
            out = self._run((state,) if self.stateless else (), batches)
            state = out[1] if self.stateless else None
        return state if self.stateless else self._values()

    def _met(self, place: int) -> np.ndarray:
        """Every rank's rows of this round; the run ends where ranks came to different places."""
        gathered = self.exact.agree(np.array([place, meet.record.steps, self.seen, self.rows, meet.record.interrupted]))
        if (gathered[:, :2] != gathered[0, :2]).any():
            self._parted(gathered)
        if (gathered[:, 2] != self.seen).any():
            end("the batches since the last average are not the same on all ranks: their rows are made or drawn "
                 "without a common seed; set a seed in the script")
        if gathered[:, 4].any():
            meet.record.raise_interrupt()  # Ctrl-C reached some rank: all stop here
        return gathered[:, 3]

    def _parted(self, every: np.ndarray) -> NoReturn:
        other = int(np.argmax((every[:, :2] != every[0, :2]).any(1)))
        names = [f"rank {meet.world.members[r]} {PLACES[every[r, 0]]} after {every[r, 1]} steps" for r in (0, other)]
        end(f"the ranks are out of step: {names[0]}, {names[1]}. In separate training each rank reads its own loss: "
             "let the script decide by values that it reads after an epoch, or use --sync allreduce")

    def _mean(self, round_: Round, weights: list, share: float) -> list:
        """A model's weights: from every rank's own to those all go on from."""
        flat = _Flat(weights)
        nbytes, spans = flat.buffer.nbytes, [(0, flat.buffer.size, flat.buffer.dtype)]
        round_.fit(nbytes)
        through = round_.through()
        if not through.holds(nbytes):
            through.reserve(nbytes)
        through.inbox[:nbytes].view(flat.buffer.dtype)[:] = flat.buffer
        round_.lay_in(spans, share)
        through.agree(np.array([nbytes]))
        return flat.taken(round_.close(nbytes, spans, flat.places)[:nbytes])

    def _rest(self, values: Values) -> dict[tuple[int, int], np.ndarray]:
        """The mean of all else that is a number and not the optimizer's own, by its place."""
        averages = {id(v) for o in self._optimizers() for v in getattr(o, "_model_variables_moving_average", ())}
        of_optimizer = [j for j, v in enumerate(self._variables()[2]) if id(v) in averages]
        found = {(i, j): np.asarray(values[i + 1][j]) for i in (0, 1, 2) for j in range(len(values[i + 1]))
                 if i != 1 or j in of_optimizer}
        found = {at: v for at, v in found.items() if v.dtype.kind == "f" or "float" in v.dtype.name}
        if not found:
            return {}
        flat = _Flat(list(found.values()))
        return dict(zip(found, flat.taken(meet.mean(flat.buffer).view(np.uint8)), strict=True))

    # -- a model's values

    def _optimizers(self) -> list:
        """The model's, and those of a train_step of its own."""
        from keras.optimizers import Optimizer

        every = (self.model.optimizer, *vars(self.model).values())
        return list({id(o): o for o in every if isinstance(o, Optimizer)}.values())

    def _variables(self) -> tuple[list, list, list, list]:
        model = self.model
        return (model.trainable_variables, model.non_trainable_variables,
                [v for o in self._optimizers() for v in o.variables], model.metrics_variables)

    def _values(self) -> Values:
        from keras import ops

        return tuple([ops.convert_to_numpy(v).copy() for v in part]  # type: ignore[return-value]
                     for part in self._variables())

    def _assign(self, values: Values) -> None:
        for part, news in zip(self._variables(), values, strict=True):
            for variable, value in zip(part, news, strict=False):  # some may have been made since
                variable.assign(value)


class _Flat:
    """Arrays behind each other in one precision."""

    def __init__(self, arrays: list) -> None:
        arrays = [np.asarray(a) for a in arrays]
        self._kinds = [(a.shape, a.dtype) for a in arrays]
        wide = np.float64 if any(a.dtype == np.float64 for a in arrays) else np.float32
        self.buffer = np.concatenate([a.astype(wide).reshape(-1) for a in arrays])
        ends = np.cumsum([a.size for a in arrays])
        self._ends = ends[:-1]
        self.places: Shapes = [(int(end - a.size) * self.buffer.itemsize, (prod(a.shape[:-1]), a.shape[-1]))
                               for a, end in zip(arrays, ends, strict=True) if a.ndim > 1]  # Keras's outputs are last

    def taken(self, buffer: np.ndarray) -> list[np.ndarray]:
        """The arrays that lie in the bytes of a buffer."""
        parts = np.split(buffer.view(self.buffer.dtype), self._ends)
        return [part.reshape(shape).astype(kind) for part, (shape, kind) in zip(parts, self._kinds, strict=True)]


def united(unite: Callable[[], None]) -> Any:
    """Around what looks at a model from outside: first all ranks ``unite``."""
    def layer(inner: Callable[..., Any]) -> Any:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            unite()
            return inner(*args, **kwargs)

        return call

    return layer


def logs(separate: Separate) -> Any:
    """Around what gives the logs of an epoch: all ranks'."""
    import keras

    def layer(inner: Callable[..., Any]) -> Any:
        @functools.wraps(inner)
        def logs_of(self: keras.Model, logs: dict[str, Any]) -> Any:
            if not separate.steps:
                return inner(self, logs)
            separate.unite()
            own = keras.tree.map_structure(keras.ops.convert_to_numpy, inner(self, logs))
            return meet.world.broadcast(lambda: own)  # behind a train_step of one's own they are the rank's

        return logs_of

    return layer


def called(separate: Separate, wire: ModuleType) -> Any:
    """Around ``Model.__call__``."""
    def layer(inner: Callable[..., Any]) -> Any:
        @functools.wraps(inner)
        def call(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
            if separate.steps and not meet.inside and wire.now(args, kwargs):
                separate.unite()
            return inner(self, *args, **kwargs)

        return call

    return layer


def begin(wire: ModuleType, backend: str) -> Separate:
    """Separate training, which the end of the script ends too."""
    separate = Separate(wire, backend == "jax")
    meet.unite, before = separate.unite, meet.record.at_end

    def end_of_script() -> None:
        separate.unite()
        before()

    meet.record.at_end = end_of_script
    return separate
