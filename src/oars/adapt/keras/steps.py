"""Steps: what goes into the run's record, where ``oars verify`` stops a script, and a step that is done again.

A step is a function of the state and the global batch. When a rank is lost in it, the state is put back and the same
batch is cut anew for the ranks that are left: nothing of the epoch is left out.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from oars import runfolder
from oars.adapt.meet import meet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import keras
    import tensorflow as tf
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
    from torch.utils.data import DataLoader

    from oars.adapt.keras import async_modes, async_torch

_models: list[Any] = []
_separate: Any = None  # --sync local
_checked = 0
_loss = 0.0  # of the last batch
_SOME = 1024  # numbers


def begin(separate: async_modes.Separate | async_torch.Separate | None) -> None:
    """Steps are those of ``separate`` training, unless it is None."""
    global _separate
    _separate = separate
    if os.environ.get("OARS_DIGEST"):
        atexit.register(digest)


def make_train_function(inner: Callable[..., Any]) -> Any:
    """Around ``Model.make_train_function``."""
    @functools.wraps(inner)
    def make_train_function(self: keras.Model, force: bool = False) -> Any:
        before = self.train_function
        made = inner(self, force=force)
        if self.train_function is not None and self.train_function is not before:
            self.train_function = _counted(self, self.train_function, meet.backend)
            if not any(model is self for model in _models):
                _models.append(self)
        return made

    return make_train_function


def _counted(model: keras.Model, function: Callable[..., Any], backend: str) -> Any:
    """Tell the record of every call of a train function."""
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        global _loss
        data = _Seen(args[-1], backend != "torch") if hasattr(args[-1], "__next__") else args[-1]
        meet.fitting = True
        try:
            given = (*args[:-1], data)
            out = function(*given) if _separate is None else _separate.step(model, function, given)
        finally:
            meet.fitting = False
        logs = out[0] if backend == "jax" else out
        rows = data.rows if isinstance(data, _Seen) else _rows(data)
        loss = logs.get("loss") if isinstance(logs, dict) else None
        _loss = 0.0 if loss is None else _number(loss)
        meet.step(None if loss is None else _loss, rows)
        if meet.record.steps == meet.plan.stop_after:
            _leave_weights([*out[1][0]] if backend == "jax" else model.trainable_variables)
            raise SystemExit(0)
        return out

    return call


def _number(loss: Any) -> float:
    """A loss as one number: a train_step may give one for each row."""
    from keras import ops

    return float(np.mean(ops.convert_to_numpy(loss)))


class _Seen:
    """An iterator over batches that remembers how many rows it gave, and looks whether all ranks see the same."""

    def __init__(self, batches: Iterator[Any], alike: bool) -> None:
        self.batches, self.rows, self.alike = batches, 0, alike and meet.world is not None

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        data = next(self.batches)
        self.rows += _rows(data)
        if self.alike:
            _check(data)
        return data


def _check(data: Any) -> None:
    """Every rank reads whole batches and computes losses of them: both must be the same. Of batches 1, 2, 4, 8, … and
    of every 256th all numbers are compared, of the others some."""
    global _checked
    from keras import tree

    _checked += 1
    every = not _checked & (_checked - 1) or not _checked % 256
    mine = 0
    for leaf in tree.flatten(data):
        if hasattr(leaf, "__array__"):
            flat = np.asarray(leaf).reshape(-1)
            some = flat if every else flat[:: max(1, flat.size // _SOME)]
            mine = zlib.crc32(repr(some.tolist()).encode() if some.dtype == object else some.tobytes(), mine)
    if _separate is not None:
        _separate.saw(mine)
        return
    batch, loss = meet.world.broadcast(lambda: (mine, _loss))  # the loss to rounding: ranks may have unlike processors
    if batch != mine:
        raise SystemExit(f"oars: batch {_checked} is not the same on all ranks: its rows are made or drawn "
                         "without a common seed; set a seed in the script")
    if not np.isclose(loss, _loss, 1e-3, 1e-6, equal_nan=True):
        raise SystemExit(f"oars: the loss of batch {_checked - 1} is {_loss} on one rank and {loss} on another: "
                         "the ranks do not compute the same; oars verify shows how much they differ")


def _rows(data: Any) -> int:
    while isinstance(data, (list, tuple, dict)) and len(data):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    shape: Any = getattr(data, "shape", ())
    return int(shape[0]) if len(shape) else 0


# -- TensorFlow


def make_function(inner: Callable[..., Any]) -> Any:
    """Around ``Model._make_function``."""
    @functools.wraps(inner)
    def make_function(self: keras.Model, step: Callable[..., Any]) -> Any:
        return _of_batches(self, _by_kind(self, step, inner(self, step)))

    return make_function


def apply(inner: Callable[..., Any]) -> Any:
    """Around ``Optimizer.apply``."""
    import tensorflow as tf
    from keras.src import backend

    from oars.adapt.tensorflow import collectives

    @functools.wraps(inner)
    def apply(self: keras.Optimizer, grads: Sequence[tf.Tensor],
              trainable_variables: Sequence[keras.Variable] | None = None) -> Any:
        if not self.built and trainable_variables is not None:
            with tf.init_scope(), backend.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        with collectives.behind_messages():  # else a step that is not done counts, and lets weights decay
            return inner(self, grads, trainable_variables)

    return apply


def jit_compile(inner: property) -> property:
    """XLA cannot call the host. A model that its script compiles with it is reported: it draws other numbers."""
    setter: Any = inner.fset

    def choose(self: keras.Model, value: bool | str) -> None:
        if value:
            meet.record.notice("compile(jit_compile=True) is ignored: XLA cannot compile a graph that communicates "
                               "with other ranks; dropout and noise draw TensorFlow's numbers, which are not XLA's")
        setter(self, False)

    return property(inner.fget, choose)


def own_loader(inner: Callable[..., Any]) -> Any:
    """A torch DataLoader is read in threads of tf.data: tell PyTorch's adapter, which would cut it."""
    @functools.wraps(inner)
    def init(self: TorchDataLoaderAdapter, dataloader: DataLoader) -> None:
        from oars.adapt.torch.batches.reading import keep_aside

        keep_aside(dataloader)
        inner(self, dataloader)

    return init


