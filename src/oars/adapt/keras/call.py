"""Calls: the outermost call of a model runs on this rank's rows, and gives the global result.

The script's tensors are global on every rank: batches, predictions, losses, metrics. Only inside ``model(x)`` (or
``model.stateless_call``) does a rank hold its own rows: the inputs are cut, the model runs, and its outputs are joined
with a gradient through it. So whatever surrounds the call, a loss of any kind, ``compute_loss``, metrics, a
``train_step`` or a loop written by hand, is exact without a rule for it. A model whose rows meet (``probe``) runs whole
on every rank: the same result, no faster. One that had to be tried is tried again in its calls 2, 4, 8, …, and when it
is called in another way.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oars import debug
from oars.adapt.keras import trace
from oars.adapt.meet import inside, meet
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from types import ModuleType

    import keras
    import tensorflow as tf

wire: Any = None
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # is used again, on some ranks before others
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> what is known of it


class _Known:
    """Why a model runs whole ("" if it is cut); if it must be tried: in which ways it was, and how often it ran."""

    def __init__(self, model: keras.Model) -> None:
        self.layers, self.reason = len(model._layers), trace.known_to_meet(model)
        self.unknown = trace.must_be_tried(model)
        self.calls, self.ways = 0, set[Any]()


def whole(model: keras.Model, args: tuple, kwargs: dict) -> str:
    """Why this model is not cut, or ``""``."""
    known = _known.get(model)
    if known is None or known.layers != len(model._layers):
        known = _known[model] = _Known(model)
    known.calls += 1
    if known.unknown and not known.reason:
        way = _way(args, kwargs)
        new = way not in known.ways
        if new or not known.calls & (known.calls - 1):
            known.ways.add(way)
            if debug.on:
                why = "it is called in a new way" if new else f"this is call {known.calls}"
                debug.say(f"the model {model.name} is tried on invented rows: {why}")
            with inside():
                known.reason = trace.tried(model, args, kwargs, wire, first=new)
    if known.reason:
        say_whole(model, known.reason)
    return known.reason


def say_whole(model: keras.Model, reason: str) -> None:
    """One line."""
    meet.record.notice(f"the model {model.name} runs replicated on every rank (correct, not faster): {reason}",
                       "change the layer or the loss that the reason is about, so that each row is computed by itself",
                       "model")


def _way(args: object, kwargs: object) -> Any:
    """In which way a model is called: kinds of tensors, and everything that is none."""
    from keras import tree

    return tuple((type(leaf).__name__, leaf.dtype, len(leaf.shape)) if hasattr(leaf, "shape")
                 else _ADDRESS.sub("", repr(leaf)[:200]) for leaf in tree.flatten((args, kwargs)))


def split(model: keras.Model, plain: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """``plain(*args, **kwargs)``, on own rows where that gives the same."""
    from keras import KerasTensor, tree
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope

    if meet.inside or in_symbolic_scope() or threading.current_thread() is not threading.main_thread():
        with inside():
            return plain(*args, **kwargs)
    args, kwargs = tree.map_structure(wire.constant, (args, kwargs))
    leaves = [leaf for leaf in tree.flatten((args, kwargs)) if leaf is not None]
    counts = {wire.rows_of(leaf) for leaf in leaves} - {None}
    if any(isinstance(leaf, KerasTensor) for leaf in leaves) or 0 <= min(counts, default=-1) < meet.size:
        return _whole(model, plain, args, kwargs)
    strange = next((leaf for leaf in leaves if wire.rows_of(leaf) is None and len(getattr(leaf, "shape", ()))), None)
    reason = ""
    if strange is not None:
        reason = f"an input is a {type(strange).__name__} of {strange.dtype}"
    elif len(counts) > 1:
        reason = f"its inputs have different numbers of rows ({sorted(counts)})"
    else:
        reason = wire.hidden_from_tape(model)
    if reason:
        say_whole(model, reason)
    if reason or not counts or not _built(model, plain, args, kwargs) or whole(model, args, kwargs):
        return _whole(model, plain, args, kwargs)
    first = next(leaf for leaf in leaves if wire.rows_of(leaf) is not None)
    own = _on_tape if wire.on_tape() and not meet.separate else _on_own_rows
    while True:
        kept = wire.kept(model)
        try:
            return own(tree, model, first, plain, args, kwargs)
        except _Strange as strange:
            _known[model].reason = f"its result has a {strange}"
            say_whole(model, _known[model].reason)
            return _whole(model, plain, args, kwargs)
        except RankLost:  # not in compiled code: all of the call is done again
            wire.renew()
            for variable, value in kept:
                variable.assign(value)


class _Strange(Exception):
    """A model gave what cannot be joined: strings, or a tensor that is not a plain one."""


def _joinable(tree: ModuleType, out: Any) -> Any:
    """``out``, if its rows can be joined."""
    for leaf in tree.flatten(out):
        if wire.rows_of(leaf) is None and len(getattr(leaf, "shape", ())):
            raise _Strange(f"{type(leaf).__name__} of {leaf.dtype}")
    return out


def _whole(model: keras.Model, plain: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    with inside():
        out = plain(*args, **kwargs)
    wire.ran(model, cut=False)
    return out


class _Built(Exception):
    """A model has been built, and its call is not wanted yet."""


def _built(model: keras.Model, plain: Callable[..., Any], args: tuple, kwargs: dict) -> bool:
    """Whether the model has its weights. One that gets them by its first call gets them here, by Keras's own way."""
    if model.built:
        return True
    # A checkpoint that was restored before there were weights waits for them, but what is assigned here is lost.
    if any(getattr(layer, "_self_unconditional_deferred_dependencies", None) for layer in model._flatten_layers()):
        return False

    def build_only(spec: Any) -> None:
        type(model)._maybe_build(model, spec)
        raise _Built

    model.__dict__["_maybe_build"] = build_only
    try:
        with inside():
            plain(*args, **kwargs)
    except _Built:
        return bool(model.built)
    except Exception:  # then by its first call, as on one process
        return False
    finally:
        del model.__dict__["_maybe_build"]
    return False


