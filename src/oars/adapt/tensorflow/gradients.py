"""Gradients: what ``GradientTape.gradient`` gives is, on every rank, that of the script's loss over the global batch.

So clipping, accumulation, loss scaling, logging and updates written by hand just work, and so does a tape in a tape.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from oars.adapt.meet import meet
from oars.adapt.tensorflow import again, wire
from oars.engine.world import RankLost


def exchanged(grads: Any) -> Any:
    """Gradients averaged over ranks, in one message."""
    if meet.inside:
        return grads
    if not meet.calls:
        meet.record.notice("a gradient without a Keras model: every rank computes all of it, the same and no faster")
        return grads
    leaves = tf.nest.flatten(grads)
    sparse = [i for i, g in enumerate(leaves) if isinstance(g, tf.IndexedSlices)]
    dense = [i for i, g in enumerate(leaves) if g is not None and i not in sparse]
    for i, mean in zip(dense, wire.means([leaves[i] for i in dense]), strict=True):
        leaves[i] = mean
    for i in sparse:
        leaves[i] = wire.sparse_mean(leaves[i])
    return tf.nest.pack_sequence_as(grads, leaves)


def install() -> None:
    """Patch GradientTape.gradient."""
    plain = tf.GradientTape.gradient

    @functools.wraps(plain)
    def gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return exchanged(plain(self, *args, **kwargs))
        except RankLost:
            again.stop("the backward pass of a loop that is not compiled")
            raise

    tf.GradientTape.gradient = gradient
