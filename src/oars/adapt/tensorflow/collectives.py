"""TensorFlow tensors between ranks, eager and inside ``tf.function``, with gradients of any order.

In a graph a message is a host function. TensorFlow may run such functions in any order, ranks may not: each waits for
the one that was traced before it. Functions in functions, branches and loops are put in order by a variable that every
message writes to: TensorFlow keeps the order of those who change a variable. The rank and the number of ranks are a
variable too, so that a graph outlives a loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from oars.adapt.meet import OWN, PART, WHOLE, meet
from oars.adapt.tensorflow import tapes
from oars.engine.world import RankLost

if TYPE_CHECKING:
    import keras
    from tensorflow.python.framework.func_graph import FuncGraph

_NARROW = (tf.float16, tf.bfloat16)  # summed in float32
_place: list[tf.Variable] = []  # (rank, number of ranks)
_turn: list[tf.Variable] = []  # changed before and after each message of a graph
_last: Any = None  # the model that was called last, and whether it was cut


def _variable(kept: list[tf.Variable], value: object, name: str) -> tf.Variable:
    if not kept:
        with tf.init_scope(), tf.device("CPU:0"):  # not by tf.Variable: a function may make none in a later trace
            kept.append(ResourceVariable(value, trainable=False, dtype=tf.int32, name=name))
    return kept[0]


def place() -> tf.Variable:
    """(rank, number of ranks)."""
    return _variable(_place, [meet.rank, meet.size], "oars_place")


def _size() -> Any:
    """The number of ranks."""
    return meet.size if tf.executing_eagerly() else place()[1]


def renew() -> None:
    """After a loss: ranks are counted anew."""
    meet.renew()
    if _place:
        _place[0].assign([meet.rank, meet.size])


def _host(message: Callable[..., Any], dtype: tf.DType, shape: tf.TensorShape | list[int | None],
          *tensors: Any) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.convert_to_tensor(message(*(np.asarray(t) for t in tensors)), dtype)

    def say(*arrays: np.ndarray) -> np.ndarray:
        try:
            if meet.lost:
                raise RankLost
            return np.asarray(message(*arrays), dtype.as_numpy_dtype)
        except RankLost:
            meet.lost = True
            raise

    graph, turn = tf.compat.v1.get_default_graph(), _variable(_turn, 0, "oars_turn")
    before = getattr(graph, "_oars_last", None)
    with tf.control_dependencies([] if before is None else [before]):
        begin = turn.assign(0, read_value=False)
    with tf.control_dependencies([begin]):
        result = tf.numpy_function(say, tensors, dtype)
    with tf.control_dependencies([result]):
        graph._oars_last = turn.assign(0, read_value=False)
    result.set_shape(shape)
    return result


def talks(graph: FuncGraph) -> bool:
    """Whether messages are sent when this graph runs, or one within it."""
    return bool(_own_turn(graph))


def talks_within(graph: FuncGraph) -> bool:
    """Whether a function, a branch or a loop in this graph sends messages."""
    turn = _own_turn(graph)
    return bool(turn) and any(c.type != "AssignVariableOp" for c in turn[0].consumers())


def _own_turn(graph: FuncGraph) -> list[Any]:
    return [inner for outer, inner in graph.captures if _turn and outer is _turn[0].handle]


def behind_messages() -> Any:
    """A context in which whatever is put into the graph waits for the messages before it."""
    last = None if tf.executing_eagerly() else getattr(tf.compat.v1.get_default_graph(), "_oars_last", None)
    return tf.control_dependencies([] if last is None else [last])


@tf.custom_gradient
def total(x: tf.Tensor) -> Any:
    """Summed over ranks; its gradient is the same."""
    if x.dtype in _NARROW:
        result = tf.cast(_host(meet.total, tf.float32, x.shape, tf.cast(x, tf.float32)), x.dtype)
    else:
        result = _host(meet.total, x.dtype, x.shape, x)
    return result, total


def every(line: tf.Tensor) -> tf.Tensor:
    """Every rank's line (a small tensor of one shape), stacked; its gradient sums over ranks and keeps its own."""
    rank, size = tf.unstack(place()) if not tf.executing_eagerly() else (meet.rank, meet.size)
    own = tf.reshape(tf.one_hot(rank, size, dtype=line.dtype), [-1] + [1] * line.shape.rank)
    return total(own * line)


def means(tensors: list[tf.Tensor], step: bool = True, weights: bool = False) -> list[tf.Tensor]:
    """Each averaged over ranks, all in one message for each precision; differentiable. It counts as a ``step``.

    Gradients of ``weights`` travel as ``--wire`` says.
    """
    weights = weights and all(t.shape.is_fully_defined() for t in tensors)
    results = list(tensors)
    for wide in (tf.float32, tf.float64):
        at = [i for i, t in enumerate(tensors) if (t.dtype == tf.float64) == (wide == tf.float64)]
        if not at:
            continue
        flat = tf.concat([tf.reshape(tf.cast(tensors[i], wide), [-1]) for i in at], 0)
        coded = meet.coded([tuple(tensors[i].shape) for i in at], wide.as_numpy_dtype) if weights else None
        if step or coded:
            mean = _mean_of(flat, coded, step)
        else:
            mean = total(flat) / tf.cast(meet.size, wide)
        parts = tf.split(mean, [tf.size(tensors[i]) for i in at])
        for i, part in zip(at, parts, strict=True):
            results[i] = tf.ensure_shape(tf.cast(tf.reshape(part, tf.shape(tensors[i])), tensors[i].dtype),
                                         tensors[i].shape)
    return results


