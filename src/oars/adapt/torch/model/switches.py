"""Switches that are no attribute of a module: globals, entries of a dictionary, fields of a config object.

A model is traced again when an attribute of one of its modules changes. What makes its rows meet may stand elsewhere.
Which plain values the script's code in a model can name is read from that code when the model is traced, and their
values are compared before each split call: a few microseconds. One that changes all the time though nothing comes of it
(a counter) is left out after some traces.
"""

from __future__ import annotations

import enum
import itertools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from oars.adapt.python.looking import fields, is_a
from oars.adapt.torch.batches.memory import OF_EVERY_MODULE, Attributes, Cell, codes
from oars.adapt.torch.context import of_the_script

_PLAIN = (bool, int, float, str, type(None))
_TIMES = 3  # so often may one change and nothing come of it
_MOST = 400  # places that are looked at; what is larger is data
_ENTRIES = 100


class Place(NamedTuple):
    """Where a plain value stands: in a namespace, under a name; ``owner`` is whose it is."""

    owner: int
    where: Any
    name: Any

    def key(self) -> tuple[int, Any]:
        return self.owner, self.name


class _Entries:
    """Those of a list, and its length, read and written like a dictionary's."""

    def __init__(self, entries: list) -> None:
        self._entries = entries

    def get(self, name: Any) -> Any:
        if name == "length":
            return len(self._entries)
        return self._entries[name] if name < len(self._entries) else None

    def __setitem__(self, name: Any, value: Any) -> None:
        if name == "length":
            del self._entries[value:]
        elif name < len(self._entries):
            self._entries[name] = value


class Switches:
    """The plain values that a model's code can name, and what they were when it was traced."""

    def __init__(self, module: nn.Module, before: Switches | None = None) -> None:
        self._thrown: Counter[tuple[int, Any]] = before._thrown if before is not None else Counter()
        found: dict[tuple[int, Any], Place] = {}
        for place in itertools.islice(_places(module), _MOST):
            found.setdefault(place.key(), place)
        self._places = list(found.values())
        self._values = self._latest = self._read()

    def _read(self) -> list:
        return [where.get(name) for _, where, name in self._places]

    def thrown(self) -> bool:
        """Whether one has another value than when the model was traced."""
        self._latest = now = self._read()
        changed = [place.key() for place, a, b in zip(self._places, now, self._values, strict=True)
                   if a is not b and not (type(a) is type(b) and type(a) in _PLAIN and a == b)
                   and self._thrown[place.key()] < _TIMES]
        self._thrown.update(changed)
        return bool(changed)


    def put_back(self) -> None:
        """What a call that is made again has changed (counters), as it was before it."""
        for (_, where, name), value in zip(self._places, self._latest, strict=True):
            if where.get(name) is not value:
                where[name] = value


def _places(module: nn.Module) -> Iterator[Place]:
    seen: set[int] = set()
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if name not in OF_EVERY_MODULE:
                yield from _inside(value, seen)
                yield from _named_by(value, seen)
        for kind in type(part).__mro__:
            if not kind.__module__.startswith(("torch.", "builtins")) and id(kind) not in seen:
                seen.add(id(kind))
                for name, value in list(vars(kind).items()):
                    if _is_plain(value):
                        yield Place(id(kind), Attributes(kind), name)
                    else:
                        yield from _inside(value, seen)
                        yield from _named_by(value, seen)


def _named_by(function: Any, seen: set[int], depth: int = 3) -> Iterator[Place]:
    """What a function of the script's can name: globals, and what is in its closure."""
    function = function.__func__ if is_a(function, staticmethod, classmethod, types.MethodType) else function
    if not is_a(function, types.FunctionType) or id(function) in seen or not depth:
        return
    seen.add(id(function))
    if not of_the_script(function.__code__.co_filename):
        return
    space = function.__globals__
    for name in dict.fromkeys(name for code in codes(function.__code__) for name in code.co_names if name in space):
        value = space[name]
        if _is_plain(value):
            yield Place(id(space), space, name)
        else:
            yield from _named_by(value, seen, depth - 1)
            yield from _inside(value, seen)
    for cell in function.__closure__ or ():
        value = Cell(cell).get("")
        if _is_plain(value):
            yield Place(id(cell), Cell(cell), "")
        else:
            yield from _named_by(value, seen, depth - 1)
            yield from _inside(value, seen)


def _inside(thing: Any, seen: set[int], depth: int = 2) -> Iterator[Place]:
    """The plain entries of a dictionary, or fields of an object, and of those in it."""
    if id(thing) in seen or not depth or _is_plain(thing) or is_a(
            thing, torch.Tensor, nn.Module, np.ndarray, type, types.FunctionType):
        return
    if is_a(thing, types.ModuleType) and not of_the_script(getattr(thing, "__file__", None) or torch.__file__):
        return
    seen.add(id(thing))
    if type(thing) is list:
        if len(thing) <= _ENTRIES:
            yield Place(id(thing), _Entries(thing), "length")
            for i, value in enumerate(list(thing)):
                if _is_plain(value):
                    yield Place(id(thing), _Entries(thing), i)
                else:
                    yield from _inside(value, seen, depth - 1)
        return
    entries = thing if type(thing) is dict else fields(thing)
    if len(entries) > _ENTRIES:
        return
    for name, value in list(entries.items()):
        if _is_plain(value):
            yield Place(id(entries), entries, name)
        else:
            yield from _inside(value, seen, depth - 1)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or is_a(value, enum.Enum)
