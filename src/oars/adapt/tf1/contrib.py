"""What scripts of 2016 to 2018 use most of ``tf.contrib``, by what of it today's TensorFlow still carries.

``tf.contrib.layers`` (and ``slim``, the same under another name) are ``tf.layers`` with other defaults and other names
of variables: ``weights`` and ``biases``, so old checkpoints load. Beside them are its initializers and regularizers,
``arg_scope``, cells of recurrent networks, the losses of sequences, and the reader of texts (``vocabulary``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.layers import layers
from tensorflow.python.ops import rnn_cell_impl
from tensorflow.python.util import deprecation

from oars.adapt.tf1 import normalization

if TYPE_CHECKING:
    from typing import TypeAlias

    from tensorflow.python.layers.base import Layer
    from tensorflow.python.ops.variable_scope import _ReuseMode

    Scope: TypeAlias = str | tf.compat.v1.VariableScope | None
    Reuse: TypeAlias = bool | _ReuseMode | None
    Collections = str | list[str] | None
    Sizes = int | Sequence[int]
    Function = Callable[..., Any] | None

old = tf.compat.v1
_CUT_OFF = 0.87962566103423978  # the standard deviation of a normal distribution that is cut off at 2
_NAMES = {"kernel": "weights", "bias": "biases"}
_scopes: list[dict[Any, dict[str, Any]]] = [{}]  # function -> arguments that it is given; the last one is valid

# -- arguments for all calls in a block


def add_arg_scope(func: Callable[..., Any]) -> Any:
    """A function that takes arguments from the ``arg_scope`` around its call."""
    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **{**_scopes[-1].get(call, {}), **kwargs})

    return call


@contextmanager
def arg_scope(given: dict[Any, dict[str, Any]] | Sequence[Callable[..., Any]], **kwargs: Any) -> Iterator[dict]:
    """In it these functions have other defaults; or those that such a block had, which is ``given``."""
    now = _scopes[-1]
    scope = given if isinstance(given, dict) else {**now, **{f: {**now.get(f, {}), **kwargs} for f in given}}
    _scopes.append(scope)
    try:
        yield scope
    finally:
        _scopes.pop()


# -- initializers, regularizers


def variance_scaling_initializer(factor: float = 2.0, mode: str = "FAN_IN", uniform: bool = False,
                                 seed: int | None = None, dtype: tf.DType = tf.float32) -> Any:
    """It took the cut-off of a normal distribution for a factor of 1.3 in its variance."""
    kind, scale = ("uniform", factor) if uniform else ("truncated_normal", 1.3 * factor * _CUT_OFF**2)
    with deprecation.silence():  # a type is no argument of the future
        return old.variance_scaling_initializer(scale, mode.lower(), kind, seed, dtype)


def xavier_initializer(uniform: bool = True, seed: int | None = None, dtype: tf.DType = tf.float32) -> Any:
    """As Glorot and Bengio have it."""
    return variance_scaling_initializer(1.0, "FAN_AVG", uniform, seed, dtype)


def l1_regularizer(scale: float, scope: str | None = None) -> Any:
    """The sum of what weights are without their signs."""
    return lambda weights: old.multiply(scale, old.reduce_sum(old.abs(weights)), name=scope)


def l2_regularizer(scale: float, scope: str | None = None) -> Any:
    """Half the sum of squares."""
    return lambda weights: old.multiply(scale, old.nn.l2_loss(weights), name=scope)


# -- layers


def _renamed(getter: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    head, _, last = name.rpartition("/")
    return getter(f"{head}/{_NAMES.get(last, last)}", *args, **kwargs)


def _weighted(kind: type[Layer], scope_name: str, inputs: tf.Tensor, given: tuple,
              activation_fn: Function = tf.nn.relu, normalizer_fn: Function = None,
              normalizer_params: dict[str, Any] | None = None, weights_initializer: Function = None,
              weights_regularizer: Function = None, biases_initializer: Function | str = "zeros",
              biases_regularizer: Function = None, reuse: Reuse = None, variables_collections: Collections = None,
              outputs_collections: Collections = None, trainable: bool = True, scope: Scope = None,
              **more: Any) -> Any:
    """A layer of ``tf.layers``; where outputs are normalized there are no biases."""
    inputs = tf.convert_to_tensor(inputs)
    with old.variable_scope(scope, scope_name, [inputs], reuse=reuse, custom_getter=_renamed) as own:
        layer = kind(*given, use_bias=normalizer_fn is None and biases_initializer is not None,
                     kernel_initializer=weights_initializer or xavier_initializer(),
                     bias_initializer=biases_initializer if biases_initializer != "zeros" else old.zeros_initializer(),
                     kernel_regularizer=weights_regularizer, bias_regularizer=biases_regularizer,
                     trainable=trainable, name=own.name, _scope=own, _reuse=reuse, **more)
        out = layer.apply(inputs)
        _collect(variables_collections, layer.variables)
        if normalizer_fn is not None:
            out = normalizer_fn(out, **(normalizer_params or {}))
        return _finished(out, activation_fn, outputs_collections)


def _finished(out: tf.Tensor, activation_fn: Function, outputs_collections: Collections) -> Any:
    out = out if activation_fn is None else activation_fn(out)
    _collect(outputs_collections, [out])
    return out


def _collect(collections: Collections, values: list[Any]) -> None:
    for value in values:
        old.add_to_collections(collections or [], value)


@add_arg_scope
def fully_connected(inputs: tf.Tensor, num_outputs: int, *args: Any, **kwargs: Any) -> Any:
    """``tf.layers.dense``, by default with relu."""
    return _weighted(layers.Dense, "fully_connected", inputs, (num_outputs,), *args, **kwargs)


@add_arg_scope
def conv2d(inputs: tf.Tensor, num_outputs: int, kernel_size: Sizes, stride: Sizes = 1, padding: str = "SAME",
           data_format: str | None = None, rate: Sizes = 1, *args: Any, **kwargs: Any) -> Any:
    """``tf.layers.conv2d``, by default with relu."""
    return _weighted(layers.Conv2D, "Conv", inputs, (num_outputs, kernel_size, stride), *args, padding=padding,
                     data_format=_order(data_format), dilation_rate=rate, **kwargs)


@add_arg_scope
def conv2d_transpose(inputs: tf.Tensor, num_outputs: int, kernel_size: Sizes, stride: Sizes = 1, padding: str = "SAME",
                     data_format: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """``tf.layers.conv2d_transpose``, by default with relu."""
    return _weighted(layers.Conv2DTranspose, "Conv2d_transpose", inputs, (num_outputs, kernel_size, stride), *args,
                     padding=padding, data_format=_order(data_format), **kwargs)


def _order(data_format: str | None) -> str:
    return "channels_first" if data_format and data_format.startswith("NC") else "channels_last"


def _pooling(plain: Callable[..., Any], scope_name: str) -> Any:
    def pool(inputs: tf.Tensor, kernel_size: Sizes, stride: Sizes = 2, padding: str = "VALID",
             data_format: str | None = None, outputs_collections: Collections = None, scope: str | None = None) -> Any:
        with old.name_scope(scope, scope_name, [inputs]):
            out = plain(inputs, kernel_size, stride, padding, _order(data_format))
            return _finished(out, None, outputs_collections)

    return add_arg_scope(pool)


@add_arg_scope
def dropout(inputs: tf.Tensor, keep_prob: float | tf.Tensor = 0.5,
            noise_shape: Sequence[int | None] | tf.Tensor | None = None, is_training: bool | tf.Tensor = True,
            outputs_collections: Collections = None, scope: str | None = None, seed: int | None = None) -> Any:
    """``tf.layers.dropout``, given what to keep."""
    with old.name_scope(scope, "Dropout", [inputs]):
        out = layers.dropout(inputs, 1 - keep_prob, noise_shape, seed, is_training)
        return _finished(out, None, outputs_collections)


@add_arg_scope
def batch_norm(inputs: tf.Tensor, decay: float = 0.999, center: bool = True, scale: bool = False,
               epsilon: float = 0.001, activation_fn: Function = None,
               param_initializers: dict[str, Any] | None = None, param_regularizers: dict[str, Any] | None = None,
               updates_collections: Collections = old.GraphKeys.UPDATE_OPS, is_training: bool | tf.Tensor = True,
               reuse: Reuse = None, variables_collections: Collections = None, outputs_collections: Collections = None,
               trainable: bool = True, scope: Scope = None, fused: bool | None = None,
               data_format: str = "NHWC") -> Any:
    """``tf.layers.batch_normalization``; without a collection for them, updates are made where outputs are used."""
    more = {f"{part}_initializer": value for part, value in (param_initializers or {}).items()}
    more |= {f"{part}_regularizer": value for part, value in (param_regularizers or {}).items()}
    with old.variable_scope(scope, "BatchNorm", [inputs], reuse=reuse) as own:
        layer = normalization.BatchNormalization(
            1 if data_format.startswith("NC") else -1, decay, epsilon, center, scale, trainable=trainable, fused=fused,
            name=own.name, _scope=own, _reuse=reuse, **more)
        out = layer.apply(inputs, training=is_training)
        _collect(variables_collections, layer.variables)
        if updates_collections is None:
            with tf.control_dependencies(layer.updates):
                out = tf.identity(out)
        elif updates_collections != old.GraphKeys.UPDATE_OPS:  # there they are already
            _collect(updates_collections, layer.updates)
        return _finished(out, activation_fn, outputs_collections)


def flatten(inputs: tf.Tensor, outputs_collections: Collections = None, scope: str | None = None) -> Any:
    """``tf.layers.flatten``."""
    with old.name_scope(scope, "Flatten", [inputs]):
        return _finished(layers.flatten(inputs), None, outputs_collections)


def one_hot_encoding(labels: tf.Tensor, num_classes: int, on_value: float = 1.0, off_value: float = 0.0) -> Any:
    """``tf.one_hot``."""
    return tf.one_hot(tf.cast(labels, tf.int64), num_classes, on_value, off_value)


def embed_sequence(ids: tf.Tensor, vocab_size: int, embed_dim: int, unique: bool = False, initializer: Function = None,
                   regularizer: Function = None, trainable: bool = True, scope: Scope = None,
                   reuse: Reuse = None) -> Any:
    """Lines of a table that is a variable of its own."""
    with old.variable_scope(scope, "EmbedSequence", [ids], reuse=reuse):
        table = old.get_variable("embeddings", [vocab_size, embed_dim], None, initializer, regularizer, trainable)
        return old.nn.embedding_lookup(table, ids)


LAYERS = {
    "fully_connected": fully_connected, "relu": fully_connected,
    "linear": functools.partial(fully_connected, activation_fn=None), "flatten": flatten,
    "conv2d": conv2d, "convolution2d": conv2d, "conv2d_transpose": conv2d_transpose,
    "convolution2d_transpose": conv2d_transpose, "max_pool2d": _pooling(layers.max_pooling2d, "MaxPool2D"),
    "avg_pool2d": _pooling(layers.average_pooling2d, "AvgPool2D"), "dropout": dropout, "batch_norm": batch_norm,
    "one_hot_encoding": one_hot_encoding, "embed_sequence": embed_sequence, "xavier_initializer": xavier_initializer,
    "xavier_initializer_conv2d": xavier_initializer, "variance_scaling_initializer": variance_scaling_initializer,
    "l1_regularizer": l1_regularizer, "l2_regularizer": l2_regularizer,
}  # fmt: skip
FRAMEWORK = {"arg_scope": arg_scope, "add_arg_scope": add_arg_scope, "get_global_step": old.train.get_global_step,
             "get_or_create_global_step": old.train.get_or_create_global_step}

# -- sequences


class OutputProjectionWrapper(rnn_cell_impl.RNNCell):
    """A cell with a dense layer on its output."""

    def __init__(self, cell: rnn_cell_impl.RNNCell, output_size: int, activation: Function = None,
                 reuse: Reuse = None) -> None:
        super().__init__(_reuse=reuse)
        self._cell, self._size, self._activation = cell, output_size, activation

    @property
    def state_size(self) -> Any:
        """The cell's."""
        return self._cell.state_size

    @property
    def output_size(self) -> int:
        """The layer's."""
        return self._size

    def zero_state(self, batch_size: int | tf.Tensor, dtype: tf.DType) -> Any:
        """The cell's."""
        return self._cell.zero_state(batch_size, dtype)

    def call(self, inputs: tf.Tensor, state: Any) -> Any:
        """One step."""
        output, state = self._cell(inputs, state)
        kernel = old.get_variable("kernel", [output.shape[1], self._size], output.dtype)
        bias = old.get_variable("bias", [self._size], output.dtype, old.zeros_initializer())
        projected = tf.matmul(output, kernel) + bias
        return (projected if self._activation is None else self._activation(projected)), state


