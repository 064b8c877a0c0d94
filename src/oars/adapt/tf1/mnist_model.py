"""``tensorflow.examples.tutorials.mnist.mnist``: the tutorial's network of two hidden layers, for scripts of 2017.

Four functions put it, its loss, its training and its count of right answers into the graph.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

NUM_CLASSES = 10
IMAGE_SIZE = 28
IMAGE_PIXELS = IMAGE_SIZE * IMAGE_SIZE
_v1 = tf.compat.v1


def inference(images: tf.Tensor, hidden1_units: int, hidden2_units: int) -> Any:
    """The logits of ``images``."""
    hidden1 = tf.nn.relu(_dense("hidden1", images, IMAGE_PIXELS, hidden1_units))
    hidden2 = tf.nn.relu(_dense("hidden2", hidden1, hidden1_units, hidden2_units))
    return _dense("softmax_linear", hidden2, hidden2_units, NUM_CLASSES)


def _dense(name: str, x: object, inputs: int, outputs: int) -> Any:
    with _v1.name_scope(name):
        start = _v1.truncated_normal([inputs, outputs], stddev=1 / math.sqrt(inputs))
        weights = _v1.Variable(start, name="weights")
        return tf.matmul(x, weights) + _v1.Variable(tf.zeros([outputs]), name="biases")


def loss(logits: tf.Tensor, labels: tf.Tensor) -> Any:
    """The mean cross entropy."""
    return _v1.losses.sparse_softmax_cross_entropy(labels=tf.cast(labels, tf.int64), logits=logits)


def training(loss: tf.Tensor, learning_rate: float) -> Any:
    """One step down, and a summary of the loss."""
    _v1.summary.scalar("loss", loss)
    step = _v1.Variable(0, name="global_step", trainable=False)
    return _v1.train.GradientDescentOptimizer(learning_rate).minimize(loss, global_step=step)


def evaluation(logits: tf.Tensor, labels: tf.Tensor) -> Any:
    """How many are right."""
    return tf.reduce_sum(tf.cast(tf.nn.in_top_k(predictions=logits, targets=labels, k=1), tf.int32))
