"""TensorFlow aboard: gradients of the global loss (``gradients``), messages inside graphs (``wire``), steps that
are done again after a loss (``again``), files that TensorFlow writes by itself (``files``), pipelines that are read in
parts (``reading``), functions that leave the script (``exported``).

What is cut is a Keras model's call (``adapt/keras``); all other tensors are global on every rank. Scripts of
TensorFlow 1 are in ``sessions``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from oars.plan import Plan


def install(tf: Any, world: Any, plan: Plan, record: Any) -> None:
    """Patch TensorFlow for this rank of several."""
    from oars.adapt.meet import meet
    from oars.adapt.python.imports import when_imported
    from oars.adapt.python.random import common_seed
    from oars.adapt.tensorflow import exported, files, gradients, reading, recovery, tapes

    meet.start(world, plan, record)
    files.install(tf)
    tf.random.set_seed(common_seed("tensorflow"))
    tapes.install()
    gradients.install()
    recovery.install()
    exported.install()
    reading.install()
    when_imported("tf_keras", lambda _: record.notice(
        "tf_keras (Keras 2) runs whole on every rank, the same and no faster: Keras 3 is cut"))
    _without_xla(tf, record)
    _one_device(tf)
    _data_uncut()


def _without_xla(tf: Any, record: Any) -> None:
    """XLA cannot call the host: what the script wants compiled by it stays a graph. Not Keras's own operations: they
    send nothing, and some (grouped convolutions) have no other way."""
    plain = tf.function

    @functools.wraps(plain)
    def function(func: Any = None, *args: Any, jit_compile: Any = None, **kwargs: Any) -> Any:
        if func is None:
            return functools.partial(function, jit_compile=jit_compile, **kwargs)
        if jit_compile and getattr(func, "__module__", "") != "keras.src.backend.tensorflow.nn":
            record.notice("jit_compile=True is left out: a graph that talks to other ranks cannot be XLA's")
            jit_compile = None
        return plain(func, *args, jit_compile=jit_compile, **kwargs)

    tf.function = function


def _one_device(tf: Any) -> None:
    """A strategy that mirrors variables over this process's devices: a rank has one, and needs no threads for it, in
    which models would not be cut."""
    def of_one(plain: Any) -> Any:
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return tf.distribute.OneDeviceStrategy("/gpu:0" if tf.config.list_logical_devices("GPU") else "/cpu:0")

        return type(plain.__name__, (plain,), {"__new__": new, "__doc__": plain.__doc__})

    tf.distribute.MirroredStrategy = of_one(tf.distribute.MirroredStrategy)
    if "TF_CONFIG" not in os.environ:  # nor are there other processes
        several = of_one(tf.distribute.MultiWorkerMirroredStrategy)
        tf.distribute.MultiWorkerMirroredStrategy = several
        tf.distribute.experimental.MultiWorkerMirroredStrategy = several


def _data_uncut() -> None:
    """Functions of a tf.data pipeline run in threads of their own: models called there are whole."""
    from tensorflow.python.data.ops import structured_function

    from oars.adapt.meet import meet

    wrapper = structured_function.StructuredFunctionWrapper
    plain = wrapper.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        meet.inside += 1
        try:
            plain(self, *args, **kwargs)
        finally:
            meet.inside -= 1

    wrapper.__init__ = init
