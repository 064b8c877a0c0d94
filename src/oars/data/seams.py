"""The one function of PyTorch that data replaces: ``DataLoader.__iter__``, to count passes (``passes``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def count_passes(loader: Any, layer: Callable[[Any], Any]) -> None:
    """Put this layer around a loader's ``__iter__``."""
    loader.__iter__ = layer(loader.__iter__)
