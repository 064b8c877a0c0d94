"""``oars.keep(obj)``: what a snapshot should hold besides what it finds by itself (docs/snapshots.md)."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
kept: list[Any] = []


def keep(obj: T) -> T:
    """Let snapshots hold ``obj``: anything with ``state_dict`` and ``load_state_dict``, or a dict or list.

    Two lines in a script; under plain ``python`` they do nothing::

        import oars
        history = oars.keep([])
    """
    if not isinstance(obj, (dict, list)) and not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
        raise TypeError(f"oars.keep takes a dict, a list, or an object with state_dict() and load_state_dict(), "
                        f"not a {type(obj).__name__}")
    if not any(obj is other for other in kept):
        kept.append(obj)
    return obj


def states() -> list[Any]:
    """What the kept objects hold now."""
    return [obj if isinstance(obj, (dict, list)) else obj.state_dict() for obj in kept]


def restore(states: list[Any]) -> None:
    """Put it back, in place."""
    for obj, state in zip(kept, states, strict=False):
        if isinstance(obj, dict):
            obj.clear()
            obj.update(state)
        elif isinstance(obj, list):
            obj[:] = state
        else:
            obj.load_state_dict(state)
