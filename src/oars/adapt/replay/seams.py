"""What a run of one rank makes and appends to, for its snapshots: Python's functions that make files tell of it first.

On several ranks the library below Python knows it (``oars.adapt.files``); one rank preloads nothing, and an audit hook
would be called for every ``id()``, hundreds of times a step. What native code makes is not seen here: a resumed script
finds it. PyTorch's own writer is asked.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from oars.adapt.replay.made import note

if TYPE_CHECKING:
    from collections.abc import Callable

made: set[str] = set()  # files and folders that were not there before the run
appended: set[str] = set()
_ours: tuple[str, ...] = ()
_folder = Path()  # of the run
_watching = False
_MAKING = frozenset("wxa")


def watch(ours: tuple[str, ...], folder: Path) -> None:
    """From here on, note which files are made and which are appended to."""
    global _ours, _folder, _watching
    _ours, _folder = ours, folder
    if _watching:
        return
    _watching = True
    os.register_at_fork(after_in_child=_stop)
    swaps: dict[Any, Any] = {make: _first(make, place) for make, place in (
        (os.mkdir, 0), (os.rename, 1), (os.replace, 1), (os.link, 1), (os.symlink, 1))}
    os_open, open_file = os.open, io.open

    @functools.wraps(os_open)
    def opened(path: Any, flags: int, *args: Any, **kw: Any) -> int:
        if flags & (os.O_CREAT | os.O_APPEND) and kw.get("dir_fd") is None:
            _opened(path, flags)
        return os_open(path, flags, *args, **kw)

    @functools.wraps(open_file)
    def file_opened(file: Any, mode: str = "r", *args: Any, **kw: Any) -> Any:
        if mode != "r" and mode != "rb" and isinstance(mode, str) and not isinstance(file, int):
            if not _MAKING.isdisjoint(mode):
                _opened(file, os.O_CREAT | (os.O_APPEND if "a" in mode else 0))
        return open_file(file, mode, *args, **kw)

    _replace({**swaps, os_open: opened, open_file: file_opened})


def _first(make: Callable[..., Any], place: int) -> Any:
    """``make``, which makes what its argument number ``place`` names, and tells of it first."""
    @functools.wraps(make)
    def call(*args: Any, **kw: Any) -> Any:
        if kw.get("dir_fd") is None and kw.get("dst_dir_fd") is None:
            given = [*args, *(kw[key] for key in ("path", "src", "dst") if key in kw)]
            if len(given) > place:
                _opened(given[place], os.O_CREAT)
        return make(*args, **kw)

    return call


def _stop() -> None:
    global _watching
    _watching = False


def _opened(path: Any, flags: int) -> None:
    if not _watching:
        return
    try:
        where = os.path.abspath(os.fsdecode(path))
        if where.startswith(_ours) or where in made and (where in appended or not flags & os.O_APPEND):
            return
        new = not os.path.lexists(where)
        if flags & os.O_APPEND and where not in appended:
            appended.add(where)
            note(_folder, (), {where: 0 if new else os.path.getsize(where)})
        if flags & os.O_CREAT and new and where not in made:
            made.add(where)
            note(_folder, [where])
    except (TypeError, ValueError, OSError):
        pass


def watch_torch(torch: Any) -> None:
    """PyTorch opens the files it saves to by itself."""
    for holder in (torch, torch.jit):
        holder.save = _telling(holder.save)
    torch.serialization.save = torch.save


def _telling(save: Callable[..., Any]) -> Any:
    @functools.wraps(save)
    def call(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            _opened(f, os.O_CREAT)
        return save(obj, f, *args, **kwargs)

    return call


def _replace(swaps: dict[Any, Any]) -> None:
    """Put every replacement wherever its original is held by a module that is already imported."""
    by_id = {id(original): (original, ours) for original, ours in swaps.items()}
    for name, module in list(sys.modules.items()):
        # posix and _io keep the originals: the import system runs on them.
        if name in ("posix", "_io", "_pyio") or name.startswith(("importlib", "_frozen_importlib", "oars.")):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in by_id:
                setattr(module, key, by_id[id(value)][1])
    for holder in ("pathlib", "tempfile", "glob"):
        for value in list(vars(sys.modules.get(holder, builtins)).values()):
            if isinstance(value, type) and value.__module__.partition(".")[0] == holder:
                _replace_in_class(value, by_id)


def _replace_in_class(kind: type, by_id: dict[int, Any]) -> None:
    """Functions that a class body or a default argument caught when its module was imported."""
    for key, value in list(vars(kind).items()):
        held = value.__func__ if isinstance(value, staticmethod) else value
        if id(held) in by_id:
            setattr(kind, key, staticmethod(by_id[id(held)][1]))
        elif isinstance(held, FunctionType) and held.__defaults__:
            held.__defaults__ = tuple(by_id.get(id(value), (0, value))[1] for value in held.__defaults__)
