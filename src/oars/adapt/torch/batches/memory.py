"""Data sets with a memory: what is read depends on, or is seen in, what was read before.

A counter, a cache, a list of bad samples, a mean that runs: if each rank reads its own samples only, each has another
memory. So it is looked, while own samples are read, whether the data set changes (its attributes, those of its parts,
the globals that its code names), whether it seeds the global random streams, and whether it prints. If so, this is
taken back, and the batch is read whole by every rank, as all later ones are. (Workers have read later batches by the
time it is known: with them it has to be noticed in a loader's first batch.)
"""

from __future__ import annotations

import functools
import io
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oars.adapt.python import random
from oars.adapt.python.looking import fields, is_a

if TYPE_CHECKING:
    from typing import TextIO

    from torch.utils.data import Dataset

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_HOLDERS = (list, OrderedDict, dict, set, deque, bytearray)
_SMALL = 1 << 12  # bytes, of an array that is looked through
_SMALL_IN_MODELS = 1 << 24  # the same of a model, which is looked at less often
_COPIED = 1 << 12  # entries of a container that is compared entry by entry; of longer ones the length
_MANY = 64  # entries of a container that are looked at
_DEEP = 3
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_LITTLE = 256  # things: what takes some ten microseconds


class Remembers(NamedTuple):
    """A whole batch of a data set that has a memory."""

    data: Any


class Cell:
    """A variable of a function around another, read and written like an entry of a dictionary."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, name: str, default: Any = None) -> Any:
        return self._cell.cell_contents if self._cell != types.CellType() else default

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value


class Memory:
    """What a data set (or a model) holds at one moment, so that it can be compared, and put back."""

    def __init__(self, dataset: Dataset | None, small: int = _SMALL) -> None:
        self._small = small
        self._places: list[tuple[Any, str, Any]] = []  # where each value lies, and what it is
        self._copies: dict[int, tuple[Any, Any]] = {}  # containers, and what they held
        self._seen: set[int] = set()
        self._look(dataset, 0)
        self._seeds = random.seeds()

    @classmethod
    def of_model(cls, model: torch.nn.Module) -> Memory:
        """What the modules of a model hold besides tensors and other modules, and the globals that their code names."""
        memory = cls(None, small=_SMALL_IN_MODELS)
        for part in model.modules():
            for name, value in list(vars(part).items()):
                if name not in OF_EVERY_MODULE:
                    memory._note(vars(part), name, value, 0)
            kind: Any = type(part)
            for function in _functions(kind):
                memory._look(function, 0)
        return memory

    def _look(self, thing: Any, depth: int) -> None:
        if id(thing) in self._seen or depth > _DEEP or is_a(thing, torch.nn.Module, type, types.ModuleType):
            return
        self._seen.add(id(thing))
        if is_a(thing, types.MethodType):
            thing = thing.__func__
        if is_a(thing, types.FunctionType):
            for cell in thing.__closure__ or ():
                self._note(Cell(cell), "", Cell(cell).get(""), depth)
            self._look_at_names([thing], depth)
            return
        held = fields(thing)
        if held and not is_a(thing, torch.Tensor):
            for name, value in held.items():
                self._note(held, name, value, depth)
            kind: Any = type(thing)
            self._look_at_names(_functions(kind), depth)

    def _look_at_names(self, functions: list[types.FunctionType], depth: int) -> None:
        """The globals that these can name."""
        for function in functions:
            names = function.__globals__
            for name in function.__code__.co_names:
                if name in names and is_a(names[name], *_SIMPLE, *_HOLDERS, np.ndarray, torch.Tensor):
                    self._note(names, name, names[name], depth)

    def _note(self, holder: Any, name: str, value: Any, depth: int) -> None:
        self._places.append((holder, name, value))
        if is_a(value, *_HOLDERS) and id(value) not in self._copies:
            length = _kind(value).__len__(value)
            held = _held(value) if length <= _COPIED else length
            self._copies[id(value)] = value, held
            if length <= _MANY:
                for inner in held.values() if isinstance(held, dict) else held:
                    if is_a(inner, *_HOLDERS):
                        self._copies.setdefault(id(inner), (inner, _held(inner)))
                    else:
                        self._look(inner, depth + 1)
        elif is_a(value, np.ndarray) and value.nbytes <= _SMALL:
            self._copies[id(value)] = value, value.copy()
        elif is_a(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
            old = value.detach().clone() if plain and value.nbytes <= self._small else None
            self._copies[id(value)] = value, (value._version, old)
        elif not is_a(value, *_SIMPLE, np.ndarray):
            self._look(value, depth + 1)

    def size(self) -> int:
        """How many things are compared."""
        return len(self._places) + sum(len(old) for _, old in self._copies.values() if is_a(old, *_HOLDERS))

    def changed(self) -> bool:
        """Whether it is another one now. That something was opened where there was nothing does not count."""
        for holder, name, value in self._places:
            now = holder.get(name, self)
            if now is not value and (is_a(value, *_SIMPLE, *_HOLDERS, np.ndarray, torch.Tensor)
                                     and (value is not None or is_a(now, *_SIMPLE, *_HOLDERS))):
                same = is_a(value, *_SIMPLE) and type(now) is type(value) and (now == value or now != now)
                if not same:
                    return True
        return any(self._differs(value, old) for value, old in self._copies.values()) or random.seeds() != self._seeds

    def _differs(self, value: Any, old: Any) -> bool:
        if is_a(value, torch.Tensor):
            if value._version != old[0] or old[1] is None or value.is_meta:
                return bool(value._version != old[0])
            return not torch.equal(value.detach(), old[1])  # batch_norm moves its averages unseen
        if is_a(value, np.ndarray):
            return value.tobytes() != old.tobytes()
        if isinstance(old, int):
            return bool(_kind(value).__len__(value) != old)
        now = _held(value)
        if len(now) != len(old):
            return True
        if isinstance(now, dict):
            return any(now.get(k, self) is not v and not _equal(now.get(k, self), v) for k, v in old.items())
        if isinstance(now, (set, bytearray)):
            return bool(now != old)
        return any(a is not b and not _equal(a, b) for a, b in zip(now, old, strict=True))

    def put_back(self) -> None:
        """Let it be as it was."""
        for holder, name, value in self._places:
            holder[name] = value
        for value, old in self._copies.values():
            if not self._differs(value, old):
                continue
            if is_a(value, torch.Tensor):
                if old[1] is not None:
                    value.detach().copy_(old[1])
            elif is_a(value, np.ndarray):
                value[...] = old
            else:
                _fill(value, old)


def _kind(value: Any) -> Any:
    """Which of Python's own containers it is; a class of the script's may do anything in its own methods."""
    return next(kind for kind in _HOLDERS if is_a(value, kind))


def _held(value: Any) -> Any:
    """What a container holds."""
    kind = _kind(value)
    if issubclass(kind, dict):
        return dict(kind.items(value))
    return (kind if kind is not deque else list)(kind.__iter__(value))


def _fill(value: Any, old: Any) -> None:
    """Let a container hold ``old``; what it had, if this is only known by its length."""
    kind = _kind(value)
    if isinstance(old, int):
        while kind is not set and kind.__len__(value) > old:
            kind.popitem(value) if issubclass(kind, dict) else kind.pop(value)
    elif kind in (list, bytearray):
        kind.__setitem__(value, slice(None), old)
    else:
        kind.clear(value)
        if kind is set:
            set.update(value, old)
        elif kind is deque:
            deque.extend(value, old)
        else:
            for key, entry in old.items():
                kind.__setitem__(value, key, entry)


@functools.cache
def _functions(kind: type) -> list[types.FunctionType]:
    """The methods of a class that are the script's."""
    return [f for c in kind.__mro__ if not c.__module__.startswith(("torch.", "builtins", "typing"))
            for f in vars(c).values() if isinstance(f, types.FunctionType)]


