"""A run of a TensorFlow 1 session on own rows (``cut``), in stages: up to the messages, then on from their results.

That is TensorFlow's own partial run: every operation runs once, and messages are sent from here, by the main thread, in
the same order on every rank. When a rank is lost the run is done again for the living: what it had drawn or taken from
elsewhere is given to it, and variables that it had changed by then are put back. The last stage sends nothing, so what
is changed in it, which is nearly all, is changed once.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.util import deprecation, nest

from oars.adapt.meet import meet
from oars.adapt.tf1.cut import PREFIX, Cut, Message, Refused, behind, levels
from oars.engine.world import RankLost

_READS = ("ReadVariableOp", "ResourceGather", "VarIsInitializedOp", "IsVariableInitialized", "RefIdentity",
          "VarHandleOp", "VariableV2", "Variable", "VariableShape")
_WAITED_FOR = "_has_manual_control_dependencies"  # TensorFlow's mark
_waits: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # graph -> operation -> what it waits for; is it marked
_cuts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # graph -> its Cut


def run(session: tf.compat.v1.Session, plain: Callable[..., Any], fetches: Any, feeds: dict[Any, Any] | None,
        options: tf.compat.v1.RunOptions | None, metadata: tf.compat.v1.RunMetadata | None, trains: bool) -> Any:
    """``session.run``: of the second version of the graph, and if it ``trains`` on this rank's rows."""
    cut = _cuts.get(session.graph)
    if cut is None:
        cut = _cuts[session.graph] = Cut(session.graph)
    if cut.refused:
        if trains:
            _say_whole(cut.refused)
        return plain(session, fetches, feeds, options, metadata)
    try:
        fed = {cut.fed(key, value): value for key, value in nest.flatten_dict_items(feeds or {}).items()}
        mapped = _each(fetches, functools.partial(_mapped, cut))
        given = {_fed(cut, tensor, trains): value for tensor, value in fed.items()}
        plan = cut.plans.get(_key(mapped))
        if plan is None:
            plan = cut.plans[_key(mapped)] = Stages(cut, mapped)
            cut.second |= {name for name in _drawing(cut.graph, fetches) if cut.is_other(name)}
            _check_streams(cut)
    except Refused as refusal:
        drawn = _drawing(cut.graph, fetches)
        if trains:
            _say_whole(str(refusal))
        if (trains or drawn) and not cut.second:
            cut.refused = str(refusal)
        cut.first |= drawn
        _check_streams(cut)
        return plain(session, fetches, feeds, options, metadata)
    rows = {len(np.atleast_1d(value)) for key, value in given.items()
            if isinstance(key, tf.Tensor) and key.op.name in cut.open}
    reason = plan.reason
    if len(rows) > 1:
        reason = f"what is fed has different numbers of rows ({sorted(rows)})"
    elif not plan.stages:
        reason = "no placeholder that it is fed by has an open first dimension"
    if trains and reason:
        _say_whole(reason)
    if (not trains or reason or not rows or min(rows) < meet.size or options is not None or metadata is not None
            or threading.current_thread() is not threading.main_thread()):
        return plain(session, mapped, given, options, metadata)
    return _until_done(session, plain, cut, plan, mapped, given, rows.pop())


@functools.lru_cache(256)
def _drawn(graph: tf.Graph, fetched: tuple[str, ...]) -> frozenset[str]:
    ops = map(graph.get_operation_by_name, _names(graph, fetched))
    return frozenset(op.name for op in ops if _acts(op) and not _writes(op))


def _drawing(graph: tf.Graph, fetches: Any) -> frozenset[str]:
    """What draws in a run of these fetches."""
    return _drawn(graph, _fetched(fetches))


def draws(graph: tf.Graph, fetches: Any) -> bool:
    """Whether a run of these fetches draws: then it is of the second version, even if nothing trains yet."""
    return bool(_drawing(graph, fetches))


