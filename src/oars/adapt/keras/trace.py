"""Do a model's rows meet? Then it cannot be cut.

Keras's own layers treat rows one by one, but for a few that are known. Of anything else (a ``call`` or an activation of
the script's own, ``Lambda``, operations of a functional model) it is tried, with invented weights and rows: one row is
spoilt with NaN, and no other row of the result may change; and a part of the rows must give that part of the result.
NaN passes where a difference would not: through a gate that is zero, say. What else may leave a call must not depend
on its rows: variables that it updates (a codebook, a metric), tensors that it keeps in attributes. And embeddings are
of two kinds: in most a call looks up lines for its rows, in some the same lines for whatever rows (positions). Nor may
rows meet on the way back, and it must be linear: on own rows gradients are N times as large, and of weights each rank
has a part. A gradient of the script's own may be anything. Nothing of the script is changed, its random numbers
neither.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from oars.adapt.meet import meet

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import keras

ROWS = 4
_MIXING = ("MixUp", "CutMix", "RandAugment", "AugMix", "RandomGaussianBlur", "RandomElasticTransform")  # Keras's own
_FOREIGN = ("Lambda", "JaxLayer", "FlaxLayer", "TFSMLayer")  # Keras's own, of which nothing is known
probing = False  # batch normalisation then takes no statistics of the batch
drawn: list[tuple] = []  # shapes of what was drawn in the run


def known_to_meet(model: keras.Model) -> str:
    """Why ``model`` cannot be cut into rows, as far as can be seen without trying."""
    if meet.plan.batch == "keep":
        return "--batch keep is for PyTorch; with Keras the batch is the script's"
    for layer in model._flatten_layers():
        name = f"{type(layer).__name__} {layer.name}"
        if getattr(layer, "stateful", False):
            return f"{name} keeps a state for each row between batches"
        if layer.activity_regularizer is not None:
            return f"{name} has an activity regularizer, which sums over all rows"
        if type(layer).__name__ in _MIXING or _over_rows(layer):
            return f"{name} mixes rows, or draws for all of them at once"
        if _of_keras(layer) and (getattr(layer, "noise_shape", None) or (None,))[0] is not None:
            return f"{name} has a mask of {layer.noise_shape[0]} rows, whatever the batch has"
    return ""


def must_be_tried(model: keras.Model) -> bool:
    """Whether there is more in it than Keras's own layers."""
    return any(type(layer).__name__ in _FOREIGN or not _of_keras(layer)
               or any(not hasattr(op, "weights") for op in getattr(layer, "operations", ()))
               or _over_rows(layer) is None
               for layer in model._flatten_layers())


def _over_rows(layer: keras.Layer) -> bool | None:
    """Whether the axis that a layer works along is the batch's; None where that cannot be said without trying."""
    axis = getattr(layer, "axis", None)
    if not _of_keras(layer):
        return bool(isinstance(axis, int) and axis == 0)
    axes = [a for a in (axis if isinstance(axis, (list, tuple)) else [axis]) if isinstance(a, (int, np.integer))]
    ranks = {len(x.shape) for node in layer._inbound_nodes for x in node.input_tensors}
    if 0 in axes or any(-rank in axes for rank in ranks):
        return True
    return None if not ranks and any(a < -1 for a in axes) else False


def _of_keras(layer: keras.Layer) -> bool:
    given = (getattr(layer, name, None) for name in ("activation", "recurrent_activation"))
    return all(str(getattr(part, "__module__", "keras")).partition(".")[0] == "keras"
               for part in (type(layer).call, type(layer).build, *given))


