"""``oars run --tf1``: scripts written for TensorFlow 1 on today's TensorFlow, unchanged.

``import tensorflow as tf`` has the names of 2017: placeholders, sessions, ``tf.train.*Optimizer``. What such scripts
import and is gone, the MNIST tutorial's reader, is here again (``mnist``). A run of a session that trains is cut: each
rank computes on its rows of what is fed (``cut``, ``stages``). All other runs every rank does whole.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from typing import Any

from oars.adapt.random import common_seed

_BY_HAND = ("ClusterSpec", "Server", "replica_device_setter", "SyncReplicasOptimizer")
_GONE = ("contrib", "layers", "estimator", "nn.rnn_cell")


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
    for name in _BY_HAND:
        setattr(old.train, name, _refused(name))
    for name in _GONE:
        _say_gone(tf, name)
    _give_mnist()
    _runs(old, world, record)
    if world is not None:
        _same_random_numbers()
        _whole_graphs_placed(old)


def _refused(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise SystemExit(f"oars: tf.train.{name} is for processes started by hand: delete the lines with ClusterSpec, "
                         "Server and replica_device_setter, and let oars run -n start the ranks")

    return call


def _say_gone(tf: Any, name: str) -> None:
    """Whatever is wanted of ``tf.name``, imported or called, ends the script with one line."""
    above, _, last = name.rpartition(".")
    gone = _Gone(f"tensorflow.{name}")
    sys.modules[gone.__name__] = gone
    for holder in (getattr(tf, above) if above else tf, getattr(tf.compat.v1, above) if above else tf.compat.v1):
        setattr(holder, last, gone)


class _Gone(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # somebody looks through all modules
            raise AttributeError(name)
        self._end("" if name == "__path__" else f".{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._end("")

    def _end(self, part: str) -> None:
        raise SystemExit(f"oars: tf{self.__name__.removeprefix('tensorflow')}{part} went with TensorFlow 1 and is not "
                         "in today's: write that part with tf.nn, tf.get_variable and tf.train")


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


def _runs(old: Any, world: Any, record: Any) -> None:
    """Cut the runs that train, by what an optimizer's ``minimize`` or ``apply_gradients`` gave, and count them."""
    from oars.adapt.tensorflow import stages

    trains: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # graph -> such an operation -> its loss
    optimizer, plain_run = old.train.Optimizer, old.Session.run
    plain_compute, plain_apply = optimizer.compute_gradients, optimizer.apply_gradients

    @functools.wraps(plain_compute)
    def compute_gradients(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._oars_loss = loss.name if getattr(loss, "shape", None) == () else None
        return plain_compute(self, loss, *args, **kwargs)

    @functools.wraps(plain_apply)
    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        op = plain_apply(self, *args, **kwargs)
        trains.setdefault(op.graph, {})[op.name] = getattr(self, "_oars_loss", None)
        return op

    @functools.wraps(plain_run)
    def run(self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        known = trains.get(self.graph)
        training = [] if known is None else [op for op in known if op in stages.names(self.graph, fetches)]
        loss = known[training[0]] if known and training else None
        if loss is not None and not stages.comes_along(self.graph, loss, fetches):
            loss = None
        asked = fetches if loss is None else (fetches, loss)
        if world is None or known is None:
            out = plain_run(self, asked, feed_dict, options, run_metadata)
        else:
            out = stages.run(self, plain_run, asked, feed_dict, options, run_metadata, bool(training))
        value = None
        if loss is not None:
            out, value = out
        if training:
            rows = max((len(v) for v in (feed_dict or {}).values() if hasattr(v, "__len__")), default=0)
            record.step(None if value is None else float(value), rows)
        return out

    optimizer.compute_gradients, optimizer.apply_gradients = compute_gradients, apply_gradients
    base = old.Session.__mro__[1]
    base.run = run
    if world is not None:
        old.Graph.as_graph_def = stages.unseen(old.Graph.as_graph_def)


def _whole_graphs_placed(old: Any) -> None:
    """A session that places only what it runs, as an InteractiveSession does, loses what a partial run is fed later."""
    from oars.adapt.tensorflow import files

    base = old.Session.__mro__[1]
    plain = base.__init__

    @functools.wraps(plain)
    def init(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        if isinstance(config, old.ConfigProto):
            config = old.ConfigProto.FromString(config.SerializeToString())
            config.graph_options.place_pruned_graph = False
        files.wait()  # its readers read what the script may just have written
        plain(self, target, graph, config)

    base.__init__ = init


def _same_random_numbers() -> None:
    """An operation without a seed, in a graph without one, draws what it draws on all ranks."""
    from tensorflow.python.framework import random_seed

    plain, drawn = random_seed.get_seed, itertools.count()

    @functools.wraps(plain)
    def get_seed(op_seed: Any) -> Any:
        seeds = plain(op_seed)
        return (common_seed("tensorflow"), next(drawn)) if seeds == (None, None) else seeds

    random_seed.get_seed = get_seed
