"""The names of 2017: what scripts written for TensorFlow 1 import or call, and today's TensorFlow does not show.

``tf.layers`` and ``tf.nn.rnn_cell`` it still carries, out of sight; ``batch_normalization``, which went to Keras 2, is
written anew (``normalization``). Of ``tf.contrib`` there is what is used most (``contrib``). The MNIST tutorial's
reader is ``mnist``, its network ``mnist_model``. Whatever else of it is gone ends a script in one line. Names of before
TensorFlow 1.0 are those of what they became.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Name = tuple[Any, str, Any]  # where it stands, the name, what it is
_BY_HAND = ("ClusterSpec", "Server", "replica_device_setter", "SyncReplicasOptimizer")
_CELLS = ("BasicLSTMCell", "BasicRNNCell", "DeviceWrapper", "DropoutWrapper", "GRUCell", "LSTMCell", "LSTMStateTuple",
          "MultiRNNCell", "RNNCell", "ResidualWrapper")
# Names of 2015 and 2016, and what they became.
_OLDER = {"mul": "multiply", "sub": "subtract", "neg": "negative", "pack": "stack", "unpack": "unstack",
          "select": "where", "batch_matmul": "matmul", "complex_abs": "abs", "scalar_summary": "summary.scalar",
          "histogram_summary": "summary.histogram", "image_summary": "summary.image", "merge_summary": "summary.merge",
          "merge_all_summaries": "summary.merge_all", "train.SummaryWriter": "summary.FileWriter",
          "nn.rnn": "nn.static_rnn", "nn.bidirectional_rnn": "nn.static_bidirectional_rnn",
          "nn.seq2seq": "contrib.legacy_seq2seq"}


def given(tf: types.ModuleType) -> Iterator[Name]:
    """The names of TensorFlow 1 for the module ``tensorflow``, each to be put there before the next is asked for."""
    old, imported = tf.compat.v1, importlib.import_module("tensorflow.compat.v1")  # two modules with the same names
    # That these are not the future is no news to these scripts.
    warnings.filterwarnings("ignore", module=r"tensorflow\.python\.keras\.")
    for name in dir(old):
        if not name.startswith("__"):
            yield tf, name, getattr(old, name)
    for name in _BY_HAND:
        for module in (old, imported):
            yield module.train, name, _refused(name)
    yield from _module(_layers(), tf, old, imported)
    yield from _module(_cells("tensorflow.nn.rnn_cell"), old.nn, imported.nn)
    yield from _module(_Gone("tensorflow.estimator"), tf, old, imported)
    contrib = _Gone("tensorflow.contrib")
    yield from _module(contrib, tf, old, imported)
    for module in _contrib(old):
        yield from _module(module, sys.modules[module.__name__.rpartition(".")[0]])
    for before, now in _OLDER.items():
        holder, _, name = before.rpartition(".")
        yield operator.attrgetter(holder)(tf) if holder else tf, name, operator.attrgetter(now)(tf)
    sys.meta_path.insert(0, _Ends())
    yield from _mnist()


def _module(module: types.ModuleType, *holders: Any) -> Iterator[Name]:
    """Make a module what its name says, imported or as an attribute of these."""
    sys.modules[module.__name__] = module
    for holder in holders:
        yield holder, module.__name__.rpartition(".")[2], module


def _refused(name: str) -> Any:
    def call(*args: object, **kwargs: object) -> Any:
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

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if name.startswith(("tensorflow.contrib.", "tensorflow.estimator.")):
            _end(name)


def _end(name: str) -> None:
    raise SystemExit(f"oars: tf{name.removeprefix('tensorflow')} went with TensorFlow 1 and is not in today's: write "
                     "that part with tf.nn, tf.layers, tf.get_variable and tf.train")


def _layers() -> types.ModuleType:
    from tensorflow.python.layers import layers

    from oars.adapt.tf1 import normalization

    module = types.ModuleType("tensorflow.layers")
    vars(module).update({name: getattr(layers, name) for name in dir(layers) if not name.startswith("_")})
    vars(module).update(BatchNormalization=normalization.BatchNormalization,
                        batch_normalization=normalization.batch_normalization)
    return module


def _cells(where: str) -> types.ModuleType:
    from tensorflow.python.ops import rnn_cell_impl

    module = _Gone(where)
    vars(module).update({cell: getattr(rnn_cell_impl, cell) for cell in _CELLS})
    return module


def _contrib(old: types.ModuleType) -> Iterator[types.ModuleType]:
    """What there is of it, each behind what it is in."""
    from oars.adapt.tf1 import contrib, vocabulary

    name = "tensorflow.contrib"
    rnn = _cells(f"{name}.rnn")
    vars(rnn).update(static_rnn=old.nn.static_rnn, static_bidirectional_rnn=old.nn.static_bidirectional_rnn,
                     OutputProjectionWrapper=contrib.OutputProjectionWrapper)
    yield rnn
    for part, there in {"layers": contrib.LAYERS, "slim": contrib.LAYERS | contrib.FRAMEWORK,
                        "framework": contrib.FRAMEWORK, "legacy_seq2seq": contrib.LEGACY_SEQ2SEQ,
                        "seq2seq": {"sequence_loss": contrib.sequence_loss}, "learn": {},
                        "learn.preprocessing": {"VocabularyProcessor": vocabulary.VocabularyProcessor}}.items():
        module = _Gone(f"{name}.{part}")
        vars(module).update(there)
        yield module


# Arguments in the order of before TensorFlow 1.0, where none of them can be meant by it now.


def concat(inner: Callable[..., Any]) -> Any:
    @functools.wraps(inner)
    def joined(values: object, axis: Any = None, *args: object, **kwargs: object) -> Any:
        first = (axis, values) if isinstance(values, int) else (values, axis)
        return inner(*first, *args, **kwargs)

    return joined


def split(inner: Callable[..., Any]) -> Any:
    @functools.wraps(inner)
    def divided(value: object, num_or_size_splits: Any = None, axis: Any = 0, *args: object, **kwargs: object) -> Any:
        value, axis = (axis, value) if isinstance(value, int) else (value, axis)
        return inner(value, num_or_size_splits, axis, *args, **kwargs)

    return divided


def loss(inner: Callable[..., Any]) -> Any:
    @functools.wraps(inner)
    def loss(*args: object, **kwargs: object) -> Any:
        return inner(**dict(zip(("logits", "labels"), args, strict=False)), **kwargs)

    return loss


def _mnist() -> Iterator[Name]:
    """``from tensorflow.examples.tutorials.mnist import input_data, mnist``."""
    from oars.adapt.tf1 import mnist, mnist_model

    name = "tensorflow"
    for part in ("examples", "tutorials", "mnist"):
        parent, name = sys.modules[name], f"{name}.{part}"
        module = types.ModuleType(name)
        module.__path__ = []
        yield from _module(module, parent)
    for part, ours in (("input_data", mnist), ("mnist", mnist_model)):
        sys.modules[f"{name}.{part}"] = ours
        yield sys.modules[name], part, ours