def _check_streams(cut: Cut) -> None:
    """One stream of random numbers must not become two."""
    if cut.first & cut.second:
        raise SystemExit(f"oars: {min(cut.first & cut.second)} is in a run that can be cut and in one that cannot (it "
                         "has a loop or a condition): make all of the graph before the first run")


def _say_whole(reason: str) -> None:
    meet.record.notice("a session's training is not split, every rank computes all of it (correct, not faster): "
                       f"{reason}",
                       "feed the batch through placeholders whose first dimension is open ([None, …]), all with the "
                       "same number of rows; keep loops, and conditions that mix rows, out of the graph", "model")


def _mapped(cut: Cut, fetch: Any) -> Any:
    """What is to be fetched in the second version."""
    if isinstance(fetch, (str, bytes)):
        fetch = cut.graph.as_graph_element(tf.compat.as_str_any(fetch))
    if isinstance(fetch, tf.Operation):
        return cut.op(fetch)
    if isinstance(fetch, tf.Tensor):
        return cut.fetched(fetch)
    if isinstance(fetch, (tf.SparseTensor, tf.IndexedSlices)):
        parts = tf.nest.flatten(fetch, expand_composites=True)
        if all(cut.fetched(part).name == part.name for part in parts):
            return fetch
        raise Refused(f"a {type(fetch).__name__} is fetched")
    return fetch  # a variable, or an error of the script's


def _fed(cut: Cut, key: Any, trains: bool) -> Any:
    """What is to be fed in the second version; where nothing is cut, own rows are all."""
    if not isinstance(key, tf.Tensor) or key.op.type == "Placeholder":
        return key
    value = cut.value(key)
    if value.rows and trains:
        raise Refused(f"{key.name}, which is no placeholder, is fed")
    return value.tensor


def _flat(fetches: Any) -> list[Any]:
    found: list[Any] = []
    _each(fetches, found.append)
    return [leaf for leaf in found if isinstance(leaf, (tf.Operation, tf.Tensor, str))]


def _key(mapped: Any) -> tuple[str, ...]:
    return tuple(sorted(f if isinstance(f, str) else f.name for f in _flat(mapped)))


def _fetched(fetches: Any) -> tuple[str, ...]:
    return tuple(f if isinstance(f, str) else f.name for f in _flat(fetches))


@functools.lru_cache(256)
def _names(graph: tf.Graph, fetched: tuple[str, ...]) -> set[str]:
    elements = [graph.as_graph_element(name) for name in fetched]
    return set(behind([e if isinstance(e, tf.Operation) else e.op for e in elements]))


def names(graph: tf.Graph, fetches: Any) -> set[str]:
    """The names of all operations that these fetches run."""
    return _names(graph, _fetched(fetches))


@functools.lru_cache(256)
def _free(graph: tf.Graph, name: str, fetched: tuple[str, ...]) -> bool:
    more = behind([graph.as_graph_element(name).op])
    others = [more[op] for op in more.keys() - _names(graph, fetched)]
    return not any(op.type.startswith("Placeholder") or _acts(op) for op in others)


def comes_along(graph: tf.Graph, name: str, fetches: Any) -> bool:
    """Whether a run of these fetches can give this tensor too: with no more feeds, and doing nothing else."""
    return _free(graph, name, _fetched(fetches))


