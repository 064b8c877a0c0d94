"""Looking into a script's objects without running any code of theirs.

A class may have its own ``items``, ``__len__``, ``__getattr__`` or ``__class__``: transformers' lazy tables import
every model when they are asked for their items. So ``type`` decides the kind, containers are read with the methods
of ``dict``, ``list`` and ``tuple`` themselves, and attributes from where Python keeps them.
"""

from __future__ import annotations

from collections import deque
from types import MemberDescriptorType
from typing import Any

_PLAIN = (str, int, float, bool, bytes, type(None))


def is_a(thing: object, *kinds: type) -> bool:
    """As ``isinstance``, by the true class alone."""
    return issubclass(type(thing), kinds)


def fields(thing: object) -> dict[str, Any]:
    """The ``__dict__`` of an object or module; empty if it has none."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def slots(thing: object) -> list[tuple[str, Any]]:
    """What is in an object's slots."""
    found = []
    for kind in type(thing).__mro__:
        for name, member in vars(kind).items():
            if type(member) is MemberDescriptorType:
                try:
                    found.append((name, member.__get__(thing)))
                except AttributeError:  # empty
                    pass
    return found


def items(value: Any, most: int) -> list[tuple[str, Any]]:
    """The entries of a dict, list, tuple or deque with their places, ``[0]`` or ``['name']``; none of one that has
    more than ``most``."""
    if is_a(value, dict):
        if dict.__len__(value) > most:
            return []
        return [(f"[{_key(k, place)}]", v) for place, (k, v) in enumerate(dict.items(value))]
    kind: Any = next(k for k in (list, tuple, deque) if is_a(value, k))
    return [(f"[{i}]", v) for i, v in enumerate(kind.__iter__(value))] if kind.__len__(value) <= most else []


def _key(key: object, place: int) -> str:
    plain = type(key) in _PLAIN or (type(key) is tuple and all(type(k) in _PLAIN for k in key))
    return repr(key) if plain else f"#{place}"
