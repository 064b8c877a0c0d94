"""What leaves a script is a graph as one process has it: models in it are whole, and it sends nothing.

So it is with ``tf.saved_model.save`` and with what ``get_concrete_function`` gives, to be frozen or converted, unless
gradients are asked for in it: then it is a step of training. Such traces are kept apart from those that run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from oars.adapt.meet import meet

if TYPE_CHECKING:
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

_whole = False  # what is traced now leaves the script
_trains = False  # ... and asks for gradients


@contextmanager
def _uncut() -> Iterator[None]:
    global _whole
    before, _whole = _whole, True
    meet.inside += 1
    try:
        yield
    finally:
        meet.inside -= 1
        _whole = before


def asks_for_gradients() -> None:
    """Gradients are asked for in what is traced."""
    global _trains
    _trains = True


def save_and_return_nodes(inner: Callable[..., Any]) -> Any:
    """Around what writes a SavedModel."""
    @functools.wraps(inner)
    def save(*args: object, **kwargs: object) -> Any:
        with _uncut():
            return inner(*args, **kwargs)

    return save


def make_function_context(inner: Callable[..., Any]) -> Any:
    """Around what makes the key by which TensorFlow knows a trace."""
    @functools.wraps(inner)
    def context(*args: object, **kwargs: object) -> Any:
        made = inner(*args, **kwargs)
        return made._replace(context=(made.context, "whole")) if _whole else made

    return context


def traced(inner: Callable[..., Any]) -> Any:
    """Around what traces a ``tf.function``."""
    @functools.wraps(inner)
    def trace(self: Function, *args: object, **kwargs: object) -> Any:
        made = inner(self, *args, **kwargs)
        if _whole:
            made.graph._oars_whole = True
        return made

    return trace


def get_concrete_function(inner: Callable[..., Any]) -> Any:
    """Around what gives a trace to the script, which may save or send it."""
    @functools.wraps(inner)
    def concrete(self: Function, *args: object, **kwargs: object) -> Any:
        global _trains
        if meet.inside:
            return inner(self, *args, **kwargs)
        _trains = False
        with _uncut():
            made = inner(self, *args, **kwargs)
        made.graph._oars_trains = _trains or getattr(made.graph, "_oars_trains", False)
        return inner(self, *args, **kwargs) if made.graph._oars_trains else made

    return concrete
