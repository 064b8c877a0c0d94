"""The script's output and files, while what it did before a snapshot is played.

It has printed and written all of it already. So while playing, output goes nowhere, and files go to an overlay
(``oars.adapt.files``) on every rank, the voice's too; files that the run itself has made are hidden, so that a script
that looks for its own checkpoint finds what it found the first time. At the snapshot's place the overlay is thrown
away: the files are those on disk. A file that the script has open for writing goes on at the length it had then; one
that it only ever appends to is cut back to that length. What is cut off is kept in ``snapshots/cut`` of the run folder.

For this a snapshot says what files the run has made, which it appended to, and which are open, how long. So Python's
functions that make files tell of it first (an audit hook would be called for every ``id()``, hundreds of times a step),
and PyTorch's own writer is asked.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import io
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.adapt import files
from oars.adapt.files import held, patches, real
from oars.adapt.files.view import GONE, TEMPORARY, THROUGH

_made: set[str] = set()  # files and folders that were not there before the run
_appended: set[str] = set()
_ours: tuple[str, ...] = ()
_watching = False
_hushed: list[tuple[int, int]] = []
_MAKING = frozenset("wxa")


# ---- what the run does to files -------------------------------------------------------------------------------------


def watch(folder: Path) -> None:
    """From here on, note which files are made and which are appended to. For the voice."""
    global _ours, _watching
    _ours = (str(folder.resolve()) + "/", "/dev/", "/proc/", "/sys/")
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

    patches.replace({**swaps, os_open: opened, open_file: file_opened})


def _first(make: Any, place: int) -> Any:
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
        if where.startswith(_ours) or where in _made and not flags & os.O_APPEND:
            return
        if flags & os.O_APPEND:
            _appended.add(where)
        if flags & os.O_CREAT and not os.path.lexists(where):
            _made.add(where)
    except (TypeError, ValueError, OSError):
        pass


def watch_torch(torch: Any) -> None:
    """PyTorch opens the files it saves to by itself."""
    for holder in (torch, torch.jit):
        holder.save = _telling(holder.save)
    torch.serialization.save = torch.save


def _telling(save: Any) -> Any:
    @functools.wraps(save)
    def call(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            _opened(f, os.O_CREAT)
        return save(obj, f, *args, **kwargs)

    return call


def standing() -> dict[str, Any]:
    """For a snapshot: what the run has made, and how long its files are that are appended to or open. Flushes them."""
    flush()
    lengths = {path: _length(path) for path in _appended}
    opened = {}
    for fd, path in _writing():
        if not path.startswith(_ours) and stat.S_ISREG(os.fstat(fd).st_mode):
            opened[path] = [os.fstat(fd).st_size, real.lseek(fd, 0, os.SEEK_CUR)]
    return {"made": sorted(p for p in _made if os.path.lexists(p)), "opened": opened,
            "appended": {p: n for p, n in lengths.items() if n is not None}}


def flush() -> None:
    """Write out what Python holds back of the script's open files."""
    for thing in gc.get_objects():
        if issubclass(type(thing), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):  # isinstance asks proxies
            try:
                if not thing.closed and thing.writable():
                    thing.flush()
            except (OSError, ValueError):
                pass


def _writing() -> list[tuple[int, str]]:
    """Descriptors open for writing that have a path."""
    found = []
    for name in real.listdir("/proc/self/fd"):
        try:
            path = real.readlink(f"/proc/self/fd/{name}")
            with real.open_file(f"/proc/self/fdinfo/{name}") as info:
                flags = int(next(line.split()[1] for line in info if line.startswith("flags:")), 8)
        except (OSError, StopIteration):
            continue
        if path.startswith("/") and flags & (os.O_WRONLY | os.O_RDWR) and int(name) > 2:
            found.append((int(name), path))
    return found


def _length(path: str) -> int | None:
    try:
        return real.stat(path).st_size
    except OSError:
        return None


# ---- while playing --------------------------------------------------------------------------------------------------


