"""The names of 2017: what scripts written for TensorFlow 1 import or call, and today's TensorFlow does not show.

``tf.layers`` and ``tf.nn.rnn_cell`` it still carries, out of sight; ``batch_normalization``, which went to Keras 2, is
written anew (``normalization``). Of ``tf.contrib`` there is what has moved elsewhere: cells of recurrent networks,
initializers, regularizers. The MNIST tutorial's reader is ``mnist``, its network ``mnist_model``. Whatever else is gone
ends a script in one line.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any

_BY_HAND = ("ClusterSpec", "Server", "replica_device_setter", "SyncReplicasOptimizer")
_CELLS = ("BasicLSTMCell", "BasicRNNCell", "DeviceWrapper", "DropoutWrapper", "GRUCell", "LSTMCell", "LSTMStateTuple",
          "MultiRNNCell", "RNNCell", "ResidualWrapper")
_CUT_OFF = 0.87962566103423978  # the standard deviation of a normal distribution that is cut off at 2


def install(tf: Any) -> None:
    """Give the module ``tensorflow`` the names of TensorFlow 1."""
    old, imported = tf.compat.v1, importlib.import_module("tensorflow.compat.v1")  # two modules with the same names
    # That these are not the future is no news to these scripts.
    warnings.filterwarnings("ignore", module=r"tensorflow\.python\.keras\.")
    for name in dir(old):
        if not name.startswith("__"):
            setattr(tf, name, getattr(old, name))
    for name in _BY_HAND:
        for module in (old, imported):
            setattr(module.train, name, _refused(name))
    _give(_layers(), tf, old, imported)
    _give(_cells("tensorflow.nn.rnn_cell"), old.nn, imported.nn)
    _give(_Gone("tensorflow.estimator"), tf, old, imported)
    contrib = _Gone("tensorflow.contrib")
    _give(contrib, tf, old, imported)
    _give(_contrib_rnn(old), contrib)
    _give(_contrib_layers(old), contrib)
    sys.meta_path.insert(0, _Ends())
    _give_mnist()


def _give(module: types.ModuleType, *holders: Any) -> None:
    """Make a module what its name says, imported or as an attribute of these."""
    sys.modules[module.__name__] = module
    for holder in holders:
        setattr(holder, module.__name__.rpartition(".")[2], module)


def _refused(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise SystemExit(f"oars: tf.train.{name} is for processes started by hand: delete the lines with ClusterSpec, "
                         "Server and replica_device_setter, and let oars run -n start the ranks")

    return call


class _Gone(types.ModuleType):
    """Whatever is wanted of it that it has not, imported or called, ends the script with one line."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # somebody looks through all modules
            raise AttributeError(name)
        _end(f"{self.__name__}.{name}")


class _Ends:
    """Looks for modules before all others do: an import of what is gone ends the script too."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(("tensorflow.contrib.", "tensorflow.estimator.")):
            _end(name)


def _end(name: str) -> None:
    raise SystemExit(f"oars: tf{name.removeprefix('tensorflow')} went with TensorFlow 1 and is not in today's: write "
                     "that part with tf.nn, tf.layers, tf.get_variable and tf.train")


def _layers() -> types.ModuleType:
    from tensorflow.python.layers import layers

    from oars.adapt.tensorflow import normalization

    module = types.ModuleType("tensorflow.layers")
    for name in dir(layers):
        if not name.startswith("_"):
            setattr(module, name, getattr(layers, name))
    vars(module).update(BatchNormalization=normalization.BatchNormalization,
                        batch_normalization=normalization.batch_normalization)
    return module


def _cells(name: str) -> types.ModuleType:
    from tensorflow.python.ops import rnn_cell_impl

    module = _Gone(name)
    for cell in _CELLS:
        setattr(module, cell, getattr(rnn_cell_impl, cell))
    return module


def _contrib_rnn(old: Any) -> types.ModuleType:
    module = _cells("tensorflow.contrib.rnn")
    vars(module).update(static_rnn=old.nn.static_rnn, static_bidirectional_rnn=old.nn.static_bidirectional_rnn)
    return module


def _contrib_layers(old: Any) -> types.ModuleType:
    def scaled(factor: float = 2.0, mode: str = "FAN_IN", uniform: bool = False, seed: Any = None,
               dtype: Any = old.float32) -> Any:
        """It took the cut-off of a normal distribution for a factor of 1.3 in its variance."""
        kind, scale = ("uniform", factor) if uniform else ("truncated_normal", 1.3 * factor * _CUT_OFF**2)
        return old.variance_scaling_initializer(scale, mode.lower(), kind, seed, dtype)

    def xavier(uniform: bool = True, seed: Any = None, dtype: Any = old.float32) -> Any:
        return scaled(1.0, "FAN_AVG", uniform, seed, dtype)

    def l1(scale: float, scope: Any = None) -> Any:
        return lambda weights: old.multiply(scale, old.reduce_sum(old.abs(weights)), name=scope)

    def l2(scale: float, scope: Any = None) -> Any:
        return lambda weights: old.multiply(scale, old.nn.l2_loss(weights), name=scope)

    module = _Gone("tensorflow.contrib.layers")
    vars(module).update(xavier_initializer=xavier, xavier_initializer_conv2d=xavier, l1_regularizer=l1,
                        l2_regularizer=l2, variance_scaling_initializer=scaled, flatten=old.layers.flatten)
    return module


def _give_mnist() -> None:
    """``from tensorflow.examples.tutorials.mnist import input_data, mnist``."""
    from oars.adapt.tensorflow import mnist, mnist_model

    name = "tensorflow"
    for part in ("examples", "tutorials", "mnist"):
        parent, name = sys.modules[name], f"{name}.{part}"
        module = types.ModuleType(name)
        module.__path__ = []
        _give(module, parent)
    for part, ours in (("input_data", mnist), ("mnist", mnist_model)):
        sys.modules[f"{name}.{part}"] = ours
        setattr(sys.modules[name], part, ours)