def _with_mask(change: Callable[[Any], Any], x: Any) -> Any:
    """``change(x)``, and the same of its mask."""
    from keras.src import backend

    if wire.rows_of(x) is None:
        return x
    changed, mask = change(x), backend.get_keras_mask(x)
    if mask is not None:
        backend.set_keras_mask(changed, change(mask))
    return changed


def _on_own_rows(tree: ModuleType, model: keras.Model, first: Any, plain: Callable[..., Any], args: tuple,
                 kwargs: dict) -> Any:
    share = wire.Share(first)
    args, kwargs = tree.map_structure(functools.partial(_with_mask, share.enter), (args, kwargs))
    with inside(share):
        out = _joinable(tree, plain(*args, **kwargs))
    meet.called(model)
    wire.ran(model, cut=True)
    meet.partial = meet.partial or wire.recorded()
    return tree.map_structure(functools.partial(_with_mask, functools.partial(wire.joined, share)), out)


def _on_tape(tree: ModuleType, model: keras.Model, first: Any, plain: Callable[..., Any], args: tuple,
             kwargs: dict) -> Any:
    """The same in an eager loop of TensorFlow, as one operation for its tape (``adapt/tensorflow/eager.py``)."""
    from keras.src import backend

    from oars.adapt.tensorflow import eager

    leaves = tree.flatten((args, kwargs))
    floats = [i for i, leaf in enumerate(leaves) if wire.rows_of(leaf) is not None and leaf.dtype.is_floating]
    outs: list[Any] = []  # the last forward's, in its structure

    def forward(share: Any, tape: tf.GradientTape) -> tuple[list, list]:
        own = [_with_mask(share.cut, leaf) for leaf in leaves]
        for i in floats:
            tape.watch(own[i])
        args, kwargs = tree.pack_sequence_as(like, own)
        with inside(share):
            outs[:] = [_joinable(tree, plain(*args, **kwargs))]
        given = [x for x in tree.flatten(outs[0]) if x is not None]
        return [own[i] for i in floats], [*given, *(x._keras_logits for x in given if hasattr(x, "_keras_logits"))]

    like = (args, kwargs)
    every = eager.call(model, first, [leaves[i] for i in floats], forward)
    flat, logits = iter(every), iter(every[sum(x is not None for x in tree.flatten(outs[0])):])
    meet.called(model)
    wire.ran(model, cut=False)  # its gradients come out complete

    def joined(x: object) -> Any:
        if x is None:
            return None
        whole, mask = next(flat), backend.get_keras_mask(x)
        if mask is not None:
            backend.set_keras_mask(whole, wire.Share(first).gather(mask))
        if hasattr(x, "_keras_logits"):
            whole._keras_logits = next(logits)
        return whole

    return tree.map_structure(joined, outs[0])


def called(inner: Callable[..., Any]) -> Any:
    """Around ``Model.__call__``."""
    @functools.wraps(inner)
    def call(self: keras.Model, *args: object, **kwargs: object) -> Any:
        return split(self, functools.partial(inner, self), args, kwargs)

    return call


def stateless_called(inner: Callable[..., Any]) -> Any:
    """Around ``Model.stateless_call``."""
    @functools.wraps(inner)
    def stateless_call(self: keras.Model, trainable_variables: Sequence[Any], non_trainable_variables: Sequence[Any],
                       *args: object, return_losses: bool = False, **kwargs: object) -> Any:
        others: list[Any] = []

        def plain(*args: object, **kwargs: object) -> Any:
            out, *others[:] = inner(self, trainable_variables, non_trainable_variables, *args,
                                    return_losses=return_losses, **kwargs)
            return out

        if meet.backend == "jax" and any(map(wire.mapped, [*trainable_variables, *non_trainable_variables])):
            with inside():
                return (plain(*args, **kwargs), *others)
        out = split(self, plain, args, kwargs)
        return (out, *others)

    return stateless_call


def begin(collectives: ModuleType) -> None:
    """Ranks talk by these, TensorFlow's or JAX's."""
    global wire
    wire = collectives


def uncut(method: Callable[..., Any]) -> Any:
    """Around what goes through a model without running it on a batch."""
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        with inside():
            return method(*args, **kwargs)

    return call
