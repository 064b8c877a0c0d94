"""Calls: the outermost call of a model runs on this rank's rows, and gives the global result.

The script's tensors are global on every rank: batches, predictions, losses, metrics. Only inside ``model(x)`` (or
``model.stateless_call``) does a rank hold its own rows: the inputs are cut, the model runs, and its outputs are joined
with a gradient through it. So whatever surrounds the call, a loss of any kind, ``compute_loss``, metrics, a
``train_step`` or a loop written by hand, is exact without a rule for it. A model whose rows meet (``probe``) runs whole
on every rank: the same result, no faster.
"""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import Any

from oars.adapt.keras import probe
from oars.adapt.meet import meet
from oars.engine.world import RankLost

wire: Any = None
_whole: dict[int, tuple[Any, str]] = {}  # model (its id) -> the model, why it runs whole ("" if it is cut)


@contextmanager
def inside(share: Any = None) -> Any:
    """Nothing in here is cut; with ``share``, it runs on these rows."""
    before = meet.split
    meet.inside += 1
    meet.split = share if share is not None else before
    try:
        yield
    finally:
        meet.inside -= 1
        meet.split = before


def whole(model: Any, args: Any, kwargs: Any) -> str:
    """Why this model is not cut, or ``""``. Looked at once for each model."""
    known = _whole.get(id(model))
    if known is None or known[0] is not model:
        with inside():
            reason = probe.reason(model, args, kwargs, wire)
        if reason:
            meet.record.notice(f"the model {model.name} runs whole on every rank, no faster: {reason}")
        _whole[id(model)] = known = (model, reason)
    return known[1]


def _leaves(tree: Any, args: Any) -> list[Any]:
    return [leaf for leaf in tree.flatten(args) if leaf is not None]


def split(model: Any, plain: Any, args: tuple, kwargs: dict) -> Any:
    """``plain(*args, **kwargs)``, on own rows where that gives the same."""
    from keras import KerasTensor, tree
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope

    if (meet.inside or not model.built or in_symbolic_scope()
            or threading.current_thread() is not threading.main_thread()):
        with inside():
            return plain(*args, **kwargs)
    args, kwargs = tree.map_structure(wire.constant, (args, kwargs))
    leaves = _leaves(tree, (args, kwargs))
    counts = {wire.rows_of(leaf) for leaf in leaves} - {None}
    if not counts or any(isinstance(leaf, KerasTensor) for leaf in leaves) or 0 <= min(counts) < meet.size:
        with inside():
            return plain(*args, **kwargs)
    if len(counts) > 1:
        meet.record.notice(f"the model {model.name} runs whole on every rank, no faster: its inputs have different "
                           f"numbers of rows ({sorted(counts)})")
        with inside():
            return plain(*args, **kwargs)
    if whole(model, args, kwargs):
        with inside():
            return plain(*args, **kwargs)
    first = next(leaf for leaf in leaves if wire.rows_of(leaf) is not None)
    while True:
        try:
            return _on_own_rows(tree, wire.Share(first), plain, args, kwargs)
        except RankLost:  # not in compiled code: all of the call is done again
            wire.renew()


def _on_own_rows(tree: Any, share: Any, plain: Any, args: tuple, kwargs: dict) -> Any:
    from keras.src import backend

    def cut(x: Any) -> Any:
        if wire.rows_of(x) is None:
            return x
        mine = share.cut(x)
        mask = backend.get_keras_mask(x)
        if mask is not None:
            backend.set_keras_mask(mine, share.cut(mask))
        return mine

    def join(x: Any) -> Any:
        if wire.rows_of(x) is None:
            return x
        every = share.gather(x)
        mask = backend.get_keras_mask(x)
        if mask is not None:
            backend.set_keras_mask(every, share.gather(mask))
        return every

    args, kwargs = tree.map_structure(cut, (args, kwargs))
    with inside(share):
        out = plain(*args, **kwargs)
    meet.calls += 1
    return tree.map_structure(join, out)


def install(keras: Any, wire_: Any) -> None:
    """Patch ``keras.Model``'s calls."""
    global wire
    wire = wire_
    layer_call, stateless = keras.Model.__call__, keras.Model.stateless_call

    @functools.wraps(layer_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return split(self, functools.partial(layer_call, self), args, kwargs)

    @functools.wraps(stateless)
    def stateless_call(self: Any, trainable_variables: Any, non_trainable_variables: Any, *args: Any,
                       return_losses: bool = False, **kwargs: Any) -> Any:
        others: list[Any] = []

        def plain(*args: Any, **kwargs: Any) -> Any:
            out, *others[:] = stateless(self, trainable_variables, non_trainable_variables, *args,
                                        return_losses=return_losses, **kwargs)
            return out

        out = split(self, plain, args, kwargs)
        return (out, *others)

    keras.Model.__call__, keras.Model.stateless_call = call, stateless_call
    for name in ("export", "save"):
        setattr(keras.Model, name, _uncut(getattr(keras.Model, name)))


def _uncut(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with inside():
            return method(*args, **kwargs)

    return call
