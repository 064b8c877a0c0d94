"""Batch normalisation over the global batch: two small messages per layer, and two on the way back."""

from __future__ import annotations

import functools
from typing import Any

from oars.adapt.keras import probe
from oars.adapt.meet import meet


def install(keras: Any, wire: Any) -> None:
    """Patch BatchNormalization's statistics."""
    from keras import ops
    from keras.src import backend

    layer = keras.layers.BatchNormalization
    plain, plain_call = layer._moments, layer.call

    def local() -> bool:
        return bool(meet.plan.get("local_batchnorm"))

    @functools.wraps(plain)
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        if probe.probing:
            return backend.cast(self.moving_mean, inputs.dtype), backend.cast(self.moving_variance, inputs.dtype)
        if not meet.split or local():
            return plain(self, inputs, mask)
        axes, shape = self._reduction_axes, ops.shape(inputs)
        weights = ops.ones_like(inputs) * backend.cast(meet.split.real, inputs.dtype)
        if mask is not None:
            weights = weights * ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
        kept = [1 if a in axes else shape[a] for a in range(len(shape))]
        sums = ops.stack([ops.sum(inputs * weights, axes), ops.sum(weights, axes)])
        sums = wire.total(sums)
        count = ops.maximum(sums[1], 1.0) if mask is None else sums[1] + backend.epsilon()
        mean = sums[0] / count
        apart = ops.square(inputs - ops.reshape(mean, kept)) * weights
        return mean, wire.total(ops.sum(apart, axes)) / count

    @functools.wraps(plain_call)
    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        out = plain_call(self, inputs, training=training, mask=mask)
        if meet.split and local() and training and self.trainable and not probe.probing:
            for moving in (self.moving_mean, self.moving_variance):
                moving.assign(wire.total(backend.convert_to_tensor(moving)) / meet.size)
        return out

    layer._moments, layer.call = moments, call
