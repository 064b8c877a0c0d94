"""A TensorFlow 1 graph in which each rank computes its own rows of what is fed.

Beside what depends on an open placeholder (its first dimension is not fixed: the batch) a second version of it grows,
operation by operation, by ``rules``. All runs use it, so that an operation that draws random numbers has one stream. In
a run that trains, this rank's rows are taken, and where the second version needs other ranks' rows the run comes in
stages (``stages``): up to the messages, then on from their results. In all other runs every row is this rank's, and
nothing is sent.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from oars.adapt.tf1 import rules

PREFIX = "oars_cut/"
_LOOPS = ("Enter", "Exit", "NextIteration", "RefEnter", "RefExit", "RefNextIteration", "LoopCond")


class Value(NamedTuple):
    """What a tensor of the script is in the second version: whole (0), or own rows, so many lines for each of them."""

    tensor: Any
    rows: int


class Message(NamedTuple):
    """A tensor that needs the other ranks: its sum over them, or their rows."""

    source: Any
    result: Any
    summed: bool
    user: str  # the operation that needs it


class Refused(Exception):
    """This cannot be cut; the reason is for the user."""


class Cut:
    """The second version of one graph."""

    def __init__(self, graph: tf.Graph) -> None:
        self.graph, self.lock, self.guards = graph, threading.RLock(), Guards()
        self._values: dict[str, Value] = {}
        self._ops: dict[str, Any] = {}  # -> its second version, or itself
        self._wholes: dict[str, Value] = {}
        self._fetches: dict[str, Any] = {}  # -> what is fetched for it
        self._user = ""  # what is grown now
        self.messages: dict[str, Message] = {}  # by the operation of its result
        self.open: set[str] = set()  # open placeholders
        self._numbers: set[str] = set()  # placeholders without a shape that are fed with numbers
        self._sparse: set[str] = set()  # placeholders that are parts of a sparse one: their lines are no rows
        self.plans: dict[Any, Any] = {}  # what was fetched -> the stages of such a run
        self.refused = ""  # why all runs are of the script's graph
        self.first, self.second = set[str](), set[str]()  # what has drawn in runs of either version
        with _Building(graph):
            # This run is cut?, own first row, own rows, all rows.
            self.place = tf.compat.v1.placeholder_with_default(np.array([0, 0, -1, 0], np.int32), [4])

    # -- growing

    def _is_open(self, op: tf.Operation) -> bool:
        """A placeholder whose first dimension is not fixed."""
        if op.type != "Placeholder" or op.name in self._sparse:
            return False
        shape, dtype = op.outputs[0].shape, op.outputs[0].dtype
        return (bool(shape.rank) and shape.as_list()[0] is None
                and (dtype.is_floating or dtype.is_integer or dtype.is_bool))

    def fed(self, key: tf.Tensor | tf.SparseTensor | str | bytes, value: Any) -> Any:
        """A tensor is to be fed with ``value``. A placeholder without a shape is taken for a number (most often it is
        the ``keep_prob`` of a dropout) if that is what it is fed with at first, and as long as it is."""
        tensor = self.graph.as_graph_element(tf.compat.as_str_any(key)) if isinstance(key, (str, bytes)) else key
        if isinstance(tensor, tf.SparseTensor):
            self._sparse |= {part.op.name for part in tf.nest.flatten(tensor, expand_composites=True)}
        elif isinstance(tensor, tf.Tensor) and tensor.op.type == "Placeholder" and tensor.shape.rank is None:
            if np.ndim(value) and tensor.op.name in self._numbers:
                self._forget(tensor.op)
            elif not np.ndim(value) and tensor.op.name not in self._ops:
                self._numbers.add(tensor.op.name)
        return tensor

    def _forget(self, op: tf.Operation) -> None:
        """Whatever depends on this operation, which was taken for a number, is to be grown anew."""
        after = ahead(op)
        if after.keys() & self.second:
            raise SystemExit(f"oars: {op.name}, a placeholder without a shape, was fed with one number and is fed with "
                             "many now, and what is drawn depends on it: give it a shape")
        self._numbers.discard(op.name)
        for name, other in after.items():
            self._ops.pop(name, None)
            for tensor in other.outputs:
                self._values.pop(tensor.name, None)
                self._fetches.pop(tensor.name, None)

    def op(self, op: tf.Operation) -> Any:
        """The second version of ``op``."""
        if op.name not in self._ops:
            with self.lock, _Building(self.graph):
                self._grow(op)
        return self._ops[op.name]

    def value(self, tensor: tf.Tensor) -> Value:
        """The second version of ``tensor``."""
        self.op(tensor.op)
        return self._values[tensor.name]

    def fetched(self, tensor: tf.Tensor) -> Any:
        """``tensor`` for a run to fetch: all of it, and no message's result itself, which is fed already."""
        value = self.value(tensor)
        if not value.rows and value.tensor.op.name not in self.messages:
            return value.tensor
        if tensor.name not in self._fetches:
            with self.lock, _Building(self.graph):
                self._user = f"{tensor.name} fetched"
                self._fetches[tensor.name] = tf.identity(self.whole(value).tensor)
        return self._fetches[tensor.name]

    def if_there(self, tensor: tf.Tensor) -> Any:
        """A tensor of the second version for a run to fetch; in a branch, it and whether (0 or 1) it is not there."""
        guards = self.guards.of(tensor)
        if not guards:
            return tensor
        if len(guards) > 1:
            raise Refused("random numbers are drawn in a condition within another")
        ((name, side),) = guards
        with self.lock, _Building(self.graph):
            nothing = tf.raw_ops.Switch(data=tf.zeros([0], tensor.dtype), pred=self.graph.get_tensor_by_name(name))
            return tuple(tf.raw_ops.Merge(inputs=[tensor, nothing[1 - side]]))

    def is_other(self, name: str) -> bool:
        """Whether this operation has a second version that is not itself."""
        return name in self._ops and self._ops[name].name != name

    def _grow(self, op: tf.Operation) -> None:
        waiting = [op]
        while waiting:
            op = waiting[-1]
            missing = [b for b in _before(op) if b.name not in self._ops]
            if op.name in self._ops:
                waiting.pop()
            elif op.type in _LOOPS:
                self._leave(op)
            elif missing:
                waiting.extend(missing)
            else:
                self._add(op)
                waiting.pop()

    def _leave(self, op: tf.Operation) -> None:
        """A loop stays as it is, if it does not depend on the batch."""
        found = behind([op])
        if any(self._is_open(b) or self._ops.get(b.name, b).name != b.name for b in found.values()):
            raise Refused("there is a loop in the graph")
        for b in found.values():
            self._ops[b.name] = b
            self._values.update({t.name: Value(t, 0) for t in b.outputs})

    def _add(self, op: tf.Operation) -> None:
        self._user = f"{op.name} {op.type}"
        ins = [self._values[t.name] for t in op.inputs]
        controls = [self._ops[c.name] for c in _controls(op)]
        same = [v.tensor.name for v in ins] == [t.name for t in op.inputs]
        if self._is_open(op):
            self.open.add(op.name)
            outs, self._ops[op.name] = [self.own(Value(op.outputs[0], 0), 1, surely=True)], op
        elif op.name in self._numbers:
            outs, self._ops[op.name] = [Value(tf.ensure_shape(op.outputs[0], []), 0)], op
        elif same and {c.name for c in controls} == {c.name for c in op.control_inputs}:
            outs, self._ops[op.name] = [Value(t, 0) for t in op.outputs], op
        else:
            with self.graph.control_dependencies(controls), self.graph.device(op.device or None):
                outs = rules.apply(self, op, ins) if any(v.rows for v in ins) else self._whole(op, ins)
            if outs:
                self._ops[op.name] = outs[0].tensor.op
        for tensor, value in zip(op.outputs, outs, strict=True):
            self._values[tensor.name] = value

    def _whole(self, op: tf.Operation, ins: list[Value]) -> list[Value]:
        """``op`` on what is whole. Sums over ranks that it adds up (a weight used often has many) become one."""
        sums = [m for m in (self.messages.get(v.tensor.op.name) for v in ins) if m and m.summed]
        if op.type != "AddN" or len(sums) < 2:
            return self.made(op, ins, rows=False)
        total = self.total(Value(tf.add_n([m.source for m in sums]), 0))
        known = {m.result.name for m in sums}
        others = [v.tensor for v in ins if v.tensor.name not in known]
        return [Value(tf.add_n([total.tensor, *others]), 0) if others else total]

    # -- what rules are made of

    def made(self, op: tf.Operation, ins: list[Value], rows: bool) -> list[Value]:
        """``op`` on these inputs; gives ``rows``, or what is whole."""
        attrs = {name: value for name, value in op.node_def.attr.items() if name != "_class"}
        copy = self.graph.create_op(op.type, [v.tensor for v in ins], [t.dtype for t in op.outputs], op._input_types,
                                    op.name, attrs)
        self._ops[op.name] = copy
        return [Value(t, rules.lines(ins) if rows else 0) for t in copy.outputs]

    def gathered(self, op: tf.Operation, ins: list[Value]) -> list[Value]:
        """``op`` on all rows."""
        return self.made(op, [self.whole(v) for v in ins], rows=False)

    def summed(self, op: tf.Operation, ins: list[Value]) -> list[Value]:
        """``op`` on own rows, which gives a part of a sum."""
        return [self.total(v) for v in self.made(op, ins, rows=False)]

    def total(self, part: Value) -> Value:
        """The sum over ranks."""
        return self._message(part, True, part.tensor.shape)

    def whole(self, v: Value) -> Value:
        """All rows."""
        if not v.rows:
            return v
        if v.tensor.name not in self._wholes:
            rest = v.tensor.shape[1:]
            if v.rows == 1:
                self._wholes[v.tensor.name] = self._message(v, False, [None, *rest])
            else:  # ranks send rows of the batch
                after = tf.shape(v.tensor)[1:]
                each = Value(tf.reshape(v.tensor, tf.concat([[-1, v.rows], after], 0)), 1)
                every = self._message(each, False, [None, v.rows, *rest]).tensor
                joined = tf.ensure_shape(tf.reshape(every, tf.concat([[-1], after], 0)), [None, *rest])
                self._wholes[v.tensor.name] = Value(joined, 0)
        return self._wholes[v.tensor.name]

    def _message(self, v: Value, summed: bool, shape: tf.TensorShape | list[int | None]) -> Value:
        if self.guards.of(v.tensor):
            raise Refused("there is a condition in the graph, and a branch of it mixes the rows of the batch: "
                          f"{self._user}")
        result = tf.compat.v1.placeholder_with_default(v.tensor, shape)
        self.messages[result.op.name] = Message(v.tensor, result, summed, self._user)
        return Value(result, 0)

    def own(self, v: Value, like: int, surely: bool = False) -> Value:
        """Own rows, ``like`` lines for each; of a tensor with one line, which goes with every one, that (but ``surely``
        it has them all)."""
        rank = v.tensor.shape.rank
        if v.rows or (not surely and (rank == 0 or v.tensor.shape.as_list()[0] == 1)):
            return v
        keep = tf.equal(self.place[:1], 0)
        if not surely:
            keep = tf.logical_or(keep, tf.equal(tf.shape(v.tensor)[:1], 1))
        first = tf.where(keep, np.zeros(1, np.int32), self.place[1:2] * like)
        count = tf.where(keep, -np.ones(1, np.int32), self.place[2:3] * like)
        others = np.zeros(rank - 1, np.int32)
        rows = tf.slice(v.tensor, tf.concat([first, others], 0), tf.concat([count, others - 1], 0))
        rows.set_shape([None, *v.tensor.shape[1:]])
        return Value(rows, like)

    def shape(self, v: Value, dtype: tf.DType) -> Value:
        """The shape of all of it."""
        shape = tf.shape(v.tensor, out_type=dtype)
        if v.rows:
            every = tf.where(tf.equal(self.place[:1], 0), shape[:1], tf.cast(self.place[3:4] * v.rows, dtype))
            shape = tf.concat([every, shape[1:]], 0)
        return Value(shape, 0)

    def size(self, v: Value, dtype: tf.DType) -> Value:
        """How many elements all of it has."""
        return Value(tf.reduce_prod(self.shape(v, dtype).tensor), 0)

    def own_shape(self, v: Value, like: int) -> Value:
        """Of the shape of all rows that of this rank's."""
        shape = v.tensor
        mine = tf.where(tf.equal(self.place[:1], 0), shape[:1], tf.cast(self.place[2:3] * like, shape.dtype))
        return Value(tf.concat([mine, shape[1:]], 0), 0)

    def reduced(self, kind: str, v: Value, axes: tuple, keep: bool, rows: bool) -> Value:
        """A reduction of what this rank has."""
        names = {"Sum": "sum", "Mean": "mean", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any"}
        out = getattr(tf, f"reduce_{names[kind]}")(v.tensor, axis=list(axes), keepdims=keep)
        return Value(out, v.rows if rows else 0)

    def divided(self, total: Value, of: Value, axes: tuple) -> Value:
        """A mean: the sum by how many there are of all."""
        count = tf.reduce_prod(tf.gather(self.shape(of, tf.int32).tensor, list(axes)))
        return Value(total.tensor / tf.cast(count, total.tensor.dtype), 0)

    def reshaped(self, v: Value, shape: list[int], like: int) -> Value:
        """Every row in another shape, of ``like`` lines."""
        return Value(tf.reshape(v.tensor, shape), like)


class Guards:
    """In which branches of conditions a tensor is, as (the condition's name, which side)."""

    def __init__(self) -> None:
        self._known: dict[str, frozenset] = {}  # by operation; a Switch adds one more to each result

    def of(self, tensor: tf.Tensor) -> frozenset:
        """The guards of ``tensor``."""
        waiting = [tensor.op]
        while waiting:
            op = waiting[-1]
            missing = [b for b in _before(op) if b.name not in self._known]
            if op.name in self._known or op.type in _LOOPS:  # of what is in a loop nothing is asked
                self._known.setdefault(op.name, frozenset())
                waiting.pop()
            elif missing:
                waiting.extend(missing)
            else:
                found = [self._at(t) for t in op.inputs] + [self._known[c.name] for c in op.control_inputs]
                join = frozenset.intersection if op.type.endswith("Merge") else frozenset.union
                self._known[op.name] = join(*found) if found else frozenset()
                waiting.pop()
        return self._at(tensor)

    def _at(self, tensor: tf.Tensor) -> frozenset:
        guards, op = self._known[tensor.op.name], tensor.op
        if not op.type.endswith("Switch"):
            return guards
        flag = op.inputs[1]
        while flag.op.type == "Identity":
            flag = flag.op.inputs[0]
        return guards | {(flag.name, tensor.value_index)}


class _Building:
    """New operations go into a graph, wherever the script is: outside of its names, devices and dependencies."""

    def __init__(self, graph: tf.Graph) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        self.finalized, self.graph._finalized = self.graph._finalized, False
        self.contexts = [self.graph.as_default(), self.graph.name_scope(PREFIX), self.graph.control_dependencies(None)]
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)
        self.graph._finalized = self.finalized


