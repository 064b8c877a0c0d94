"""Options of TensorFlow that a rank cannot have: XLA, several devices, models in the threads of tf.data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from oars.adapt.meet import meet

if TYPE_CHECKING:
    from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper


def function(inner: Callable[..., Any]) -> Any:
    """XLA cannot call the host: what the script wants compiled by it stays a graph. Not Keras's own operations: they
    send nothing, and some (grouped convolutions) have no other way."""
    @functools.wraps(inner)
    def function(func: Callable[..., Any] | None = None, *args: Any, jit_compile: bool | None = None,
                 **kwargs: Any) -> Any:
        if func is None:
            return functools.partial(function, jit_compile=jit_compile, **kwargs)
        if jit_compile and getattr(func, "__module__", "") != "keras.src.backend.tensorflow.nn":
            meet.record.notice("jit_compile=True is ignored: XLA cannot compile a graph that communicates with ranks")
            jit_compile = None
        return inner(func, *args, jit_compile=jit_compile, **kwargs)

    return function


@functools.cache
def one_device(strategy: type[tf.distribute.Strategy]) -> Any:
    """A strategy that mirrors variables over this process's devices: a rank has one, and needs no threads for it, in
    which models would not be split."""
    def new(cls: type, *args: object, **kwargs: object) -> Any:
        return tf.distribute.OneDeviceStrategy("/gpu:0" if tf.config.list_logical_devices("GPU") else "/cpu:0")

    return type(strategy.__name__, (strategy,), {"__new__": new, "__doc__": strategy.__doc__})


def whole_in_pipelines(inner: Callable[..., Any]) -> Any:
    """Functions of a tf.data pipeline run in threads of their own: models called there run whole."""
    @functools.wraps(inner)
    def init(self: StructuredFunctionWrapper, *args: object, **kwargs: object) -> None:
        meet.inside += 1
        try:
            inner(self, *args, **kwargs)
        finally:
            meet.inside -= 1

    return init
