"""What of Python this process replaces for itself, whatever the script imports."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def watch_exit(ends: Any) -> None:
    """``os._exit`` tells first how the script ended."""
    os._exit = ends


def tell_terminal_size(layer: Callable[[Any], Any]) -> None:
    """``os.get_terminal_size`` with this layer around it."""
    os.get_terminal_size = layer(os.get_terminal_size)