class Stages:
    """The stages of a run: which messages, what is drawn or read in them, which variables change before the last."""

    def __init__(self, cut: Cut, mapped: Any) -> None:
        targets = _flat(mapped)
        found = behind([f if isinstance(f, tf.Operation) else f.op for f in targets])
        at = levels(found, cut.messages)
        messages = [m for name, m in cut.messages.items() if name in found]
        last = max((at[m.result.op.name] for m in messages), default=0)
        self.stages = [[m for m in messages if at[m.result.op.name] == stage] for stage in range(1, last + 1)]
        self.reason = ""
        self.agreed: int | None = None  # the era in which all ranks were found to have the same plan
        # What another run would not give again, by stage; and how it is fetched.
        self.sources: list[list[tuple[Any, Any]]] = [[] for _ in self.stages]
        self.changed: list[Any] = []  # variables that are changed before the last message
        for name, op in found.items():
            if at[name] >= last or not _acts(op):
                continue
            if _writes(op):
                self._written(cut, op)
            elif not op.outputs:
                self.reason = f"{op.type} {op.name} cannot be done again"
            else:
                self.sources[at[name]] += [(t, cut.if_there(t)) for t in op.outputs if _feedable(t)]
        fetched = {f.name for f in targets}
        if any(t.name in fetched for stage in self.sources for t, _ in stage):
            self.reason = "what is drawn is fetched as well"

    def agree(self) -> None:
        """All ranks are to send the same messages in the same order; looked at once for each set of living ranks."""
        if self.agreed == meet.era:
            return
        messages = repr([[(m.user, m.summed, m.source.shape) for m in stage] for stage in self.stages])
        if not meet.same(np.frombuffer(messages.encode(), np.uint8)):
            raise SystemExit("oars: the ranks have made different graphs: a script for TensorFlow 1 must make the same "
                             "operations in the same order in every process")
        self.agreed = meet.era

    def _written(self, cut: Cut, op: tf.Operation) -> None:
        keys = tf.compat.v1.GraphKeys
        known = {v.op.name: v for key in (keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES)
                 for v in cut.graph.get_collection(key)}
        for tensor, kind in zip(op.inputs, op._input_types, strict=True):
            while tensor.op.type in ("Switch", "RefSwitch"):  # in a branch of a condition
                tensor = tensor.op.inputs[0]
            if kind._is_ref_dtype or kind == tf.resource:  # an optimizer's has several
                if tensor.op.name not in known:
                    self.reason = f"{op.type} {op.name} changes what cannot be put back"
                elif known[tensor.op.name] not in self.changed:
                    self.changed.append(known[tensor.op.name])


def _writes(op: tf.Operation) -> bool:
    """Whether it changes a variable."""
    return op.type not in _READS and (any(arg.is_ref for arg in op.op_def.input_arg) or (
        op.op_def.is_stateful and any(t.dtype == tf.resource for t in op.inputs)))


def _acts(op: tf.Operation) -> bool:
    """Whether it changes something, or gives something else every time: random numbers, elements of a queue."""
    return op.type not in _READS and (op.op_def.is_stateful or _writes(op))


def _feedable(tensor: tf.Tensor) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant) and not tensor.dtype._is_ref_dtype


def _until_done(session: tf.compat.v1.Session, plain: Callable[..., Any], cut: Cut, plan: Stages, fetches: Any,
                feeds: dict, rows: int) -> Any:
    survives = meet.world.survives
    kept = [(v, plain(session, v)) for v in plan.changed] if survives else []
    drawn: dict[Any, Any] = {}
    while True:
        try:
            plan.agree()
            return _in_stages(session, cut, plan, fetches, feeds, rows, drawn if survives else None)
        except RankLost:
            meet.renew()
            for variable, value in kept:
                variable.load(value, session)


def _in_stages(session: tf.compat.v1.Session, cut: Cut, plan: Stages, fetches: Any, feeds: dict, rows: int,
               drawn: dict | None) -> Any:
    """All stages; ``drawn`` keeps what is drawn in them, and gives it."""
    first, count = meet.own(rows)
    meet.record.split = True
    given = {**feeds, **(drawn or {}), cut.place: np.array([1, first, count, rows], np.int32)}
    sources = [[(t, f) for t, f in stage if drawn is not None and t not in drawn] for stage in plan.sources]
    wanted = [[f for _, f in stage] for stage in sources]
    with deprecation.silence():  # there is no other way to go on with a run
        handle = session.partial_run_setup([fetches, [[m.source for m in stage] for stage in plan.stages], wanted],
                                           [*given, *(m.result for stage in plan.stages for m in stage)])
        for stage, drawing, fetched in zip(plan.stages, sources, wanted, strict=True):
            parts, seen = session.partial_run(handle, [[m.source for m in stage], fetched], given)
            if drawn is not None:
                drawn.update(_there(drawing, seen))
            given = dict(zip([m.result for m in stage], _exchanged(stage, parts, rows), strict=True))
        # Operations run when they can; the last stage ends when they have.
        values = iter(session.partial_run(handle, _leaves(fetches), given))
    return _each(fetches, lambda leaf: None if isinstance(leaf, tf.Operation) else next(values))