def tried(model: keras.Model, args: tuple, kwargs: dict, wire: ModuleType, first: bool) -> str:
    """Why ``model``, called like this, cannot be cut into rows, or ``""``. More is tried the ``first`` time."""
    global probing
    from keras import tree
    from keras.src import backend

    probing = True
    kept = [(layer, dict(layer.__dict__)) for layer in model._flatten_layers()]
    restored = [*_streams(), *(way for _, before in kept for name, value in before.items() if name[0] != "_"
                               for way in _ways_back(value))]
    try:
        rng = np.random.default_rng(0)
        inputs = tree.map_structure(lambda x: _invented(x, rng, wire), (args, kwargs))
        run = _runner(model, [(v, _weights(v, rng)) for v in model.variables], wire)
        spoilt = tree.map_structure(functools.partial(_spoil, np.nan), inputs)
        some = tree.map_structure(lambda x: x[1:3] if _rowed(x) else x, inputs)
        with contextlib.redirect_stdout(io.StringIO()):  # a print in a call is not for the user
            for training in (True, False):
                reason = _compared(run, inputs, spoilt, some, training, wire) or _kept_rows(kept)
                if reason:
                    return reason
            if first:  # a comparison with some number shows by it
                large = [tree.map_structure(functools.partial(_spoil, by), inputs) for by in (1e6, -1e6)]
                base = run(*inputs, True)[0]
                if any(_others_change(base, run(*changed, True)[0]) for changed in large):
                    return "its rows depend on each other"
                if reason := _goes_back(model, inputs, some, wire):
                    return reason
            if wire.in_graph((args, kwargs)):  # there nobody knows how many rows a rank has
                given, named = tree.map_structure(_open, inputs)
                backend.compute_output_spec(model.call, *given, **_with_training(model, named, True))
        return ""
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:120]
        return f"trying it on invented rows failed ({type(error).__name__}: {reason})"
    finally:
        probing = False
        for layer, before in kept:
            for name in [name for name, value in layer.__dict__.items() if before.get(name, layer) is not value]:
                del layer.__dict__[name]
            layer.__dict__.update(before)
        for restore, state in restored:
            restore(state)


def _compared(run: Callable[..., Any], inputs: tuple, spoilt: tuple, some: tuple, training: bool,
              wire: ModuleType) -> str:
    """Run on four rows, on four of which one is spoilt, and on two; what does not agree."""
    base, updates, drawn, lines = run(*inputs, training)
    if any(np.ndim(out) == 0 or len(out) != ROWS for out in base):
        return "its result does not have one row for each of its input's"
    out, updates_spoilt, _, _ = run(*spoilt, training)
    if _others_change(base, out):
        return "its rows depend on each other"
    part, updates_part, drawn_part, lines_part = run(*some, training, _Part())
    if any(b.shape != a[1:3].shape or not np.allclose(a[1:3], b, 1e-3, 1e-4, True)
           for a, b in zip(base, part, strict=True)):
        return "its result for some rows depends on how many there are"
    for name, value in updates.items():
        for other in (updates_spoilt, updates_part):
            if name not in other or not np.allclose(value, other[name], 1e-3, 1e-4, True):
                return f"it updates the variable {name} from all rows"
    if any(a == b for a, b in zip(drawn, drawn_part, strict=True)):
        return "it draws random numbers that are not one row's"
    for (variable, count), (_, count_part) in zip(lines, lines_part, strict=True):
        if count not in (count_part, 2 * count_part) or not wire.share(variable, count == count_part):
            return f"in {variable.name} lines are looked up for rows, and others"
    return ""


def _others_change(base: list, spoilt: list) -> bool:
    """Whether a spoilt row changes others."""
    others = np.arange(ROWS) != 2
    return any(not np.array_equal(a[others], b[others], equal_nan=True) for a, b in zip(base, spoilt, strict=True))