def _equal(a: Any, b: Any) -> bool:
    return is_a(b, *_SIMPLE) and type(a) is type(b) and (a == b or a != a)


class _Held(io.StringIO):
    """A stream's text, held back, but for that of other threads; in all else it is that stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return int(self._stream.write(text))
        return super().write(text)

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        return bool(self._stream.isatty())


class Watching:
    """While own samples are read: what they print is held back, and it is looked whether anything has a memory."""

    def __init__(self, dataset: Any, look: bool) -> None:
        self._before = Memory(dataset) if look else None
        self.little = self._before is not None and self._before.size() < _LITTLE
        self.noticed = False
        self.text = ("", "")

    def __enter__(self) -> Watching:
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._held = _Held(sys.stdout), _Held(sys.stderr)  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        sys.stdout, sys.stderr = self._streams
        self.text = self._held[0].getvalue(), self._held[1].getvalue()
        self.noticed = any(self.text) or (self._before is not None and self._before.changed())
        if kind is not None:
            self.say()

    def say(self) -> None:
        """Print what was held back."""
        for stream, text in zip(self._streams, self.text, strict=True):
            if text and stream is not None:
                stream.write(text)

    def again(self, read: Callable[[], Any]) -> Remembers:
        """Take back what reading own samples has done, and read all."""
        if self._before is not None:
            self._before.put_back()
        with Watching(None, False) as whole:
            data = read()
        if not whole.text[1]:  # a warning is given once
            whole.text = whole.text[0], self.text[1]
        whole.say()
        return Remembers(data)
