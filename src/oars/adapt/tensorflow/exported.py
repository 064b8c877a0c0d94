"""What leaves a script is a graph as one process has it: models in it are whole, and it sends nothing.

So it is with ``tf.saved_model.save`` and with what ``get_concrete_function`` gives, to be frozen or converted, unless
gradients are asked for in it: then it is a step of training. Such traces are kept apart from those that run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oars.adapt.meet import meet

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


def install() -> None:
    """Patch savers of functions, and the key by which TensorFlow knows a trace."""
    from tensorflow.python.eager.polymorphic_function import function_context, polymorphic_function
    from tensorflow.python.saved_model import save as saved_model

    function = polymorphic_function.Function
    save, context = saved_model.save_and_return_nodes, function_context.make_function_context
    concrete, trace = function.get_concrete_function, function._get_concrete_function_garbage_collected

    @functools.wraps(save)
    def save_and_return_nodes(*args: Any, **kwargs: Any) -> Any:
        with _uncut():
            return save(*args, **kwargs)

    @functools.wraps(context)
    def make_function_context(*args: Any, **kwargs: Any) -> Any:
        made = context(*args, **kwargs)
        return made._replace(context=(made.context, "whole")) if _whole else made

    @functools.wraps(trace)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = trace(self, *args, **kwargs)
        if _whole:
            made.graph._oars_whole = True
        return made

    @functools.wraps(concrete)
    def get_concrete_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _trains
        if meet.inside:
            return concrete(self, *args, **kwargs)
        _trains = False
        with _uncut():
            made = concrete(self, *args, **kwargs)
        made.graph._oars_trains = _trains or getattr(made.graph, "_oars_trains", False)
        return concrete(self, *args, **kwargs) if made.graph._oars_trains else made

    saved_model.save_and_return_nodes = save_and_return_nodes
    function_context.make_function_context = make_function_context
    function._get_concrete_function_garbage_collected = traced
    function.get_concrete_function = get_concrete_function
