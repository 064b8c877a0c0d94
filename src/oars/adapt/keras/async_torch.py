"""Ranks on their own on Keras's torch backend: PyTorch's adapter does it (``adapt/torch/async_modes/phases.py``).

What is here: a Keras optimizer becomes one that it knows, in ``fit`` and ``train_on_batch``; and ranks meet where Keras
looks at weights and metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from oars.adapt.meet import end
from oars.adapt.torch.async_modes.phases import EVALUATION, WEIGHTS
from oars.adapt.torch.batches.reading import Key, share_key
from oars.adapt.torch.context import ctx
from oars.adapt.torch.recovery import lineage
from oars.engine.retry import until_none_is_lost

if TYPE_CHECKING:
    import keras
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

# Keras's names of state that is a sum of gradients, of either sign, and PyTorch's (``torch/async_modes/gossip.py``).
_MOMENTA = {"momentums": "momentum_buffer", "average_gradients": "grad_avg"}


class OfKeras(Optimizer):
    """Stands for a Keras optimizer: has its weights, and its state by weight."""

    def __init__(self, variables: list) -> None:
        super().__init__([v.value for v in variables], {})
        self.weights = [v.value for v in variables]

    def see(self, optimizer: keras.Optimizer) -> None:
        """The state that it has now."""
        for name, slots in vars(optimizer).items():
            known = _MOMENTA.get(name.strip("_"), name)
            if (isinstance(slots, list) and len(slots) == len(self.weights) and name != "_trainable_variables"
                    and all(hasattr(v, "value") for v in slots)):
                for weight, slot in zip(self.weights, slots, strict=True):
                    self.state[weight][known] = slot.value


class Separate:
    """Steps of Keras models, for ranks that are on their own."""

    def __init__(self) -> None:
        self._stands: WeakKeyDictionary[Any, OfKeras] = WeakKeyDictionary()

    def step(self, model: keras.Model, function: Callable, args: tuple) -> Any:
        """One call of a model's train function."""
        optimizer = model.optimizer
        if optimizer.use_ema:
            end("with --sync each rank has its own running average of weights (use_ema): leave out one of the two")
        if optimizer not in self._stands:
            self._stands[optimizer] = OfKeras(model.trainable_variables)
        stands = self._stands[optimizer]
        ctx.optimizer_of.update({p: ctx.number(stands) for p in stands.weights})
        try:
            out = function(*args)
        finally:
            for p in stands.weights:  # a loop of the script's own steps without it
                ctx.optimizer_of.pop(p, None)
        stands.see(optimizer)
        ctx.phases.stepped(stands)
        return out

    def unite(self) -> None:
        """All ranks come here: weights are the same on all of them."""
        if ctx.separate:
            ctx.phases.meet(WEIGHTS)


def _average(metrics: list) -> None:
    """Metrics are of all ranks' rows from here on."""
    floats = [v for v in metrics if v.value.is_floating_point()]
    if not floats:
        return
    mine = np.concatenate([v.value.detach().cpu().double().numpy().reshape(-1) for v in floats])
    mean = until_none_is_lost(lambda: ctx.world.allgather_alike(mine), lineage.renew).mean(0)
    for v, part in zip(floats, np.split(mean, np.cumsum([v.value.numel() for v in floats])[:-1]), strict=True):
        v.assign(torch.from_numpy(part).reshape(v.value.shape).to(v.value.dtype))


def logs(inner: Callable[..., Any]) -> Any:
    """Around what gives the logs of an epoch: all ranks'."""
    import keras

    @functools.wraps(inner)
    def logs_of(self: keras.Model, logs: dict[str, Any]) -> Any:
        if not ctx.separate:
            return inner(self, logs)
        ctx.phases.meet(EVALUATION)
        _average(self.metrics_variables)
        own = keras.tree.map_structure(keras.ops.convert_to_numpy, inner(self, logs))
        return ctx.world.broadcast(lambda: own)  # behind a train_step of one's own they are the rank's

    return logs_of


def one_loader(inner: Callable[..., Any]) -> Any:
    """Keras makes a loader for every epoch: to what is owed after a death they are one."""
    keys: WeakKeyDictionary[Any, Key] = WeakKeyDictionary()

    @functools.wraps(inner)
    def get_torch_dataloader(self: ArrayDataAdapter) -> Any:
        loader = inner(self)
        share_key(loader, keys.setdefault(self, Key(loader)))
        return loader

    return get_torch_dataloader
