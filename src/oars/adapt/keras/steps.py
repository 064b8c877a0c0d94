"""Steps: what the run's record is told, where ``oars verify`` stops a script, and a step that is done again.

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
from typing import Any

import numpy as np

from oars.adapt.meet import meet

_models: list[Any] = []
_checked = 0


def install(keras: Any, backend: str, many: bool) -> None:
    """Patch the trainer's functions."""
    trainer = keras.Model
    if many and backend == "tensorflow":
        _tensorflow(keras, trainer)
    elif many and backend == "jax":
        from oars.adapt.keras import compiled

        compiled.install()
    plain = trainer.make_train_function

    @functools.wraps(plain)
    def make_train_function(self: Any, force: bool = False) -> Any:
        before = self.train_function
        made = plain(self, force=force)
        if self.train_function is not None and self.train_function is not before:
            self.train_function = _counted(self, self.train_function, backend)
            if not any(model is self for model in _models):
                _models.append(self)
        return made

    trainer.make_train_function = make_train_function
    if os.environ.get("OARS_DIGEST"):
        atexit.register(digest)


def _counted(model: Any, function: Any, backend: str) -> Any:
    """Tell the record of every call of a train function."""
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        data = _Seen(args[-1], backend != "torch") if hasattr(args[-1], "__next__") else args[-1]
        meet.fitting = True
        try:
            out = function(*args[:-1], data)
        finally:
            meet.fitting = False
        logs = out[0] if backend == "jax" else out
        rows = data.rows if isinstance(data, _Seen) else _rows(data)
        loss = logs.get("loss") if isinstance(logs, dict) else None
        meet.record.step(None if loss is None else float(loss), rows)
        if meet.record.steps == meet.plan.get("stop_after"):
            _leave_weights([*out[1][0]] if backend == "jax" else model.trainable_variables)
            raise SystemExit(0)
        return out

    return call


class _Seen:
    """An iterator over batches that remembers how many rows it gave, and looks whether all ranks see the same."""

    def __init__(self, batches: Any, alike: bool) -> None:
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
    """Every rank reads whole batches: they must be the same. Looked at in batches 1, 2, 4, 8, … and every 256th."""
    global _checked
    _checked += 1
    if _checked & (_checked - 1) and _checked % 256:
        return
    from keras import tree

    leaves = [np.asarray(leaf) for leaf in tree.flatten(data) if hasattr(leaf, "__array__")]
    mine = zlib.crc32(b"".join(leaf.tobytes() for leaf in leaves if leaf.dtype != object))
    if meet.world.broadcast(lambda: mine) != mine:
        raise SystemExit(f"oars: batch {_checked} is not the same on all ranks: something makes or draws its "
                         "rows without a common seed; seed it in the script")


def _rows(data: Any) -> int:
    while isinstance(data, (list, tuple, dict)) and len(data):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    shape: Any = getattr(data, "shape", ())
    return int(shape[0]) if len(shape) else 0


# -- TensorFlow


def _tensorflow(keras: Any, trainer: Any) -> None:
    from keras.src.trainers import trainer as module

    from oars.adapt.tensorflow import wire

    module.model_supports_jit = lambda model: False  # XLA cannot call the host
    make, make_predict = trainer._make_function, trainer.make_predict_function

    @functools.wraps(make)
    def make_function(self: Any, step: Any) -> Any:
        return _done_again(self, _by_kind(self, step, make(self, step)), step.__name__ == "train_step")

    @functools.wraps(make_predict)
    def make_predict_function(self: Any, force: bool = False) -> Any:
        before = self.predict_function
        made = make_predict(self, force=force)
        if self.predict_function is not before:
            self.predict_function = _done_again(self, self.predict_function, False, listed=True)
        return made

    trainer._make_function, trainer.make_predict_function = make_function, make_predict_function
    optimizer = keras.optimizers.Optimizer
    plain_apply = optimizer.apply

    @functools.wraps(plain_apply)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        with wire.behind_messages():  # else a step that is not done counts, and lets weights decay
            return plain_apply(self, grads, trainable_variables)

    optimizer.apply = apply


def _by_kind(model: Any, step: Any, plain: Any) -> Any:
    """``plain``, but batches of a tf.data pipeline are traced by its kinds: some of Keras's trackers go by shapes."""
    import tensorflow as tf

    compiled: dict[str, Any] = {}

    def function(batches: Any, kind: Any = None) -> Any:
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


def _done_again(model: Any, function: Any, trains: bool, listed: bool = False) -> Any:
    import tensorflow as tf

    from oars.adapt.tensorflow import again

    def changed() -> list[Any]:
        """What a step that is not done changes; the script's own train_step may have applied some gradients by then."""
        if trains and type(model).train_step.__module__.partition(".")[0] != "keras":
            return [v._value for v in (*model.variables, *(model.optimizer.variables if model.optimizer else ()))]
        return [v._value for v in (*model.non_trainable_variables, *model.metrics_variables)]

    def call(batches: Any) -> Any:
        kind: tuple = ()
        if not listed:
            source = batches.batches if isinstance(batches, _Seen) else batches
            kind = (source.element_spec,) if isinstance(source, tf.data.Iterator) else ()
            batches = list(itertools.islice(batches, model.steps_per_execution))
            if not batches:
                raise StopIteration
        return again.until_done(lambda: function(batches if listed else iter(batches), *kind), changed)

    return call


# -- weights


def _arrays(variables: Any) -> list[np.ndarray]:
    from keras import ops

    return [np.asarray(ops.convert_to_numpy(v), np.float32) for v in variables]


def _leave_weights(variables: Any) -> None:
    """For ``oars verify``: the weights as they stand, and a digest to compare ranks by."""
    arrays = _arrays(variables)
    if meet.record.voice:
        np.savez(meet.record.folder / "weights.npz", *arrays)
    digest(arrays)


def digest(arrays: list[np.ndarray] | None = None) -> None:
    """Write this rank's digest of the weights of all models that were trained."""
    if arrays is None:
        arrays = [a for model in _models for a in _arrays(model.weights)]
    whole = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    name = meet.world.origin if meet.world is not None else 0
    fd = os.open(meet.record.folder / f"weights-digest-{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, whole.encode())
    os.close(fd)
