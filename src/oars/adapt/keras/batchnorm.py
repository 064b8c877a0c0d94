"""Batch normalisation over the global batch: one small message per layer, and one on the way back.

A rank tells how many values it has of each channel, their mean, and the sum of their squared distances from it; of
these lines the same three for all ranks follow exactly, without the cancellation of a mean of squares.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from oars.adapt.keras import trace
from oars.adapt.meet import meet

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import keras
    import torch


def moments(wire: ModuleType) -> Any:
    """Around ``BatchNormalization._moments``; ranks talk by ``wire``."""
    from keras import ops
    from keras.src import backend

    def layer(inner: Callable[..., Any]) -> Any:
        @functools.wraps(inner)
        def moments(self: keras.layers.BatchNormalization, inputs: Any, mask: Any) -> Any:
            if trace.probing:
                return backend.cast(self.moving_mean, inputs.dtype), backend.cast(self.moving_variance, inputs.dtype)
            if not meet.split or meet.plan.local_batchnorm:
                return inner(self, inputs, mask)
            axes = self._reduction_axes
            kept = [1 if a in axes else -1 for a in range(len(inputs.shape))]
            there = backend.cast(meet.split.real, inputs.dtype)  # 0 where these rows are a stand-in
            if mask is None:
                values = inputs
                count = ops.cast(ops.size(inputs), inputs.dtype) / inputs.shape[kept.index(-1)] * there
                count = count * ops.ones(inputs.shape[kept.index(-1)], inputs.dtype)
            else:
                valid = ops.broadcast_to(ops.cast(ops.expand_dims(mask, -1), "bool"), ops.shape(inputs))
                values = ops.where(valid, inputs, 0)
                count = ops.sum(ops.cast(valid, inputs.dtype), axes) * there
            mean = ops.sum(values, axes) * there / ops.maximum(count, 1.0)
            deviation = inputs - ops.reshape(mean, kept)
            deviation = ops.square(deviation if mask is None else ops.where(valid, deviation, 0))
            gathered = wire.every(ops.stack([count, mean, ops.sum(deviation, axes) * there]))
            counts, means, sums = ops.unstack(gathered, axis=1)
            every = ops.sum(counts, 0)
            every = ops.maximum(every, 1.0) if mask is None else every + backend.epsilon()
            mean = ops.sum(counts * means, 0) / every
            return mean, ops.sum(sums + counts * ops.square(means - mean), 0) / every

        return moments

    return layer


def averages(wire: ModuleType) -> Any:
    """Around ``BatchNormalization.call``: under ``--local-batchnorm`` the moving averages are those of all ranks."""
    from keras import ops
    from keras.src import backend

    def layer(inner: Callable[..., Any]) -> Any:
        @functools.wraps(inner)
        def call(self: keras.layers.BatchNormalization, inputs: Any, training: bool | None = None,
                 mask: Any = None) -> Any:
            out = inner(self, inputs, training=training, mask=mask)
            own = meet.split and meet.plan.local_batchnorm and not trace.probing and not meet.separate
            if own and training and self.trainable:
                for moving in (self.moving_mean, self.moving_variance):
                    moving.assign(ops.mean(wire.every(backend.convert_to_tensor(moving)), 0))
            return out

        return call

    return layer


def averages_on_torch(inner: Callable[..., Any]) -> Any:
    """The same on PyTorch, where statistics of rows are the global batch's by themselves."""
    from oars.adapt.torch.context import ctx
    from oars.adapt.torch.rows import collectives as wire
    from oars.adapt.torch.rows import tensor

    def of_own_rows(self: keras.layers.BatchNormalization, inputs: torch.Tensor, mask: torch.Tensor | None) -> Any:
        out = inner(self, inputs, training=True, mask=mask)
        for moving in (self.moving_mean, self.moving_variance):
            moving.assign(wire.mean(moving.value.detach()))
        return out

    def on_rows(self: keras.layers.BatchNormalization, args: tuple, kwargs: dict) -> Any:
        moving = self.moving_mean, self.moving_variance
        before, done = [m.value.detach().clone() for m in moving], False
        try:
            inputs, mask = args[0], kwargs["mask"]
            local = of_own_rows(self, inputs.local, mask.local if isinstance(mask, tensor.Rows) else mask)
            done = not ctx.again
            return tensor.Rows(local, inputs.offsets, 0)
        finally:
            if not done:  # it is done again, or was: the averages move once
                for variable, value in zip(moving, before, strict=True):
                    variable.assign(value)

    @functools.wraps(inner)
    def call(self: keras.layers.BatchNormalization, inputs: torch.Tensor, training: bool | None = None,
             mask: torch.Tensor | None = None) -> Any:
        if training and self.trainable and isinstance(inputs, tensor.Rows) and inputs.dim_ == 0:
            return ctx.perform(on_rows, self, (inputs,), {"mask": mask})
        if training and self.trainable and ctx.plain:
            return of_own_rows(self, inputs, mask)
        return inner(self, inputs, training=training, mask=mask)

    return call
