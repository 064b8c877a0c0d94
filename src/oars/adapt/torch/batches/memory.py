"""Data sets with a memory: what is read depends on, or is seen in, what was read before.

A counter, a cache, a list of bad samples, a mean that runs: if each rank reads its own samples only, each has another
memory. So it is looked, while own samples are read, whether the data set or the collate_fn changes (its attributes,
those of its parts, whatever its code can name), whether it seeds the global random streams, and whether it prints or
logs. If so, this is taken back, and the batch is read whole by every rank, as all later ones are. With workers, new
ones take over at that batch (``workers.py``).
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import logging
import os
import random as random_
import sys
import sysconfig
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oars.adapt.python import random
from oars.adapt.python.looking import fields, is_a, slots
from oars.adapt.python.patching import replaced
from oars.adapt.torch.context import of_the_script

if TYPE_CHECKING:
    from typing import TextIO

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_HOLDERS = (list, OrderedDict, dict, set, deque, bytearray)
_ITERATORS: tuple[type, ...] = (
    type(iter(range(0))), type(iter(range(1 << 65))), type(iter([])), type(iter(())), itertools.count)
# How much is looked at: bytes of arrays, entries of a container (of longer ones their number), things in all.
_QUICK, _THOROUGH, _IN_MODELS = (1 << 16, 1 << 12, 1 << 12), (1 << 26, 1 << 20, 1 << 16), (1 << 28, 1 << 12, 1 << 12)
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_LITTLE = 256  # things: what takes some ten microseconds
_DEEP = 3  # objects of libraries in each other
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))


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


class Attributes:
    """Those of a class, or an object's slots, read and written like a dictionary."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self._thing).get(name, default) if is_a(self._thing, type) else getattr(self._thing, name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        (type if is_a(self._thing, type) else object).__setattr__(self._thing, name, value)


