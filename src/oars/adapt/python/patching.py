"""How functions of other libraries are replaced: layers around a function, put in place by a table (``seams.py``).

A layer is a function that gets the next one, further in, and gives the function to be called in its place. The tables
of each framework name their layers, outermost first, with the modes they are for.
"""

from __future__ import annotations

import copyreg
import ctypes
import gc
import operator
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

Layer = Callable[[Any], Any]
copyreg.pickle(staticmethod, operator.attrgetter("__qualname__"))  # by its name, as what it stands for


@dataclass(frozen=True)
class Only:
    """A layer that is there in one mode alone."""

    mode: Mode
    layer: Layer


@dataclass(frozen=True)
class Mode:
    """A way in which a script may run: ``RECORDED(layer)`` is a layer of recorded runs."""

    name: str

    def __call__(self, layer: Layer) -> Only:
        return Only(self, layer)


@dataclass(frozen=True)
class Seam:
    """Where functions of ``owner`` are replaced: these names, by these layers, outermost first."""

    owner: Any
    names: str  # one or more, by blanks
    layers: tuple[Layer | Only, ...]


def instead(function: Any) -> Layer:
    """The innermost layer where the library's own function is not called, or only by its saved name."""
    return lambda inner: function


def chosen(layers: tuple[Layer | Only, ...], modes: Set[Mode]) -> list[Layer]:
    """The layers of these modes, outermost first."""
    return [each.layer if isinstance(each, Only) else each for each in layers
            if not isinstance(each, Only) or each.mode in modes]


def compose(layers: tuple[Layer | Only, ...], inner: Callable[..., Any], modes: Set[Mode]) -> Any:
    """The layers of these modes around ``inner``."""
    for layer in reversed(chosen(layers, modes)):
        inner = layer(inner)
    return inner


def install(seams: tuple[Seam, ...], modes: Set[Mode]) -> None:
    """Put the layers of these modes in place."""
    for seam in seams:
        for name in seam.names.split():
            if chosen(seam.layers, modes):
                put(seam.owner, name, compose(seam.layers, getattr(seam.owner, name), modes))


def put(owner: Any, name: str, value: object) -> None:
    """Replace an attribute of a library.

    Functions of Python's own that are written in C do not become methods where a class has them (``logging.Formatter``
    has ``time.localtime``), so what takes their place must not either.
    """
    if isinstance(owner, ModuleType) and owner.__name__ in sys.stdlib_module_names and isinstance(
            value, FunctionType) and isinstance(getattr(owner, name), BuiltinFunctionType):
        value = staticmethod(value)
    setattr(owner, name, value)


def put_in_type(kind: type, name: str, value: Any) -> None:
    """Replace a method of a type that is written in C, which refuses assignments: all its instances have it then."""
    (table,) = (each for each in gc.get_referents(kind.__dict__) if type(each) is dict)
    table[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def remove(owner: Any, name: str) -> None:
    """Take a replaced attribute away again where it hides one of a base class."""
    delattr(owner, name)


@contextmanager
def replaced(owner: Any, **values: object) -> Iterator[None]:
    """Replace attributes of a library for a while."""
    before = {name: vars(owner)[name] for name in values}
    try:
        for name, value in values.items():
            put(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            put(owner, name, value)