def begin(rank: int, folder: Path, told: dict[str, Any]) -> None:
    """Hush the output and let no file be touched. ``told`` is what ``standing`` said then."""
    _made.update(told["made"])
    _appended.update(told["appended"])
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        _hushed.append((fd, os.dup(fd)))
        os.dup2(nowhere, fd)
    os.close(nowhere)
    files.install(rank, False, folder / runfolder.FILES, same_for_all=(folder,))
    for path in told["made"]:
        if os.path.lexists(path):
            _overlay().mark(real.realpath(os.path.dirname(path)).rstrip("/") + "/" + os.path.basename(path), GONE)


def _overlay() -> Any:
    return files._side


def speak() -> None:
    """Output goes where it went before."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    for fd, before in _hushed:
        os.dup2(before, fd)
        os.close(before)
    _hushed.clear()


def trouble() -> str:
    """Why the files cannot be made real again here, or ``""``."""
    tree = _overlay().tree + "/"
    known = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), io.FileIO) and not thing.closed:
            known.add(thing.fileno())
    for fd, path in _writing():
        if path.startswith(tree) and fd not in known:
            return (f"{path.removeprefix(tree[:-1])} is open by a library (a database, HDF5), which cannot be told "
                    "that its file is another from here on: open it where it is used, and close it again")
    return ""


def end(voice: bool, folder: Path, told: dict[str, Any]) -> None:
    """The snapshot's place: throw the overlay away; the voice's files are real from here on."""
    flush()
    overlay = _overlay()
    with overlay.gate.alone():  # no thread and no loader worker changes files meanwhile
        if voice:
            for path, length in told["appended"].items():
                if path not in told["opened"]:
                    _cut(path, length, folder)
            for fd, path in _writing():
                if path.startswith(overlay.tree + "/"):
                    _reopen(fd, path, path.removeprefix(overlay.tree), told["opened"], folder)
        _forget_played(overlay)
        if voice:
            to_be = overlay.voice_to_be()
            to_be.speak()
            overlay.act_as(to_be)
            patches.switch_to_voice(to_be)
    if voice:
        watch(folder)
    speak()


def join(told: dict[str, Any]) -> None:
    """Where this rank joins a run that is going: its overlay holds the voice's files as they are now."""
    flush()
    overlay = _overlay()
    with overlay.gate.alone():
        _forget_played(overlay)
        overlay.adopt()
        for fd, mirror in _writing():
            path = mirror.removeprefix(overlay.tree)
            if mirror != path and path in told["opened"]:
                os.lseek(fd, told["opened"][path][1], os.SEEK_SET)
    speak()


def _forget_played(overlay: Any) -> None:
    """What was written while playing goes, but for files that the script has open."""
    for place, names in list(overlay._mine.items()):
        for name, own in list(names.items()):
            if own not in (THROUGH, TEMPORARY):
                overlay.mark(f"{place}/{name}", None)
    held.clear(overlay.tree, keep=held.paths(overlay.tree))
    overlay._places.clear()


def _reopen(fd: int, mirror: str, path: str, opened: dict[str, Any], folder: Path) -> None:
    """Let an open file go on as the real one."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY | os.O_APPEND)
    if path in opened:
        length, place = opened[path]
        _cut(path, length, folder)
    else:  # a name that did not exist then, with the time in it: all of it is new
        real.makedirs(os.path.dirname(path), exist_ok=True)
        place = real.lseek(fd, 0, os.SEEK_CUR)
        source = real.open(mirror, os.O_RDONLY)
        try:
            if not os.path.lexists(path):
                real.copy_file(source, path)
        finally:
            real.close(source)
    target = real.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.lseek(target, place, os.SEEK_SET)
    os.dup2(target, fd, inheritable=False)
    real.close(target)


def _cut(path: str, length: int, folder: Path) -> None:
    """Shorten a file to what it was, and keep what is cut off."""
    now = _length(path)
    if now is None or now <= length:
        return
    kept = folder / runfolder.SNAPSHOTS / "cut" / path.lstrip("/").replace("/", "%")
    real.makedirs(kept.parent, exist_ok=True)
    with real.open_file(path, "rb") as source, real.open_file(kept, "ab") as target:
        source.seek(length)
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
    real.truncate(path, length)