def _by_kind(model: keras.Model, step: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """``plain``, but batches of a tf.data pipeline are traced by its kinds: some of Keras's trackers go by shapes."""
    import tensorflow as tf

    compiled: dict[str, Any] = {}

    def function(batches: Iterator[Any], kind: Any = None) -> Any:
        if kind is None or model.run_eagerly:
            return plain(batches)
        name = repr(kind)
        if name not in compiled:
            run = tf.autograph.experimental.do_not_convert(model._autoconvert_optionals(step))
            compiled[name] = tf.function(run, input_signature=[kind])
        for data in batches:
            outputs = compiled[name](data)
        return outputs

    return function


def _of_batches(model: keras.Model, function: Callable[..., Any]) -> Any:
    """``function``, given its batches in a list: a step that is lost is done again with the same (``again``)."""
    import tensorflow as tf

    def call(batches: Any) -> Any:
        source = batches.batches if isinstance(batches, _Seen) else batches
        kind = (source.element_spec,) if isinstance(source, tf.data.Iterator) else ()
        batches = list(itertools.islice(batches, model.steps_per_execution))
        if not batches:
            raise StopIteration
        return function(iter(batches), *kind)

    return call


# -- weights


def _arrays(variables: Iterable[Any]) -> list[np.ndarray]:
    from keras import ops

    return [np.asarray(ops.convert_to_numpy(v), np.float32) for v in variables]


def _leave_weights(variables: Iterable[Any]) -> None:
    """For ``oars verify``: the weights as they stand, and a digest to compare ranks by."""
    arrays = _arrays(variables)
    if meet.record.voice:
        np.savez(meet.record.folder / runfolder.WEIGHTS, *arrays)
    digest(arrays)


def digest(arrays: list[np.ndarray] | None = None) -> None:
    """Write this rank's digest of the weights of all models that were trained."""
    if arrays is None:
        arrays = [a for model in _models for a in _arrays(model.weights)]
    whole = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    name = meet.world.origin if meet.world is not None else 0
    fd = os.open(meet.record.folder / runfolder.weights_digest(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, whole.encode())
    os.close(fd)