def _goes_back(model: keras.Model, inputs: tuple, some: tuple, wire: ModuleType) -> str:
    """Whether gradients go back through it as through Keras's own layers; sizes of gradients and weights are those of a
    training."""
    rng = np.random.default_rng(1)
    values = [(v, rng.normal(0, 1 / np.sqrt(np.prod(v.shape[:-1])), v.shape).astype("float32")
               if "float" in v.dtype and len(v.shape) > 1 else _weights(v, rng)) for v in model.variables]
    short = any("16" in str(layer.compute_dtype) for layer in model._flatten_layers())
    close, scales = (0.05, (1 / 16, 16)) if short else (1e-3, (1e-4, 1e4))

    def there_and_back() -> list[list[np.ndarray]]:
        outs, back = _pulled(model, values, inputs, None, wire)
        rows = [np.reshape(np.isin(np.arange(ROWS), (1, 2)), (ROWS,) + (1,) * (len(out.shape) - 1)) for out in outs]
        into = [rng.normal(size=tuple(out.shape)) for out in outs]
        found = [back(into), *(back([g * (at == these) for g, at in zip(into, rows, strict=True)])
                               for these in (True, False))]
        _, back = _pulled(model, values, some, _Part(), wire)
        return found + [back([scale * g[1:3] for g in into]) for scale in (1, *scales)]

    try:
        whole, of_some, of_others, part, *scaled = _eagerly(there_and_back)()
    except (LookupError, NotImplementedError, TypeError, ValueError):  # it has no gradient, and cannot be trained
        return ""
    linear = all(_alike(a, b + c, close) for a, b, c in zip(whole, of_some, of_others, strict=True)) and all(
        _alike(a, b / scale, close) for scale, found in zip(scales, scaled, strict=True)
        for a, b in zip(part, found, strict=True))
    if not linear:
        return "a gradient in it is not linear (a clipping, say)"
    for a, b in zip(of_some, part, strict=True):
        if a.shape != b.shape:  # rows
            if a[0].any() or a[3].any():
                return "in the backward pass its rows depend on each other"
            a = a[1:3]
        if not _alike(a, b, 0.1):
            return "in the backward pass its rows depend on each other"
    return ""


def _alike(a: np.ndarray, b: np.ndarray, close: float) -> bool:
    """Up to a part of the largest. What has grown beyond all numbers tells nothing."""
    return not (np.isfinite(a).all() and np.isfinite(b).all()) or bool(
        np.abs(a - b).max(initial=0) <= close * max(np.abs(a).max(initial=0), 1e-30))


class _Part:
    """The two rows in the middle, as a rank's share of the four."""

    rows, first, count, real = ROWS, 1, 2, 1.0

    @staticmethod
    def cut(x: Any) -> Any:
        return x[1:3]

    @staticmethod
    def gather(x: object) -> Any:
        raise TypeError("its rows must be joined in the middle of it")


def _kept_rows(kept: list) -> str:
    """Whether the call has left tensors in attributes: they would be a rank's own rows."""
    from keras import tree
    from keras.src import backend

    for layer, before in kept:
        for name, value in layer.__dict__.items():
            if before.get(name) is not value and any(backend.is_tensor(leaf) for leaf in tree.flatten(value)):
                return f"{type(layer).__name__} {layer.name} keeps {name} of its rows"
    return ""


def _streams() -> list[tuple[Any, Any]]:
    """How to put back every stream of random numbers that a call may draw from."""
    found = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
    if "tensorflow" in sys.modules:
        from tensorflow.python.eager import context

        stream = getattr(context.context(), "_rng", None)
        if stream is not None:
            found.append((stream.setstate, stream.getstate()))
    return found


def _ways_back(value: Any) -> list[tuple[Any, Any]]:
    """How to put back what an attribute of the script's own holds and a call may change in place."""
    if isinstance(value, list):
        return [(functools.partial(list.__setitem__, value, slice(None)), list(value)),
                *(way for inner in value for way in _ways_back(inner))]
    if isinstance(value, dict):
        def put(before: dict) -> None:
            dict.clear(value)
            dict.update(value, before)

        return [(put, dict(value)), *(way for inner in value.values() for way in _ways_back(inner))]
    if isinstance(value, np.random.Generator):
        return [(functools.partial(setattr, value.bit_generator, "state"), value.bit_generator.state)]
    if isinstance(value, np.random.RandomState):
        return [(value.set_state, value.get_state())]
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        value = value.state if isinstance(value, tf.random.Generator) else value
        if isinstance(value, tf.Variable):
            with tf.init_scope():
                return [(_assigned, (value, value.read_value()))]
    return []


def _assigned(pair: tuple[Any, Any]) -> None:
    import tensorflow as tf

    with tf.init_scope():
        pair[0].assign(pair[1])


class _AddsLoss(Exception):
    """add_loss in a call."""