class Memory:
    """What some objects (a data set, a collate_fn, a model) hold at one moment, to be compared and put back.

    From an object it goes to its attributes and slots, to what containers hold, and to what the script's code can name:
    globals, variables of functions around it, attributes of classes and of the script's modules. ``thorough`` goes
    through large containers and arrays too. What cannot be put back (a generator that is half run) is ``lasting``.
    """

    def __init__(self, *things: Any, thorough: bool = False) -> None:
        self._room, self._entries, self._most = _THOROUGH if thorough else _QUICK
        self._models = False
        self._begin()
        self._todo.extend(things)
        self._walk()

    @classmethod
    def of_model(cls, model: torch.nn.Module) -> Memory:
        """What the modules of a model hold besides tensors and other modules, and what their code names."""
        memory = cls.__new__(cls)
        memory._room, memory._entries, memory._most = _IN_MODELS
        memory._models = True
        memory._begin()
        for part in model.modules():
            for name, value in list(vars(part).items()):
                if name not in OF_EVERY_MODULE:
                    memory._note(vars(part), name, value)
            kind: Any = type(part)
            memory._todo.extend(_functions(kind))
        memory._walk()
        return memory

    def _begin(self) -> None:
        self._places: list[tuple[Any, str, Any]] = []  # where each value lies, and what it is
        self._copies: dict[int, tuple[Any, Any]] = {}  # containers and arrays, and what they held
        self._states: dict[int, tuple[Any, Any]] = {}  # random generators, and where they stood
        self._steps: dict[int, tuple[Any, Any]] = {}  # iterators, and copies of them
        self._seen: set[int] = set()
        self._todo: deque[Any] = deque()
        self._depths: dict[int, int] = {}  # in how many objects of libraries a thing lies
        self._depth = 0  # of what is looked at now
        self._seeds = random.seeds()
        self.lasting = False

    def _walk(self) -> None:
        while self._todo and len(self._places) + len(self._copies) < self._most:
            thing = self._todo.popleft()
            if id(thing) not in self._seen:
                self._seen.add(id(thing))
                self._depth = self._depths.pop(id(thing), 0)
                self._look(thing)

    def _look(self, thing: Any) -> None:
        if is_a(thing, types.MethodType):
            self._more(thing.__self__, thing.__func__)
        elif is_a(thing, types.FunctionType):
            for cell in thing.__closure__ or ():
                self._note(Cell(cell), "", Cell(cell).get(""))
            self._more(*(thing.__defaults__ or ()))
            self._look_at_names(thing)
        elif is_a(thing, functools.partial):
            self._more(thing.func, *thing.args, *thing.keywords.values())
        elif is_a(thing, functools._lru_cache_wrapper):
            if is_a(thing.__wrapped__, types.FunctionType) and _in_script(thing.__wrapped__.__code__.co_filename):
                self._copies[id(thing)] = thing, thing.cache_info()
                self.lasting = self.lasting or thing.cache_info().currsize > 0  # its counts cannot be put back
            self._more(thing.__wrapped__)
        elif is_a(thing, types.GeneratorType, map, zip, enumerate, filter):
            self.lasting = True
        elif is_a(thing, *_ITERATORS):
            self._steps[id(thing)] = thing, copy.copy(thing)
        elif is_a(thing, type):
            if _is_scripts(thing):
                for name, value in list(vars(thing).items()):
                    if not (name.startswith("__") and name.endswith("__")):
                        self._note(Attributes(thing), name, value)
                self._more(*_functions(thing))
        elif is_a(thing, staticmethod, classmethod):
            self._more(thing.__func__)
        elif (state := _state(thing)) is not None:
            self._states[id(thing)] = thing, state
        elif is_a(thing, *_HOLDERS, tuple, np.ndarray, torch.Tensor):
            self._keep(thing)
        elif not is_a(thing, *_SIMPLE, types.ModuleType):
            kind: Any = type(thing)
            own = _is_scripts(kind)
            self._depth += not own
            if (is_a(thing, torch.nn.Module) and self._models) or self._depth > _DEEP:
                return
            held = fields(thing)
            for name, value in list(held.items()):
                self._note(held, name, value)
            if own:
                for name, value in slots(thing):
                    self._note(Attributes(thing), name, value)
                self._more(kind)
            for function in _functions(kind):
                self._look_at_names(function)

    def _look_at_names(self, function: types.FunctionType) -> None:
        """The globals that it can name, and what it can name of them where they are the script's modules."""
        names, scripts = function.__globals__, _in_script(function.__code__.co_filename)
        named = [name for code in codes(function.__code__) for name in code.co_names]
        for name in dict.fromkeys(named):
            value = names.get(name, self)
            if is_a(value, types.ModuleType):
                if scripts and _in_script(getattr(value, "__file__", None) or torch.__file__):
                    for other in dict.fromkeys(named):
                        if other in vars(value):
                            self._note(vars(value), other, vars(value)[other])
            elif value is not self and (scripts or is_a(value, *_SIMPLE, *_HOLDERS, np.ndarray, torch.Tensor)):
                self._note(names, name, value)

    def _note(self, holder: Any, name: str, value: Any) -> None:
        self._places.append((holder, name, value))
        self._more(value)

    def _more(self, *things: Any) -> None:
        """To be looked at, too."""
        for thing in things:
            if not is_a(thing, *_SIMPLE) and id(thing) not in self._seen:
                self._todo.append(thing)
                self._depths.setdefault(id(thing), self._depth)

    def _keep(self, thing: Any) -> None:
        if is_a(thing, tuple):
            self._more(*tuple.__iter__(thing))
            return
        if is_a(thing, torch.Tensor):
            plain = type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided
            small = plain and not thing.is_meta and self._takes(thing.nbytes)
            self._copies[id(thing)] = thing, (thing._version, thing.detach().clone() if small else None)
            return
        if is_a(thing, np.ndarray):
            if self._takes(thing.nbytes):
                self._copies[id(thing)] = thing, thing.copy()
            return
        kind = _kind(thing)
        many = kind.__len__(thing)
        if many > self._entries:
            self._copies[id(thing)] = thing, many
            return
        held = _held(thing)
        self._copies[id(thing)] = thing, held
        if many <= self._most // 64 and kind is not bytearray:
            self._more(*(held.values() if isinstance(held, dict) else held))

    def _takes(self, size: int) -> bool:
        """Whether so many bytes are copied; of data sets there is room for so much in all."""
        if size > self._room:
            return False
        self._room -= size
        return True

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
        return (any(self._differs(value, old) for value, old in self._copies.values())
                or any(not _same(_state(value), old) for value, old in self._states.values())
                or any(_step(value) != _step(old) for value, old in self._steps.values())
                or random.seeds() != self._seeds)

    def _differs(self, value: Any, old: Any) -> bool:
        if is_a(value, torch.Tensor):
            if value._version != old[0] or old[1] is None or value.is_meta:
                return bool(value._version != old[0])
            return not torch.equal(value.detach(), old[1])  # batch_norm moves its averages unseen
        if is_a(value, np.ndarray):
            if value.dtype.hasobject or value.dtype != old.dtype or value.shape != old.shape:
                return bool(value.tobytes() != old.tobytes())
            a, b = (np.ascontiguousarray(array).view(np.uint8) for array in (value, old))
            return not np.array_equal(a, b)
        if is_a(value, functools._lru_cache_wrapper):
            return bool(value.cache_info() != old)
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
            value = self._steps[id(value)][1] if id(value) in self._steps else value
            if holder.get(name, self) is not value:
                holder[name] = value
        for value, old in self._states.values():
            _set_state(value, old)
        for value, old in self._copies.values():
            if not self._differs(value, old):
                continue
            if is_a(value, torch.Tensor):
                if old[1] is not None:
                    value.detach().copy_(old[1])
            elif is_a(value, np.ndarray):
                value[...] = old
            elif is_a(value, functools._lru_cache_wrapper):
                if not old.currsize:
                    value.cache_clear()
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


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def _state(thing: Any) -> Any:
    """Where a random generator stands; None of anything else."""
    if is_a(thing, np.random.Generator):
        return thing.bit_generator.state
    if is_a(thing, np.random.RandomState):
        return thing.get_state(legacy=False)
    if is_a(thing, random_.Random):
        return None if is_a(thing, random_.SystemRandom) else thing.getstate()
    return thing.get_state() if is_a(thing, torch.Generator) else None


