"""PyTorch aboard: a global batch of which each rank holds its rows."""

from __future__ import annotations

from typing import Any


def install(world: Any, plan: dict, record: Any) -> None:
    """Patch PyTorch for this rank (``world`` is None on one rank)."""