def sparse_mean(g: tf.IndexedSlices, source: Any) -> tf.IndexedSlices:
    """An embedding's gradient averaged over ranks, with the lines that one process would have: twice the half of one
    would be another thing to an optimizer that squares them."""
    source = getattr(source, "_value", source)
    cut, shared = getattr(source, "_oars_cut", False), getattr(source, "_oars_shared", False)

    def values_of(values: np.ndarray, kind: int) -> np.ndarray:
        return values if kind == WHOLE else meet.total(values) if kind == PART else meet.concat(values)

    def indices_of(indices: np.ndarray, kind: int) -> np.ndarray:
        return meet.concat(indices) if kind == OWN else indices

    kind = _host(lambda values, indices: meet.slices(values, indices, cut, shared), tf.int32, [], g.values, g.indices)
    values = _host(values_of, g.values.dtype, [None, *g.values.shape[1:]], g.values, kind)
    indices = _host(indices_of, g.indices.dtype, [None], g.indices, kind)
    size = tf.where(tf.equal(kind, WHOLE), 1, _size())
    return tf.IndexedSlices(values / tf.cast(size, values.dtype), indices, g.dense_shape)


def ran(model: keras.Model, cut: bool) -> None:
    """How a model is called: of one that was not cut, what ranks have alike of an embedding's gradient is all of it."""
    global _last
    if _last != (weakref.ref(model), cut):
        _last = weakref.ref(model), cut
        for variable in model.variables:
            if variable._value is not None:  # (it may be waiting for its first value)
                variable._value._oars_cut = cut


@contextmanager
def _own_tape(persistent: bool = False) -> Any:
    """A tape that records in ``tf.init_scope`` too, which pauses tapes."""
    paused = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if paused:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        with tf.GradientTape(persistent=persistent) as tape:
            yield tape
    finally:
        if paused:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def pulled(forward: Callable[..., list], given: list[Any]) -> tuple[list[Any], Callable[[list], list[np.ndarray]]]:
    """``forward(*given)``, and what makes gradients of the given of gradients of the results, in arrays."""
    with _own_tape(persistent=True) as tape:
        tape.watch(given)
        outs = forward(*given)

    def back(into: list) -> list[np.ndarray]:
        grads = tape.gradient(outs, given, [tf.constant(g, out.dtype) for g, out in zip(into, outs, strict=True)],
                              unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(g).numpy().astype("float32") for g in grads]

    return outs, back


def looked_up(call: Callable[[], Any], given: list[tuple[Any, Any]]) -> tuple[Any, list[tuple[Any, int]]]:
    """``call()``, and how many lines it looks up in which variables; of some a value is ``given`` in their place."""
    given = [(v, value) for v, value in given if value.dtype.is_floating]
    with _own_tape() as tape:
        tape.watch([value for _, value in given])
        out = call()
    given = [*given, *((v, v) for v in sorted(tape.watched_variables(), key=lambda v: v.name))]
    floats = [x for x in tf.nest.flatten(out) if isinstance(x, tf.Tensor) and x.dtype.is_floating]
    try:
        grads = tape.gradient(floats, [value for _, value in given])
    except LookupError:  # it has no gradient, and cannot be trained
        return out, []
    return out, [(getattr(v, "_value", v), len(g.indices)) for (v, _), g in zip(given, grads, strict=True)
                 if isinstance(g, tf.IndexedSlices)]


def share(variable: tf.Variable, shared: bool) -> bool:
    """Whether ranks look up the same in this one, or lines for their rows; false where others do otherwise."""
    before = getattr(variable, "_oars_shared", shared)
    variable._oars_shared = shared
    return before == shared


def _mean_of(flat: tf.Tensor, coded: tuple[list, Any] | None, step: bool) -> tf.Tensor:
    @tf.custom_gradient
    def mean(flat: tf.Tensor) -> Any:
        return _host(lambda x: meet.gradients(x, coded, step), flat.dtype, flat.shape, flat), exact

    def exact(g: tf.Tensor) -> tf.Tensor:
        return _mean_of(g, None, step)

    return mean(flat)