def _step(iterator: Any) -> str:
    """How far an iterator is."""
    return repr(iterator) if is_a(iterator, itertools.count) else repr(iterator.__reduce__()[2:])


def _set_state(thing: Any, state: Any) -> None:
    if is_a(thing, np.random.Generator):
        thing.bit_generator.state = state
    elif is_a(thing, random_.Random):
        thing.setstate(state)
    else:
        thing.set_state(state)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_same(a[k], b[k]) for k in a)
    return bool(np.array_equal(a, b)) if isinstance(a, (np.ndarray, torch.Tensor)) else bool(a == b)


@functools.cache
def _is_scripts(kind: type) -> bool:
    """Whether a class is of no library."""
    file = getattr(sys.modules.get(str(kind.__module__)), "__file__", None)
    return kind.__module__ == "__main__" if file is None else _in_script(file)


@functools.cache
def _functions(kind: type) -> list[types.FunctionType]:
    """The methods of a class that are the script's."""
    return [f for c in kind.__mro__ if not c.__module__.startswith(("torch.", "builtins", "typing"))
            for f in vars(c).values() if isinstance(f, types.FunctionType)]


def _in_script(file: str) -> bool:
    """Whether it is of no library: what libraries keep for themselves, as caches of compiled patterns, is no memory."""
    return of_the_script(file) and not file.startswith((*_INSTALLED, "<frozen"))


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
    """While own samples are read: what they print and log is held back, and it is looked whether anything has a memory.
    """

    def __init__(self, things: tuple[Any, ...] | None, thorough: bool = False) -> None:
        self._before = None if things is None else Memory(*things, thorough=thorough)
        self.little = self._before is not None and self._before.size() < _LITTLE
        self.lasting = self._before is not None and self._before.lasting
        self.noticed = False
        self.text = ("", "")
        self._records: list[tuple[logging.Logger, logging.LogRecord]] = []

    def __enter__(self) -> Watching:
        self._streams, self._log = (sys.stdout, sys.stderr), logging.Logger.callHandlers
        self._holding = replaced(logging.Logger, callHandlers=self._holder())
        self._holding.__enter__()
        sys.stdout, sys.stderr = self._held = _Held(sys.stdout), _Held(sys.stderr)  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        sys.stdout, sys.stderr = self._streams
        self._holding.__exit__(None, None, None)
        self.text = self._held[0].getvalue(), self._held[1].getvalue()
        self.noticed = self.lasting or any(self.text) or bool(self._records) or (
            self._before is not None and self._before.changed())
        if kind is not None:
            self.say()

    def _holder(self) -> Callable[[logging.Logger, logging.LogRecord], None]:
        records, log, here = self._records, self._log, threading.get_ident()

        def hold(logger: logging.Logger, record: logging.LogRecord) -> None:
            if threading.get_ident() == here:
                records.append((logger, record))
            else:
                log(logger, record)

        return hold

    def say(self) -> None:
        """Print and log what was held back."""
        for stream, text in zip(self._streams, self.text, strict=True):
            if text and stream is not None:
                stream.write(text)
        for logger, record in self._records:
            self._log(logger, record)

    def again(self, read: Callable[[], Any]) -> Remembers:
        """Take back what reading own samples has done, and read all."""
        if self._before is not None:
            self._before.put_back()
        with Watching(None) as whole:
            data = read()
        if not whole.text[1]:  # a warning is given once
            whole.text = whole.text[0], self.text[1]
        whole.say()
        return Remembers(data)
