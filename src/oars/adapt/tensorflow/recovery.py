"""A compiled step in which a rank was lost is done again: variables are put back, and the batch is cut anew.

So it is with Keras's steps (``adapt/keras/steps.py``) and with every outermost ``tf.function`` of the script. A graph
that is built step by step, eagerly, cannot be gone back through once its rows are gone: the run stops, and says so.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework.auto_control_deps_utils import RESOURCE_READ_OPS
from tensorflow.python.ops.op_selector import UnliftableError

from oars.adapt.meet import meet
from oars.adapt.tensorflow import collectives
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from tensorflow.python.framework.func_graph import FuncGraph

_trace = polymorphic_function.Function.get_concrete_function  # as TensorFlow has it
_guarded = False  # inside a step that is done again when it must be
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # function -> (traces, it talks, its variables)


def until_done(step: Callable[[], Any], changed: Callable[[], list[Any]]) -> Any:
    """``step()``, again after a loss; ``changed`` gives the variables it may have changed by then."""
    global _guarded
    if _guarded:
        return step()
    while True:
        kept = [(v, v.read_value()) for v in changed()] if meet.world.survives else []
        _guarded = True
        meet.begin()
        try:
            return step()
        except (RankLost, tf.errors.OpError):
            if not meet.lost and meet.era == meet.world.era:
                raise
            for v, value in kept:
                v.assign(value)
            collectives.renew()
        finally:
            _guarded = False


def stop(what: str) -> None:
    """End the run, unless a step around this one is done again."""
    if not _guarded:
        _end(what, "put the step into a tf.function, or use fit")


def call(inner: Callable[..., Any]) -> Any:
    """Around the call of a ``tf.function``."""
    @functools.wraps(inner)
    def call(self: polymorphic_function.Function, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            meet.unite()
        if (_guarded or meet.inside or not meet.world.survives or not tf.executing_eagerly()
                or tf.config.functions_run_eagerly()):
            return inner(self, *args, **kwargs)
        if not _looked_at(self)[0]:  # its first step may be the one that is lost
            with contextlib.suppress(UnliftableError):  # then it is traced when it runs
                _trace(self, *args, **kwargs)
        traces, talks, variables = _looked_at(self)
        if not talks:
            return inner(self, *args, **kwargs)

        def step() -> Any:
            try:
                return inner(self, *args, **kwargs)
            except tf.errors.OpError:
                if meet.lost and any(isinstance(a, tf.data.Iterator) for a in tf.nest.flatten((args, kwargs))):
                    _end("a tf.function that takes batches from an iterator by itself", "give it the batch")
                if meet.lost and {id(v) for v in _looked_at(self)[2]} - {id(v) for v in variables}:
                    _end("the first call of a tf.function for other variables", "resume from a checkpoint")
                raise

        return until_done(step, lambda: variables)

    return call


def _looked_at(function: polymorphic_function.Function) -> tuple[int, bool, list[Any]]:
    """How often a tf.function was traced, whether it has messages in it, and what it may change before the last."""
    every = [c for c in function._function_cache.values() if not getattr(c.graph, "_oars_whole", False)]
    known = _known.get(function)
    if known is None or known[0] != len(every):
        found = {id(v): v for concrete in every for v in _early(concrete.graph)}
        known = _known[function] = len(every), any(collectives.talks(c.graph) for c in every), list(found.values())
    return known


def _early(graph: FuncGraph) -> list[Any]:
    """The variables that are written to by what does not wait for the last message: all others stay, if it is lost."""
    last = None if collectives.talks_within(graph) else getattr(graph, "_oars_last", None)
    behind, waiting = set(), [last] if last is not None else []
    while waiting:
        op = waiting.pop()
        if op.name not in behind:
            behind.add(op.name)
            waiting += [c for t in op.outputs for c in t.consumers()] + op._control_outputs
    handles = {id(v.handle): v for v in graph.variables}
    inner = {internal.name: handles.get(id(external)) for external, internal in graph.captures}
    found = {}
    for op in graph.get_operations():
        if op.name not in behind and op.type not in RESOURCE_READ_OPS:
            for tensor in op.inputs:
                variable = inner.get(tensor.name) if tensor.dtype == tf.resource else None
                if variable is not None:
                    found[id(variable)] = variable
    return list(found.values())


def _end(what: str, instead: str) -> None:
    raise SystemExit(f"oars: a rank was lost in {what}, which cannot be done again: {instead}") from None
