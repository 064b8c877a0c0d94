"""Do a model's rows meet? Then it cannot be cut.

Keras's own layers treat rows one by one, but for a few that are known. Of anything else (a ``call`` of the script's
own, ``Lambda``, operations of a functional model) it is tried, with invented weights and rows: one row is spoilt with
NaN, and no other row of the result may change; and a part of the rows must give that part of the result. NaN passes
where a difference would not: through a gate that is zero, say.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oars.adapt.meet import meet

ROWS = 4
_MIXING = ("MixUp", "CutMix", "RandAugment")  # of Keras's own
probing = False  # batch normalisation then takes no statistics of the batch


def reason(model: Any, args: Any, kwargs: Any, wire: Any) -> str:
    """Why ``model`` cannot be cut into rows, or ``""``."""
    if meet.plan.get("batch") == "keep":
        return "--batch keep is for PyTorch; with Keras the batch is the script's"
    unknown = False
    for layer in model._flatten_layers():
        name = f"{type(layer).__name__} {layer.name}"
        if getattr(layer, "stateful", False):
            return f"{name} keeps a state for each row between batches"
        if layer.activity_regularizer is not None:
            return f"{name} has an activity regularizer, which sums over all rows"
        if type(layer).__name__ in _MIXING or getattr(layer, "axis", None) == 0:
            return f"{name} mixes rows"
        if type(layer).__name__ == "Lambda" or not _of_keras(layer):
            unknown = True
        unknown |= any(not hasattr(op, "weights") for op in getattr(layer, "operations", ()))
    return _tried(model, args, kwargs, wire) if unknown else ""


def _of_keras(layer: Any) -> bool:
    return all(getattr(type(layer), name).__module__.partition(".")[0] == "keras" for name in ("call", "build"))


def _tried(model: Any, args: Any, kwargs: Any, wire: Any) -> str:
    global probing
    from keras import tree

    probing = True
    try:
        rng = np.random.default_rng(0)
        inputs = tree.map_structure(lambda x: _invented(x, rng, wire), (args, kwargs))
        values = [(v, _weights(v, rng)) for v in model.variables]
        run = _runner(model, values)
        base = run(*inputs, training=True)
        if any(len(out) != ROWS for out in base):
            return "its result does not have one row for each of its input's"
        spoilt = run(*tree.map_structure(_spoil, inputs), training=True)
        others = np.arange(ROWS) != 2
        if any(not np.array_equal(a[others], b[others], equal_nan=True) for a, b in zip(base, spoilt, strict=True)):
            return "its rows depend on each other"
        base = run(*inputs, training=False)
        part = run(*tree.map_structure(lambda x: x[1:3] if _rowed(x) else x, inputs), training=False)
        if any(b.shape != a[1:3].shape or not np.allclose(a[1:3], b, 1e-3, 1e-4, True)
               for a, b in zip(base, part, strict=True)):
            return "its result for some rows depends on how many there are"
        return ""
    except Exception as error:
        told = str(error).strip().partition("\n")[0][:120]
        return f"trying it on invented rows failed ({type(error).__name__}: {told})"
    finally:
        probing = False


class _AddsLoss(Exception):
    """add_loss in a call."""


def _runner(model: Any, values: list) -> Any:
    """The model as a function of arrays, in which no variable of the script is read or changed."""
    from keras import tree
    from keras.src import backend

    def run(args: Any, kwargs: Any, training: bool) -> list[np.ndarray]:
        kwargs = dict(kwargs)
        kwargs.pop("training", None)
        if model._call_has_training_arg:
            kwargs["training"] = training
        scope = backend.StatelessScope(collect_losses=True, state_mapping=[
            (v, backend.convert_to_tensor(a, v.dtype)) for v, a in values])
        args, kwargs = tree.map_structure(lambda x: backend.convert_to_tensor(x) if _rowed(x) else x, (args, kwargs))
        with scope:
            out = model.call(*args, **kwargs)
        if scope.losses:
            raise _AddsLoss("add_loss in a call: its value is that of the whole batch")
        return [np.asarray(backend.convert_to_numpy(x)) for x in tree.flatten(out) if x is not None]

    return _eagerly(run)


def _eagerly(run: Any) -> Any:
    """``run`` outside of whatever is being traced."""
    from keras.src import backend

    def call(*args: Any, **kwargs: Any) -> Any:
        if backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.init_scope():
                return run(*args, **kwargs)
        import jax

        with jax.ensure_compile_time_eval():
            return run(*args, **kwargs)

    return call


def _rowed(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _invented(x: Any, rng: Any, wire: Any) -> Any:
    """Rows of the kind of ``x``; whole numbers are 0 or 1, which are good indices of anything."""
    if wire.rows_of(x) is None:
        if hasattr(x, "shape") and len(x.shape):
            raise TypeError(f"an input of {type(x).__name__} is no plain tensor")
        return x
    from keras.src import backend

    shape = (ROWS, *(5 if d is None else int(d) for d in x.shape[1:]))
    dtype = backend.standardize_dtype(x.dtype)
    if "float" in dtype:
        return rng.uniform(0.1, 1, shape).astype("float32" if dtype == "bfloat16" else dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _weights(v: Any, rng: Any) -> np.ndarray:
    shape = tuple(int(d) for d in v.shape)
    if "float" in v.dtype:
        return rng.uniform(0.05, 0.5, shape).astype("float32")
    return np.ones(shape, "int64")


def _spoil(x: Any) -> Any:
    if not _rowed(x):
        return x
    x = x.copy()
    x[2] = np.nan if x.dtype.kind == "f" else 1 - x[2]
    return x
