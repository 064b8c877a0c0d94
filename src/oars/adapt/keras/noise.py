"""Random numbers inside a model that runs on own rows: those of the global batch, of which a rank keeps its rows.

Keras draws by seeds that all ranks hold alike, so dropout masks and noise are one process's.
"""

from __future__ import annotations

import functools
from typing import Any

from oars.adapt.meet import meet

_SHAPED = ("normal", "uniform", "randint", "truncated_normal", "gamma", "binomial", "beta")


def _by_row(length: Any, share: Any) -> bool:
    """Whether a dimension of this length is the batch's: its rows, or (in a graph) not known before it runs."""
    return length is None or not isinstance(length, int) or length == share.count


def install(keras: Any) -> None:
    """Patch the backend's draws."""
    from keras.src.backend import random

    for name in _SHAPED:
        if hasattr(random, name):
            setattr(random, name, _drawing(getattr(random, name)))
    plain = random.dropout

    @functools.wraps(plain)
    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        share = meet.split
        if not share or rate in (0.0, 1.0) or (noise_shape is not None and not _by_row(noise_shape[0], share)):
            return plain(inputs, rate, noise_shape, seed)
        shape = keras.ops.shape(inputs)
        rest = shape[1:] if noise_shape is None else [
            shape[i] if d is None else d for i, d in enumerate(noise_shape) if i]
        kept = plain(keras.ops.ones((share.rows, *rest), dtype=inputs.dtype), rate, None, seed)
        return inputs * share.cut(kept)

    random.dropout = dropout


def _drawing(plain: Any) -> Any:
    @functools.wraps(plain)
    def draw(shape: Any, *args: Any, **kwargs: Any) -> Any:
        share = meet.split
        if share and isinstance(shape, (list, tuple)) and len(shape) and _by_row(shape[0], share):
            return share.cut(plain((share.rows, *shape[1:]), *args, **kwargs))
        return plain(shape, *args, **kwargs)

    return draw