def _there(drawing: list[tuple[Any, Any]], seen: list[Any]) -> dict:
    """What was drawn: not what is in a branch of a condition that was not taken."""
    values = [(t, *value) if isinstance(fetch, tuple) else (t, value, 0)
              for (t, fetch), value in zip(drawing, seen, strict=True)]
    return {t: value for t, value, absent in values if not absent}


def _leaves(fetches: Any) -> list[Any]:
    found: list[Any] = []
    _each(fetches, found.append)
    return [leaf for leaf in found if not isinstance(leaf, tf.Operation)]


def _each(fetch: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure of what each of its leaves is changed to."""
    if isinstance(fetch, dict):
        return type(fetch)((key, _each(value, change)) for key, value in fetch.items())
    if isinstance(fetch, tuple) and hasattr(fetch, "_fields"):
        return type(fetch)(*(_each(value, change) for value in fetch))
    if isinstance(fetch, (list, tuple)):
        return type(fetch)(_each(value, change) for value in fetch)
    return change(fetch)


def _exchanged(stage: list[Message], parts: list[np.ndarray], rows: int) -> list[np.ndarray]:
    """The messages of a stage: all sums of a precision in one."""
    results: list[Any] = [None] * len(stage)
    for i, (message, part) in enumerate(zip(stage, parts, strict=True)):
        if not message.summed:
            began = perf_counter()
            results[i] = meet.gather(np.asarray(part), rows)
            meet.record.gather(message.user, perf_counter() - began, results[i].nbytes)
    for wide in (np.float32, np.float64):
        at = [i for i, m in enumerate(stage) if m.summed and (parts[i].dtype == np.float64) == (wide is np.float64)]
        if at:
            flat = meet.total(np.concatenate([np.ravel(parts[i]).astype(wide, copy=False) for i in at]))
            ends = np.cumsum([parts[i].size for i in at])[:-1]
            for i, part in zip(at, np.split(flat, ends), strict=True):
                results[i] = part.reshape(parts[i].shape).astype(parts[i].dtype)
    return results


@contextmanager
def updates_behind(grads: list[Any]) -> Iterator[None]:
    """What is put into the graph here waits for all these gradients. TensorFlow 1 changes a variable in its place,
    while the gradient of the layer below may still be reading it: other numbers every time, and on every rank."""
    graph = tf.compat.v1.get_default_graph()
    parts = [part.op for part in nest.flatten(grads, expand_composites=True) if isinstance(part, tf.Tensor)]
    known = {op.name for op in graph.get_operations()}
    marked = {op.name for op in parts if _WAITED_FOR not in op.node_def.attr}
    with graph.control_dependencies(parts):
        yield
    names = {f"^{op.name}" for op in parts}
    waits = _waits.setdefault(graph, {})
    waits.update({op.name: (names, False) for op in graph.get_operations() if op.name not in known})
    waits.update({name: (set(), True) for name in marked})


def unseen(plain: Callable[..., Any]) -> Any:
    """``Graph.as_graph_def`` without the second version, and without what updates wait for: files hold the script's
    graph."""
    def as_graph_def(self: tf.Graph, *args: Any, **kwargs: Any) -> Any:
        graph, waits = plain(self, *args, **kwargs), _waits.get(self, {})
        for i in reversed(range(len(graph.node))):
            node = graph.node[i]
            if node.name.startswith(PREFIX):
                del graph.node[i]
            elif node.name in waits:
                names, marked = waits[node.name]
                node.input[:] = [name for name in node.input if name not in names]
                if marked:
                    node.attr.pop(_WAITED_FOR, None)
        return graph

    return as_graph_def
