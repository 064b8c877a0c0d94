"""Libraries that open files by themselves, in C or C++: they are handed the real path that stands for the script's.

PyTorch's writer and mapped storages, SQLite, HDF5. Others (safetensors, NetCDF, OpenCV) cannot be caught in
general: what they write is real on every rank.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
from collections.abc import Callable
from typing import Any

from oars.adapt.files.overlay import Overlay
from oars.adapt.files.voice import LIMIT, Voice

Redirect = Callable[[Any, str], str]  # (path, "r" | "w" | "a", or "?": may appear) -> the real path to open


def redirect_for(side: Voice | Overlay) -> Redirect:
    """How paths are handed on: the voice writes down the change and keeps the path, others get their mirror's."""

    def voice(path: Any, mode: str) -> str:
        speaker = side if isinstance(side, Voice) else side.voice
        if mode != "r":
            assert speaker
            speaker.writing(path, empty=mode == "w")
        return os.fspath(path)

    def overlay(path: Any, mode: str) -> str:
        assert isinstance(side, Overlay)
        with side.gate:
            if side.voice is None:
                return side.find(path)[1] if mode in "r?" else side.to_write(path, empty=mode == "w")
        return voice(path, mode)

    return voice if isinstance(side, Voice) else overlay


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def patch_torch(torch: Any, redirect: Redirect) -> None:
    """``torch.save``, ``torch.jit.save`` and mapped storages (``torch.load(mmap=True)``) open files in C++."""
    _wrap(torch, "save", redirect, 1, lambda call: "w")
    _wrap(torch.jit, "save", redirect, 1, lambda call: "w")
    _wrap(torch.jit, "load", redirect, 0, lambda call: "r")
    _wrap(torch, "from_file", redirect, 0, _mapped)
    _wrap(torch.UntypedStorage, "from_file", redirect, 0, _mapped)
    torch.serialization.save = torch.save
    save = torch.jit.RecursiveScriptModule.save

    @functools.wraps(save)
    def save_module(self: Any, f: Any, **kw: Any) -> Any:
        return save(self, redirect(f, "w") if _is_path(f) else f, **kw)

    torch.jit.RecursiveScriptModule.save = torch.jit.ScriptModule.save = save_module


def _mapped(call: tuple[Any, ...]) -> str:
    return "a" if len(call) > 1 and call[1] else "r"


def _wrap(holder: Any, name: str, redirect: Redirect, position: int, mode: Callable[[tuple[Any, ...]], str]) -> None:
    original = getattr(holder, name)

    @functools.wraps(original)
    def call(*args: Any, **kw: Any) -> Any:
        key = "f" if "f" in kw else "filename"
        given = args[position] if len(args) > position else kw.get(key)
        if _is_path(given):
            shared = args if len(args) > position else (given, kw.get("shared", False))
            place = redirect(given, mode(shared))
            if len(args) > position:
                args = (*args[:position], place, *args[position + 1 :])
            else:
                kw[key] = place
        return original(*args, **kw)

    setattr(holder, name, staticmethod(call) if isinstance(holder, type) else call)


def patch_sqlite(sqlite3: Any, redirect: Redirect) -> None:
    """A database may be written at any time, so it counts as written; a huge one is read-only for all but the voice."""
    connect = sqlite3.connect

    @functools.wraps(connect)
    def call(database: Any, *args: Any, **kw: Any) -> Any:
        if not _is_path(database) or str(database) in ("", ":memory:") or kw.get("uri"):
            return connect(database, *args, **kw)
        for ending in ("-wal", "-shm", "-journal"):  # SQLite makes them itself
            beside = os.fspath(database) + ending
            redirect(beside, "a" if os.path.exists(beside) else "?")
        if os.path.exists(database) and os.path.getsize(database) > LIMIT and redirect(database, "r") != database:
            return connect(f"file:{redirect(database, 'r')}?mode=ro", *args, **kw, uri=True)
        if not os.path.isdir(os.path.dirname(os.path.abspath(database))):
            return connect(database, *args, **kw)
        return connect(redirect(database, "a"), *args, **kw)

    sqlite3.connect = call
    sqlite3.dbapi2.connect = call


def patch_h5py(h5py: Any, redirect: Redirect) -> None:
    """``h5py.File(name, mode)``."""
    original = h5py.File.__init__

    @functools.wraps(original)
    def init(self: Any, name: Any, mode: str = "r", *args: Any, **kw: Any) -> None:
        if _is_path(name) and kw.get("driver") not in ("core", "mpio", "ros3"):
            if mode in ("x", "w-") and os.path.exists(name):
                raise FileExistsError(17, "Unable to create file (file exists)", os.fspath(name))
            name = redirect(name, {"r": "r", "r+": "a", "a": "a"}.get(mode, "w"))
            mode = "w" if mode in ("x", "w-") else mode
        original(self, name, mode, *args, **kw)

    h5py.File.__init__ = init


class WithoutTensorFlow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Where TensorFlow is installed, tensorboard imports it and writes by its C++ file system, which we cannot see.

    It does not if there is a module ``tensorboard.compat.notf``. So there is one; TensorFlow is imported all the same,
    for that draws random numbers.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name == "tensorboard.compat.notf" else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        try:
            importlib.import_module("tensorflow")
        except ImportError:
            pass
