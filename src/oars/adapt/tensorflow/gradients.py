"""Gradients: what ``GradientTape.gradient`` gives is, on every rank, that of the script's loss over the global batch.

So clipping, accumulation, loss scaling, logging and updates written by hand just work, and so does a tape in a tape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from oars.adapt.meet import meet
from oars.adapt.tensorflow import collectives, exported, recovery, tapes
from oars.engine.world import RankLost


def exchanged(grads: Any, sources: Any) -> Any:
    """Gradients of ``sources`` averaged over ranks, in one message; coded, if they are weights' and no tape sees it."""
    exported.asks_for_gradients()
    if meet.inside or meet.separate:
        return grads
    if not meet.calls:
        meet.record.notice("a gradient without a Keras model: every rank computes all of it (correct, not faster)",
                           "make the variables the weights of a keras.Model, and call it", "model")
        return grads
    if tf.executing_eagerly() and not meet.partial:  # they are complete (``eager``)
        if not meet.fitting:
            meet.step(None, 0)
        return grads
    leaves = tf.nest.flatten(grads)
    sparse = [i for i, g in enumerate(leaves) if isinstance(g, tf.IndexedSlices)]
    dense = [i for i, g in enumerate(leaves) if g is not None and i not in sparse]
    of = tf.nest.flatten(sources)
    weights = not tapes.recording and all(isinstance(getattr(s, "_value", s), tf.Variable) for s in of)
    for i, mean in zip(dense, collectives.means([leaves[i] for i in dense], weights=weights), strict=True):
        leaves[i] = mean
    for i in sparse:
        leaves[i] = collectives.sparse_mean(leaves[i], of[i])
    return tf.nest.pack_sequence_as(grads, leaves)


def gradient(inner: Callable[..., Any]) -> Any:
    """Around ``GradientTape.gradient``."""
    @functools.wraps(inner)
    def gradient(self: tf.GradientTape, target: object, sources: Any, *args: object, **kwargs: object) -> Any:
        grads = None
        while True:
            try:
                grads = inner(self, target, sources, *args, **kwargs) if grads is None else grads
                return exchanged(grads, sources)
            except (RankLost, tf.errors.OpError) as error:
                if not meet.lost and not isinstance(error, RankLost):
                    raise
                if meet.partial or grads is None:
                    recovery.stop("the backward pass of nested tapes, or of a loop that is not compiled")
                    raise
                collectives.renew()

    return gradient


def one_by_one(plain: Callable[..., Any]) -> Any:
    """A Jacobian's gradients. TensorFlow takes them all at once, where no message can be sent: an eager loop's come
    from models that run whole (``eager``), a graph's are taken one after the other."""
    @functools.wraps(plain)
    def jacobian(self: tf.GradientTape, *args: object, **kwargs: object) -> Any:
        if not tf.executing_eagerly():
            return plain(self, *args, **{**kwargs, "parallel_iterations": 1, "experimental_use_pfor": False})
        meet.inside += 1
        try:
            return plain(self, *args, **kwargs)
        finally:
            meet.inside -= 1

    return jacobian


def exchanging(plain: Callable[..., Any]) -> Any:
    """Around ``tf.gradients``, which works in functions."""
    @functools.wraps(plain)
    def gradients(ys: Any, xs: Any, *args: object, **kwargs: object) -> Any:
        return exchanged(plain(ys, xs, *args, **kwargs), xs)

    return gradients