def _crossentropy(loss: Function, labels: tf.Tensor, logits: tf.Tensor) -> Any:
    return (loss or old.nn.sparse_softmax_cross_entropy_with_logits)(labels=labels, logits=logits)


def sequence_loss(logits: tf.Tensor, targets: tf.Tensor, weights: tf.Tensor, average_across_timesteps: bool = True,
                  average_across_batch: bool = True, softmax_loss_function: Function = None,
                  name: str | None = None) -> Any:
    """``tf.contrib.seq2seq.sequence_loss``: of tensors with a dimension of time, averaged by their weights."""
    with old.name_scope(name, "sequence_loss", [logits, targets, weights]):
        flat = tf.reshape(logits, [-1, logits.shape[2]])
        losses = _crossentropy(softmax_loss_function, tf.reshape(targets, [-1]), flat) * tf.reshape(weights, [-1])
        if average_across_timesteps and average_across_batch:
            return tf.reduce_sum(losses) / (tf.reduce_sum(weights) + 1e-12)
        losses = tf.reshape(losses, tf.shape(logits)[:2])
        for axis, wanted in ((1, average_across_timesteps), (0, average_across_batch)):
            if wanted:
                return tf.reduce_sum(losses, axis) / (tf.reduce_sum(weights, axis) + 1e-12)
        return losses


