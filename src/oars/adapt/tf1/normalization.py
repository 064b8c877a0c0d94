"""``tf.layers.batch_normalization`` of TensorFlow 1: its variables, its collection of updates, its numbers.

Statistics are written out as sums over rows, so that a run that is cut takes those of the global batch. Whether a run
trains may be fed: then both kinds of statistics are there and one is chosen, without a condition in the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.layers.base import Layer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorflow.python.ops.variable_scope import _ReuseMode

    Axis = int | list[int] | tuple[int, ...]
    Function = Callable[..., Any] | None

old = tf.compat.v1


class BatchNormalization(Layer):
    """Normalise along ``axis`` by the batch's statistics in training, by their moving averages otherwise."""

    def __init__(self, axis: Axis = -1, momentum: float = 0.99, epsilon: float = 1e-3, center: bool = True,
                 scale: bool = True, beta_initializer: Function | str = "zeros",
                 gamma_initializer: Function | str = "ones", moving_mean_initializer: Function | str = "zeros",
                 moving_variance_initializer: Function | str = "ones", beta_regularizer: Function = None,
                 gamma_regularizer: Function = None, beta_constraint: Function = None,
                 gamma_constraint: Function = None, renorm: bool = False,
                 renorm_clipping: dict[str, Any] | None = None, renorm_momentum: float = 0.99,
                 fused: bool | None = None, trainable: bool = True, virtual_batch_size: int | None = None,
                 adjustment: Function = None, name: str | None = None, **kwargs: object) -> None:
        if renorm or virtual_batch_size or adjustment:
            raise SystemExit("oars: tf.layers.batch_normalization with renorm, virtual_batch_size or adjustment is not "
                             "in today's TensorFlow: leave them out, or write that part with tf.nn.moments")
        super().__init__(name=name, trainable=trainable, **kwargs)
        self.axis, self.momentum, self.epsilon, self.fused = axis, momentum, epsilon, fused
        self._variables = {
            "gamma": (scale, trainable, gamma_initializer, gamma_regularizer, gamma_constraint),
            "beta": (center, trainable, beta_initializer, beta_regularizer, beta_constraint),
            "moving_mean": (True, False, moving_mean_initializer, None, None),
            "moving_variance": (True, False, moving_variance_initializer, None, None),
        }

    def build(self, input_shape: tf.TensorShape | Sequence[int | None]) -> None:
        """Make its variables."""
        dims = tf.TensorShape(input_shape).as_list()
        (axis,) = self.axis if isinstance(self.axis, (list, tuple)) else (self.axis,)
        self.axis = axis % len(dims)
        if self.fused is None:  # it was, for images
            self.fused = len(dims) == 4 and self.axis in (1, 3)
        for name, (there, trainable, initializer, regularizer, constraint) in self._variables.items():
            setattr(self, name, self.add_weight(name, [dims[self.axis]], initializer=initializer, trainable=trainable,
                                                regularizer=regularizer, constraint=constraint) if there else None)
        self.built = True

    def call(self, inputs: tf.Tensor, training: bool | tf.Tensor = False) -> Any:
        """Normalise ``inputs``; ``training`` is a truth value or a tensor of one."""
        mean, variance = self.moving_mean, self.moving_variance
        known = tf.get_static_value(training) if tf.is_tensor(training) else training
        if known is None:
            mean, variance = (old.where(training, new, kept) for new, kept in
                              zip(self._of_batch(inputs, old.where(training, 1.0, 0.0)), (mean, variance), strict=True))
        elif known:
            mean, variance = self._of_batch(inputs, 1.0)
        numbers: list[Any] = [mean, variance, self.beta, self.gamma]
        if self.axis != inputs.shape.rank - 1:
            along = [-1 if axis == self.axis else 1 for axis in range(inputs.shape.rank)]
            numbers = [None if n is None else tf.reshape(n, along) for n in numbers]
        return tf.nn.batch_normalization(inputs, *numbers, self.epsilon)

    def _of_batch(self, inputs: tf.Tensor, weight: float | tf.Tensor) -> tuple[Any, Any]:
        """The batch's mean and variance; that averages move, if this has a ``weight``, becomes an update."""
        axes = [axis for axis in range(inputs.shape.rank) if axis != self.axis]
        mean, variance = tf.nn.moments(inputs, axes)
        unbiased = variance
        if self.fused:  # TensorFlow's kernel tells the variance of what the batch is a sample of
            count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), variance.dtype)
            unbiased *= count / tf.maximum(count - 1, 1)
        step = weight * (1 - self.momentum)
        self.add_update([old.assign_sub(moving, (moving - new) * step) for moving, new in
                         ((self.moving_mean, mean), (self.moving_variance, unbiased))])
        return mean, variance


def batch_normalization(inputs: tf.Tensor, axis: Axis = -1, momentum: float = 0.99, epsilon: float = 1e-3, *,
                        training: bool | tf.Tensor = False, name: str | None = None,
                        reuse: bool | _ReuseMode | None = None, **kwargs: Any) -> Any:
    """``tf.layers.batch_normalization``: the same as a function."""
    layer = BatchNormalization(axis, momentum, epsilon, name=name, _scope=name, _reuse=reuse, **kwargs)
    return layer(inputs, training=training)