class Share:
    """This rank's rows of a global batch."""

    def __init__(self, x: tf.Tensor) -> None:
        self.static, self.era = x.shape[0], meet.era
        if tf.executing_eagerly():
            self.rows = int(x.shape[0])
            self.first, self.count = meet.computed(self.rows)
            self.real = float(meet.own(self.rows)[1] > 0)
            return
        self.rows = tf.shape(x)[0]
        rank, size = tf.unstack(place())
        each, more = self.rows // size, self.rows % size
        own = each + tf.cast(rank < more, tf.int32)
        self.first = tf.maximum(tf.minimum(rank * each + tf.minimum(rank, more), self.rows - 1), 0)
        self.count = tf.minimum(tf.maximum(own, 1), self.rows)
        self.real = tf.cast(own > 0, tf.float32)  # 0 where this rank has none and computes on a stand-in

    def cut(self, x: tf.Tensor) -> tf.Tensor:
        """Own rows of ``x``."""
        return x[self.first : self.first + self.count]

    def enter(self, x: tf.Tensor) -> tf.Tensor:
        """Own rows of what a model is given; its gradient is the true one, of all rows, on every rank."""
        if meet.separate or not x.dtype.is_floating:
            return self.cut(x)

        @tf.custom_gradient
        def own(x: tf.Tensor) -> Any:
            return self.cut(x), lambda g: self.gather(g) / tf.cast(_size(), g.dtype)

        return own(x)

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """All ranks' rows, joined; its gradient sums over ranks and keeps own rows."""
        if meet.separate:
            return repeated(rows)
        total_, cut, real = total, self.cut, self.real

        @tf.custom_gradient
        def joined(x: tf.Tensor) -> Any:
            whole = _host(lambda a, n: meet.gather(a, int(n)), x.dtype, [self.static, *x.shape[1:]], x, self.rows)

            def back(g: tf.Tensor) -> tf.Tensor:
                if tf.executing_eagerly():
                    meet.current(self.era)
                return cut(total_(g)) * tf.cast(real, g.dtype)

            return whole, back

        return joined(rows)


def joined(share: Share, x: tf.Tensor) -> tf.Tensor:
    """All ranks' rows of what a model gave. If that is a softmax or a sigmoid, so is this, and known by its logits:
    Keras's crossentropies are computed from these."""
    logits = getattr(x, "_keras_logits", None)
    activation = None if tf.executing_eagerly() else _ACTIVATIONS.get(x.op.type)
    if activation is None:
        whole, below = share.gather(x), None if logits is None else share.gather(logits)
    else:
        below = share.gather(x.op.inputs[0])
        whole = activation(below)
    if logits is not None:
        whole._keras_logits = below
    return whole


_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.sigmoid}


def repeated(rows: tf.Tensor) -> tf.Tensor:
    """Own rows as often as there are ranks: what a rank that is on its own takes for all ranks' rows."""
    return tf.tile(rows, tf.concat([[_size()], tf.ones([tf.rank(rows) - 1], tf.int32)], 0))


def now(args: object, kwargs: object) -> bool:
    """Whether what is called runs now, and is not put into a graph."""
    return tf.executing_eagerly()


def rows_of(x: object) -> Any:
    """Whether ``x`` is a tensor with rows, and how many where that is known (-1 where it is not)."""
    if not isinstance(x, tf.Tensor) or x.shape.rank in (None, 0) or x.dtype == tf.string:
        return None
    return -1 if x.shape[0] is None else int(x.shape[0])


def constant(x: object) -> Any:
    """An array as a tensor; anything else as it is."""
    return tf.convert_to_tensor(x) if isinstance(x, np.ndarray) and x.dtype.kind in "fiub" else x


def in_graph(tree: Any) -> bool:
    """Whether a graph is being made of these, in which a rank's number of rows is not known."""
    return any(isinstance(leaf, tf.Tensor) and not hasattr(leaf, "numpy") for leaf in tf.nest.flatten(tree))


def kept(model: keras.Model) -> list[tuple[Any, Any]]:
    """What a call that runs now, and not in a graph, may change: to be put back when it is done again."""
    if not tf.executing_eagerly() or not meet.world.survives:
        return []
    return [(v, v._value.read_value()) for v in model.non_trainable_variables]


def recorded() -> bool:
    """Whether gradients may be asked for of what is called here: there are tapes, or it is a graph that will have."""
    return not tf.executing_eagerly() or bool(tapes.recording)


def on_tape() -> bool:
    """Whether a model is called in an eager loop with one tape."""
    return tf.executing_eagerly() and len(tapes.recording) == 1 and meet.world.survives


def hidden_from_tape(model: keras.Model) -> str:
    """Which gradient that a tape may be asked for would not be there if this model ran on own rows, or ``""``."""
    if tapes.through_a_loop():
        return "a gradient goes through a loop or a branch around it, in which nothing can be sent"
    given = {id(x) for x in getattr(model, "outputs", None) or ()}
    depths = getattr(model, "_nodes_by_depth", {}).values()
    used = (x for nodes in depths for node in nodes for x in node.input_tensors)
    if tapes.recording and not meet.fitting and any(id(x) in given for x in used):  # as in Grad-CAM
        return "one of its outputs is made of another, whose gradient may be asked for"
    return ""
