"""A model's call in an eager ``GradientTape`` loop, whose backward pass can be done again after a loss.

Such a call is one operation for the script's tape: its gradient comes from a tape of its own, around own rows, and is
complete when it leaves here: the weights' summed over ranks, the inputs' joined. So all that passes between calls is
the same on every rank, and a rank that is lost in one of them concerns that one alone: the forward pass is made again
for the living, from the variables and the seeds that it had, and then the backward pass. Gradients of gradients need
the other way (``wire.Share.gather``): where tapes are nested, calls go that way, and a loss ends the run with one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager import record as taping

from oars.adapt.meet import PART, meet
from oars.adapt.tensorflow import collectives, tapes
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import keras


class _Whole:
    """All rows, and no share of them."""

    def cut(self, x: object) -> Any:
        return x

    def __bool__(self) -> bool:
        return False


class Call:
    """One call of a model. ``forward(share, tape)`` runs it on these rows; it gives its inputs and outputs, flat. If
    gradients can be asked for ``often`` (of a persistent tape), the graph is kept."""

    def __init__(self, model: keras.Model, first: tf.Tensor, forward: Callable[[Any, Any], tuple[list, list]],
                 often: bool) -> None:
        self.first, self.forward, self.variables, self.often = first, forward, model.variables, often
        self.before = [v._value.read_value() for v in self.variables]
        self.given: dict[int, Any] = {}  # in another forward: what stands for a variable
        self._run(ExitStack())

    def _run(self, scope: AbstractContextManager) -> None:
        self.share, self.era = collectives.Share(self.first), meet.era
        self.tape = tf.GradientTape(persistent=self.often)
        with self.tape, scope:
            for value in self.given.values():
                self.tape.watch(value)
            self.ins, self.outs = self.forward(self.share, self.tape)

    def _anew(self) -> None:
        """The forward pass of a new era: from what it read then, and nothing is written."""
        from keras.src import backend

        self.given = {id(v._value): value for v, value in zip(self.variables, self.before, strict=True)}
        self._run(backend.StatelessScope(state_mapping=list(zip(self.variables, self.before, strict=True))))

    def _for_many(self, grads: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
        """A Jacobian's backward pass is traced, for many gradients at once: all rows, for nothing can be sent there."""
        from keras.src import backend

        before = [tf.identity(value) for value in self.before]
        given = {id(v._value): value for v, value in zip(self.variables, before, strict=True)}
        with tf.GradientTape() as tape, backend.StatelessScope(
                state_mapping=list(zip(self.variables, before, strict=True))):
            tape.watch(before)
            ins, outs = self.forward(_Whole(), tape)
        at = [i for i, g in enumerate(grads) if g is not None and outs[i].dtype.is_floating]
        found = tapes.true_gradient(tape, [outs[i] for i in at], [*ins, *(given.get(id(v), v) for v in variables)],
                          [grads[i] for i in at])
        return found[: len(ins)], found[len(ins):]

    def place(self, variable: tf.Variable) -> tuple[int, int]:
        """Where among the model's variables this one is; those it does not know come in the order they were made in."""
        at = next((i for i, v in enumerate(self.variables) if v._value is variable), len(self.variables))
        return at, int(variable._unique_id.rpartition("_")[2])

    def joined(self) -> list[Any]:
        """All ranks' rows of the outputs."""
        rows = self.share.rows
        return [tf.convert_to_tensor(meet.gather(x.numpy(), rows), x.dtype) for x in self.outs]

    def backward(self, grads: list[Any], wanted: bool, variables: list[Any]) -> tuple[list[Any], list[Any]]:
        """Gradients of the inputs (if they are ``wanted``) and of variables, all of them; again after a loss."""
        if not tf.executing_eagerly():
            return self._for_many(grads, variables)
        meet.begin()
        while True:
            try:
                if self.era != meet.world.era:
                    collectives.renew()
                    self._anew()
                return self._backward(grads, wanted, variables)
            except RankLost:
                collectives.renew()

    def _backward(self, grads: list[Any], wanted: bool, variables: list[Any]) -> tuple[list[Any], list[Any]]:
        at = [i for i, g in enumerate(grads) if g is not None and self.outs[i].dtype.is_floating]
        true = [collectives.total(grads[i]) / tf.cast(meet.size, grads[i].dtype) for i in at]  # (maybe the same)
        sources = [self.given.get(id(v), v) for v in variables]
        found = tapes.true_gradient(self.tape, [self.outs[i] for i in at], [*self.ins, *sources],
                          [self.share.cut(g) for g in true])
        own, sums = found[: len(self.ins)], found[len(self.ins):]
        for i, g in enumerate(sums):
            if isinstance(g, tf.IndexedSlices):  # an embedding's
                shared = getattr(variables[i], "_oars_shared", False)
                part = meet.slices(g.values.numpy(), g.indices.numpy(), True, shared) == PART
                sums[i] = tf.IndexedSlices(collectives.total(g.values) if part else _concat(g.values),
                                           g.indices if part else _concat(g.indices), g.dense_shape)
        there = [i for i, g in enumerate(sums) if isinstance(g, tf.Tensor)]
        for i, mean in zip(there, collectives.means([sums[i] for i in there], step=False, weights=True),
                           strict=True):
            sums[i] = mean * tf.cast(meet.size, mean.dtype)
        if not wanted:
            return [None] * len(own), sums
        rows = self.share.rows
        return [None if g is None else tf.convert_to_tensor(meet.gather(g.numpy(), rows), g.dtype) for g in own], sums


def _concat(rows: tf.Tensor) -> Any:
    return tf.convert_to_tensor(meet.concat(rows.numpy()), rows.dtype)


def call(model: keras.Model, first: tf.Tensor, inputs: list[Any],
         forward: Callable[[Any, Any], tuple[list, list]]) -> list[Any]:
    """The joined outputs of a call, flat; the script's tape sees one operation from ``inputs``, which are floats."""
    (outer,) = tapes.recording
    wanted = taping.should_record_backprop(inputs) if inputs else False

    @tf.custom_gradient
    def whole(*inputs: Any) -> Any:
        with outer.stop_recording():
            made = Call(model, first, forward, outer._persistent)
            outs = made.joined()

        def back(*grads: Any, variables: Sequence[tf.Variable] = ()) -> Any:
            ordered = sorted(variables, key=made.place)  # TensorFlow gives a set's order: another one on every rank
            found, sums = made.backward(list(grads), wanted, ordered)
            sum_of = {id(v): g for v, g in zip(ordered, sums, strict=True)}
            return (found, [sum_of[id(v)] for v in variables]) if variables else found

        return outs, back

    return list(whole(*inputs))
