"""Kinds: what a batch or a model's result is made of, as the tape has it, and how it is built again without values.

Nested tuples: ("T", dtype, shape, device, requires_grad) for a tensor, ("V", value) for a number or string, ("A", ...)
for a NumPy array with its values, ("l" | "t" | "d", parts) for lists, tuples and dicts. Anything else is ("?", parts):
a result or batch of that type that was made for real serves as its mould.
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oars.adapt.replay.tape import LARGEST, Diverged
from oars.adapt.torch.batches import collate
from oars.adapt.torch.context import site
from oars.adapt.torch.replay.placeholder import StandIn, unsure

if TYPE_CHECKING:
    from collections.abc import Sequence

_names: dict[Any, str] = {}
_tensors: dict[Any, tuple] = {}


def describe(value: object) -> tuple:
    """The kind of a batch or a result."""
    if type(value) is torch.Tensor:
        key = (value.shape, value.dtype, value.device, value.requires_grad)
        known = _tensors.get(key)
        if known is None:
            known = _tensors[key] = ("T", _name(key[1]), tuple(key[0]), _name(key[2]), key[3])
        return known
    if isinstance(value, torch.Tensor):
        inner = getattr(value, "local", value)  # rows show the global shape
        return ("T", _name(inner.dtype), tuple(map(int, value.shape)), _name(inner.device), inner.requires_grad)
    if value is None or type(value) in (bool, int, float, str):
        return ("V", value)
    if type(value) is tuple:
        return ("t", *map(describe, value))
    if type(value) is list:
        return ("l", *map(describe, value))
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return ("d", tuple(value), *map(describe, value.values()))
    if isinstance(value, np.ndarray) and value.dtype != object:
        if value.nbytes > LARGEST:
            return ("Z", value.dtype.str, value.shape)
        data = zlib.compress(np.ascontiguousarray(value).tobytes(), 1)
        return ("A", value.dtype.str, value.shape, base64.b64encode(data).decode())
    parts = collate.children(value)
    return ("?", *(map(describe, parts) if parts is not None else ()))


def _name(thing: object) -> str:
    name = _names.get(thing)
    if name is None:
        name = _names[thing] = str(thing).removeprefix("torch.")
    return name


def build(kind: Sequence[Any], mould: Any = None) -> Any:
    """Something of this kind; ``mould`` is one of the same type, where the kind alone does not tell."""
    letter = kind[0]
    if letter == "T":
        return StandIn(kind[2], getattr(torch, kind[1]), kind[3], bool(kind[4]) and torch.is_grad_enabled())
    if letter == "V":
        return kind[1]
    if letter in "tl":
        parts = [build(part, _part(mould, i)) for i, part in enumerate(kind[1:])]
        return tuple(parts) if letter == "t" else parts
    if letter == "d":
        return {key: build(part, _part(mould, i)) for i, (key, part) in enumerate(zip(kind[1], kind[2:], strict=True))}
    if letter == "A":
        return np.frombuffer(zlib.decompress(base64.b64decode(kind[3])), np.dtype(kind[1])).reshape(kind[2]).copy()
    if letter == "Z":
        unsure.setdefault(site(), "an array of more than 64 kB in a batch is not on the tape")
        return np.zeros(kind[2], np.dtype(kind[1]))
    of = collate.children(mould)
    if of is None or len(of) != len(kind) - 1:
        if mould is None or len(kind) > 1:
            raise Diverged("a batch or a model's result has another form than the first time")
        return mould
    return collate._rebuilt(mould, [build(part, m) for part, m in zip(kind[1:], of, strict=True)])


def needs_mould(kind: Sequence[Any]) -> bool:
    """Whether ``build`` needs something made for real."""
    return kind[0] == "?" or any(map(needs_mould, _inner(kind)))


def _inner(kind: Sequence[Any]) -> Any:
    return kind[2:] if kind[0] == "d" else kind[1:] if kind[0] in "tl?" else ()


def _part(mould: Any, i: int) -> Any:
    parts = collate.children(mould) if mould is not None else None
    return parts[i] if parts is not None and i < len(parts) else None


def same(kind: Sequence[Any], recorded: Sequence[Any]) -> bool:
    """Whether what was made for real is what the tape tells of; devices may differ."""
    if kind[0] != recorded[0] or len(kind) != len(recorded):
        return False
    if kind[0] == "T":
        return kind[1] == recorded[1] and list(kind[2]) == list(recorded[2])
    return all(map(same, _inner(kind), _inner(recorded)))
