"""``oars run --tf1``: scripts written for TensorFlow 1 on today's TensorFlow, unchanged.

``import tensorflow as tf`` has the names of 2017: placeholders, sessions, ``tf.train.*Optimizer``. What such scripts
import and is gone, the MNIST tutorial's reader, is here again (``mnist``). A graph has no place where a batch ends and
a loss begins, so a session's work is not cut: every rank does all of it, with the same random numbers. That is exact,
and no faster; one line says so.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from typing import Any

from oars.adapt.random import common_seed

_GONE = ("ClusterSpec", "Server", "replica_device_setter", "SyncReplicasOptimizer")


def install(tf: Any, world: Any, record: Any) -> None:
    """Give the module ``tensorflow`` the names and the behaviour of TensorFlow 1."""
    old = tf.compat.v1
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # that this is not the future is no news to these scripts
    old.disable_v2_behavior()
    logger.setLevel(level)
    for name in dir(old):
        if not name.startswith("__"):
            setattr(tf, name, getattr(old, name))
    for name in _GONE:
        setattr(old.train, name, _refused(name))
    _give_mnist()
    _count_steps(old, record)
    if world is not None:
        record.notice("sessions of TensorFlow 1 are not cut: every rank computes all of it, the same and no faster")
        _same_random_numbers()


def _refused(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise SystemExit(f"oars: tf.train.{name} is for processes started by hand: delete the lines with ClusterSpec, "
                         "Server and replica_device_setter, and let oars run -n start the ranks")

    return call


def _give_mnist() -> None:
    """``from tensorflow.examples.tutorials.mnist import input_data``."""
    from oars.adapt.tensorflow import mnist

    name = "tensorflow"
    for part in ("examples", "tutorials", "mnist"):
        parent, name = sys.modules[name], f"{name}.{part}"
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        setattr(parent, part, module)
    sys.modules[name + ".input_data"] = mnist
    sys.modules[name].input_data = mnist  # type: ignore[attr-defined]


def _count_steps(old: Any, record: Any) -> None:
    """Tell the record of every run of what an optimizer's ``minimize`` or ``apply_gradients`` gave."""
    trains: set[Any] = set()
    plain_apply, plain_run = old.train.Optimizer.apply_gradients, old.Session.run

    @functools.wraps(plain_apply)
    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        op = plain_apply(self, *args, **kwargs)
        trains.add(op)
        return op

    @functools.wraps(plain_run)
    def run(self: Any, fetches: Any, feed_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        out = plain_run(self, fetches, feed_dict, *args, **kwargs)
        if any(f in trains for f in _flat(fetches) if f.__hash__ is not None):
            rows = max((len(v) for v in (feed_dict or {}).values() if hasattr(v, "__len__")), default=0)
            record.step(None, rows)
        return out

    old.train.Optimizer.apply_gradients = apply_gradients
    base = old.Session.__mro__[1]
    base.run = run


def _flat(fetches: Any) -> list[Any]:
    if isinstance(fetches, dict):
        fetches = list(fetches.values())
    if not isinstance(fetches, (list, tuple)):
        return [fetches]
    return [leaf for part in fetches for leaf in _flat(part)]


def _same_random_numbers() -> None:
    """An operation without a seed, in a graph without one, draws what it draws on all ranks."""
    from tensorflow.python.framework import random_seed

    plain, drawn = random_seed.get_seed, itertools.count()

    @functools.wraps(plain)
    def get_seed(op_seed: Any) -> Any:
        seeds = plain(op_seed)
        return (common_seed("tensorflow"), next(drawn)) if seeds == (None, None) else seeds

    random_seed.get_seed = get_seed