def _runner(model: keras.Model, values: list, wire: ModuleType) -> Any:
    """The model as a function of arrays, in which no variable of the script is read or changed."""
    from keras import tree
    from keras.src import backend

    def run(args: tuple, kwargs: dict, training: bool, share: _Part | None = None) -> tuple[list, dict, list, list]:
        kwargs = _with_training(model, kwargs, training)
        given = {id(v): backend.convert_to_tensor(a, v.dtype) for v, a in values}
        scope = backend.StatelessScope(collect_losses=True, state_mapping=[(v, given[id(v)]) for v, _ in values])
        args, kwargs = tree.map_structure(lambda x: backend.convert_to_tensor(x) if _rowed(x) else x, (args, kwargs))
        drawn.clear()
        meet.split = share
        try:
            with scope:
                out, lines = wire.looked_up(lambda: model.call(*args, **kwargs), [(v, given[id(v)]) for v, _ in values])
        finally:
            meet.split = None
        if scope.losses:
            raise _AddsLoss("add_loss in a call: its value is that of the whole batch")
        names = {id(v): v.path for v, _ in values}
        updates = {names.get(key, str(key)): np.asarray(backend.convert_to_numpy(value))
                   for key, value in scope.state_mapping.items() if value is not given.get(key)}
        outs = [np.asarray(backend.convert_to_numpy(x)) for x in tree.flatten(out) if x is not None]
        return [x if x.dtype.kind in "iu" else x.astype("float32") for x in outs], updates, [*drawn], lines

    return _eagerly(run)


def _pulled(model: keras.Model, values: list, inputs: tuple, share: _Part | None,
            wire: ModuleType) -> tuple[list, Any]:
    """What the model makes of these rows in training, if it is floats; and what gradients of that, as arrays, are of
    weights and of rows."""
    from keras import tree
    from keras.src import backend

    args, kwargs = inputs
    leaves = [backend.convert_to_tensor(x) if _rowed(x) else x
              for x in tree.flatten((args, _with_training(model, kwargs, True)))]
    rows = [i for i, x in enumerate(leaves) if wire.rows_of(x) is not None and "float" in str(x.dtype)]
    held = [backend.convert_to_tensor(a, v.dtype) for v, a in values]
    floats = [i for i, (v, _) in enumerate(values) if "float" in v.dtype]

    def forward(*given: Any) -> list:
        for i, x in zip(floats, given, strict=False):
            held[i] = x
        for i, x in zip(rows, given[len(floats):], strict=True):
            leaves[i] = x
        args, kwargs = tree.pack_sequence_as((inputs[0], _with_training(model, inputs[1], True)), leaves)
        meet.split = share
        try:
            with backend.StatelessScope(state_mapping=[(v, x) for (v, _), x in zip(values, held, strict=True)]):
                out = model.call(*args, **kwargs)
        finally:
            meet.split = None
        return [x for x in tree.flatten(out) if x is not None and "float" in str(x.dtype)]

    return wire.pulled(forward, [*(held[i] for i in floats), *(leaves[i] for i in rows)])


def _with_training(model: keras.Model, kwargs: dict, training: bool) -> dict:
    """What a ``call`` is given by name: whether it is training, if it asks for that."""
    others = {name: value for name, value in kwargs.items() if name != "training"}
    return {**others, "training": training} if model._call_has_training_arg else others


def _eagerly(run: Callable[..., Any]) -> Any:
    """``run`` outside of whatever is being traced."""
    from keras.src import backend

    def call(*args: object, **kwargs: object) -> Any:
        if backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.init_scope():
                return run(*args, **kwargs)
        import jax

        with jax.ensure_compile_time_eval():
            return run(*args, **kwargs)

    return call


def _rowed(x: object) -> bool:
    return isinstance(x, np.ndarray)


def _invented(x: Any, rng: np.random.Generator, wire: ModuleType) -> Any:
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


def _open(x: Any) -> Any:
    from keras import KerasTensor

    return KerasTensor((None, *x.shape[1:]), str(x.dtype)) if _rowed(x) else x


def _weights(v: keras.Variable, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(int(d) for d in v.shape)
    if "float" in v.dtype:
        return rng.uniform(0.05, 0.5, shape).astype("float32")
    return np.ones(shape, "int64")


def _spoil(by: float, x: Any) -> Any:
    if not _rowed(x):
        return x
    x = x.copy()
    x[2] = by if x.dtype.kind == "f" else 1 - x[2]
    return x
