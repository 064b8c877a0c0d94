"""Random numbers inside a model that runs on own rows: those of the global batch, of which a rank keeps its rows.

Keras draws by seeds that all ranks hold alike, so dropout masks and noise are one process's. What is drawn in other
ways (``tf.random``, ``jax.random``) shows when a model is tried on some rows only: such a model runs whole (``probe``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from oars.adapt.keras import trace
from oars.adapt.meet import meet


def _by_row(length: Any, share: Any) -> bool:
    """Whether a dimension of this length is the batch's: its rows, or (in a graph) not known before it runs."""
    return not isinstance(length, int) or (isinstance(share.count, int) and length == share.count)


def dropout(inner: Callable[..., Any]) -> Any:
    """Around the backend's ``dropout``."""
    from keras import ops

    @functools.wraps(inner)
    def dropout(inputs: Any, rate: float, noise_shape: Sequence[int | None] | None = None, seed: Any = None) -> Any:
        share = meet.split
        if not share or rate in (0.0, 1.0) or (noise_shape is not None and not _by_row(noise_shape[0], share)):
            return inner(inputs, rate, noise_shape, seed)
        shape = ops.shape(inputs)
        rest = shape[1:] if noise_shape is None else [
            shape[i] if d is None else d for i, d in enumerate(noise_shape) if i]
        kept = inner(ops.ones((share.rows, *rest), dtype=inputs.dtype), rate, None, seed)
        return inputs * share.cut(kept)

    return dropout


def of_all_rows(plain: Callable[..., Any]) -> Any:
    """Around draws whose numbers depend on what is given."""
    @functools.wraps(plain)
    def draw(x: object, *args: object, **kwargs: object) -> Any:
        share = meet.split
        return share.cut(plain(share.gather(x), *args, **kwargs)) if share else plain(x, *args, **kwargs)

    return draw


def drawing(plain: Callable[..., Any]) -> Any:
    """Around draws of a given shape."""
    @functools.wraps(plain)
    def draw(shape: Any, *args: object, **kwargs: object) -> Any:
        share, shape = meet.split, _dims(shape)
        if trace.probing and shape:
            trace.drawn.append(shape)
        if not share or not shape or not _by_row(shape[0], share):
            return plain(shape, *args, **kwargs)
        meet.split = None  # of draws that are made of others only the outermost counts
        try:
            whole = plain((share.rows, *shape[1:]), *args, **kwargs)
        finally:
            meet.split = share
        return share.cut(whole)

    return draw


def _dims(shape: Any) -> tuple:
    if not hasattr(shape, "shape"):
        return tuple(shape)
    return tuple(int(d) if hasattr(d, "numpy") else d for d in (shape[i] for i in range(shape.shape[0])))