def sequence_loss_by_example(logits: list, targets: list, weights: list, average_across_timesteps: bool = True,
                             softmax_loss_function: Function = None, name: str | None = None) -> Any:
    """``tf.contrib.legacy_seq2seq``'s: of lists with an item for each step."""
    with old.name_scope(name, "sequence_loss_by_example", logits + targets + weights):
        total = tf.add_n([_crossentropy(softmax_loss_function, tf.reshape(target, [-1]), logit) * weight
                          for logit, target, weight in zip(logits, targets, weights, strict=True)])
        return total / (tf.add_n(weights) + 1e-12) if average_across_timesteps else total


def sequence_loss_of_lists(logits: list, targets: list, weights: list, average_across_timesteps: bool = True,
                           average_across_batch: bool = True, softmax_loss_function: Function = None,
                           name: str | None = None) -> Any:
    """The same, summed or averaged over rows."""
    with old.name_scope(name, "sequence_loss", logits + targets + weights):
        losses = sequence_loss_by_example(logits, targets, weights, average_across_timesteps, softmax_loss_function)
        cost = tf.reduce_sum(losses)
        return cost / tf.cast(tf.shape(targets[0])[0], cost.dtype) if average_across_batch else cost


def rnn_decoder(decoder_inputs: list, initial_state: Any, cell: rnn_cell_impl.RNNCell, loop_function: Function = None,
                scope: Scope = None) -> Any:
    """Step by step; ``loop_function`` makes an input of the last output."""
    with old.variable_scope(scope or "rnn_decoder"):
        state, outputs = initial_state, list[Any]()
        for i, inputs in enumerate(decoder_inputs):
            if loop_function is not None and outputs:
                with old.variable_scope("loop_function", reuse=True):
                    inputs = loop_function(outputs[-1], i)
            if i > 0:
                old.get_variable_scope().reuse_variables()
            output, state = cell(inputs, state)
            outputs.append(output)
    return outputs, state


LEGACY_SEQ2SEQ = {"rnn_decoder": rnn_decoder, "sequence_loss": sequence_loss_of_lists,
                  "sequence_loss_by_example": sequence_loss_by_example}
