"""A compiled step in which a rank was lost is done again: variables are put back, and the batch is cut anew.

So it is with Keras's steps (``adapt/keras/steps.py``) and with every outermost ``tf.function`` of the script. A graph
that is built step by step, eagerly, cannot be gone back through once its rows are gone: the run stops, and says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from oars.adapt.meet import meet
from oars.adapt.tensorflow import wire
from oars.engine.world import RankLost

_guarded = False  # inside a step that is done again when it must be


def until_done(step: Callable[[], Any], changed: Callable[[], list[Any]]) -> Any:
    """``step()``, again after a loss; ``changed`` gives the variables it may have changed by then."""
    global _guarded
    if _guarded:
        return step()
    while True:
        kept = [(v, v.read_value()) for v in changed()] if meet.world.survives else []
        _guarded = True
        try:
            return step()
        except (RankLost, tf.errors.OpError):
            if not meet.lost and meet.world.adopted == meet.world.era:
                raise
            for v, value in kept:
                v.assign(value)
            wire.renew()
        finally:
            _guarded = False


def stop(what: str) -> None:
    """End the run, unless a step around this one is done again."""
    if not _guarded:
        raise SystemExit(f"oars: a rank was lost in {what}, which cannot be done again: "
                         "put the step into a tf.function, or use fit") from None


def install() -> None:
    """Patch the call of a tf.function."""
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    function = polymorphic_function.Function
    plain = function.__call__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _guarded or meet.inside or not tf.executing_eagerly() or not meet.calls or not meet.world.survives:
            return plain(self, *args, **kwargs)

        def step() -> Any:
            try:
                return plain(self, *args, **kwargs)
            except tf.errors.OpError:
                if meet.lost and any(isinstance(a, tf.data.Iterator) for a in tf.nest.flatten((args, kwargs))):
                    raise SystemExit("oars: a rank was lost in a tf.function that takes batches from an iterator by "
                                     "itself, which cannot be done again: give it the batch") from None
                raise

        return until_done(step, lambda: _variables(self))

    function.__call__ = call


def _variables(function: Any) -> list[Any]:
    found = {id(v): v for graph in function._list_all_concrete_functions() for v in graph.variables}
    return list(found.values())