def _before(op: tf.Operation) -> list[Any]:
    return [*(t.op for t in op.inputs), *_controls(op)]


def _controls(op: tf.Operation) -> list[Any]:
    """In one order on all ranks: TensorFlow gives control inputs as they lie in memory. That one input's gradient waits
    for those of the others, though nobody asks for them, is left out."""
    return sorted((c for c in op.control_inputs if not c.name.endswith("_grad/tuple/group_deps")), key=lambda c: c.name)


def behind(ops: list[Any]) -> dict[str, Any]:
    """These operations and all that they depend on, by name."""
    found: dict[str, Any] = {}
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found[op.name] = op
            waiting += _before(op)
    return found


def ahead(op: tf.Operation) -> dict[str, Any]:
    """This operation and all that depend on it, by name."""
    found: dict[str, Any] = {}
    waiting = [op]
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found[op.name] = op
            waiting += [c for t in op.outputs for c in t.consumers()] + op._control_outputs
    return found


def levels(found: dict[str, Any], messages: dict[str, Message]) -> dict[str, int]:
    """Behind how many messages, one after the other, each of these operations is. One that only waits for a message,
    and takes nothing from it, may run when that is sent, before its result has come: TensorFlow waits for the default
    of what is fed."""
    known: dict[str, int] = {}
    for op in found.values():
        waiting = [op]
        while waiting:
            op = waiting[-1]
            missing = [b for b in _before(op) if b.name not in known]
            if op.name in known or op.type in _LOOPS:  # what is in a loop is behind none
                known.setdefault(op.name, 0)
                waiting.pop()
            elif missing:
                waiting.extend(missing)
            else:
                waited = [_identical(c) for c in _controls(op)]
                at = [known[t.op.name] for t in op.inputs] + [known[c.name] - (c.name in messages) for c in waited]
                known[op.name] = max(at, default=0) + (op.name in messages)
                waiting.pop()
    return known


def _identical(op: tf.Operation) -> Any:
    """Where its value comes from: TensorFlow may put that in its place."""
    while op.type == "Identity":
        op = op.inputs[0].op
    return op
