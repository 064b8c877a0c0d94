"""The script's output and files, while what it did before a snapshot is played.

It has printed and written all of it already. So while playing, output goes nowhere, and files go to an overlay
(``oars.adapt.files``) on every rank, the voice's too; files that the run itself has made are hidden, so that a script
that looks for its own checkpoint finds what it found the first time. At the snapshot's place the overlay is thrown
away: the files are those on disk, but for what the run has made since, which is set aside. A file that the script has
open for writing goes on at the length it had then; one that it only ever appends to is cut back to that length. What is
cut off or set aside is kept in ``snapshots/cut`` of the run folder.

For this a snapshot says what files the run has made, which it appended to (the library below Python knows; ``seams.py``
on one rank), and which are open, how long; and ``made.py`` what it made and appended to at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from oars.adapt.files import library, promotion
from oars.adapt.files.copying import copy_file
from oars.adapt.files.own import Own
from oars.adapt.replay import seams
from oars.adapt.replay.made import noted

_ours: tuple[str, ...] = ()
_hushed: list[tuple[int, int]] = []


# ---- what the run does to files -------------------------------------------------------------------------------------


def watch(folder: Path) -> None:
    """From here on it is known which files are made and which are appended to. For the voice."""
    global _ours
    _ours = (str(folder.resolve()) + "/", "/dev/", "/proc/", "/sys/")
    if not library.loaded():
        seams.watch(_ours, folder.resolve())


def standing() -> dict[str, Any]:
    """For a snapshot: what the run has made, and how long its files are that are appended to or open. Flushes them."""
    flush()
    made_by_library, appended_by_library = files.made()
    lengths = {path: _length(path) for path in seams.appended.union(appended_by_library)}
    opened = {}
    for fd, path in _writing():
        if not path.startswith(_ours) and stat.S_ISREG(os.fstat(fd).st_mode):
            opened[path] = [os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_CUR)]
    every = seams.made | made_by_library
    return {"made": sorted(p for p in every if os.path.lexists(p)), "opened": opened,
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
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
            with open(f"/proc/self/fdinfo/{name}") as info:
                flags = int(next(line.split()[1] for line in info if line.startswith("flags:")), 8)
        except (OSError, StopIteration):
            continue
        if path.startswith("/") and flags & (os.O_WRONLY | os.O_RDWR) and int(name) > 2:
            found.append((int(name), path))
    return found


def _length(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


# ---- while playing --------------------------------------------------------------------------------------------------


def begin(rank: int, folder: Path, then: dict[str, Any]) -> None:
    """Hush the output and let no file be touched. ``then`` is what ``standing`` gave at the snapshot."""
    every = noted(folder)[0].union(then["made"])
    seams.made.update(every)
    seams.appended.update(then["appended"])
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        _hushed.append((fd, os.dup(fd)))
        os.dup2(nowhere, fd)
    os.close(nowhere)
    files.install(rank, False, folder / runfolder.FILES, same_for_all=(folder,))
    for path in every:
        if os.path.lexists(path):
            above = os.path.realpath(os.path.dirname(path)).rstrip("/")
            library.mark(f"{above}/{os.path.basename(path)}", library.GONE)


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
    tree = files.overlay().tree + "/"
    known = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), io.FileIO) and not thing.closed:
            known.add(thing.fileno())
    with library.plain():
        writing = _writing()
    for fd, path in writing:
        if path.startswith(tree) and fd not in known:
            return (f"{path.removeprefix(tree[:-1])} is open by a library (a database, HDF5), which cannot be told "
                    "that its file is another from here on: open it where it is used, and close it again")
    return ""


def end(voice: bool, folder: Path, then: dict[str, Any]) -> None:
    """The snapshot's place: throw the overlay away; the voice's files are real from here on."""
    flush()
    overlay = files.overlay()
    with library.alone():  # no thread and no loader worker changes files meanwhile
        if voice:
            made, appended = noted(folder)
            for path in sorted(made.difference(then["made"]), reverse=True):  # what is in a folder before the folder
                _set_aside(path, folder)
            for path, length in {**appended, **then["appended"]}.items():
                if path not in then["opened"]:
                    _cut(path, length, folder)
            for fd, path in _writing():
                if path.startswith(overlay.tree + "/"):
                    _reopen(fd, path, path.removeprefix(overlay.tree), then["opened"], folder)
        _forget_played(overlay)
        if voice:
            here = os.getcwd().removeprefix(overlay.tree) or "/"
            library.speak()
            library.become_voice()
            os.chdir(here)
    if voice:
        watch(folder)
    speak()


def join(then: dict[str, Any]) -> None:
    """Where this rank joins a run that is going: its overlay holds the voice's files as they are now."""
    flush()
    overlay = files.overlay()
    with library.alone():
        _forget_played(overlay)
        overlay.adopt()
        for fd, mirror in _writing():
            path = mirror.removeprefix(overlay.tree)
            if mirror != path and path in then["opened"]:
                os.lseek(fd, then["opened"][path][1], os.SEEK_SET)
    speak()


def _forget_played(overlay: Own) -> None:
    """What was written while playing goes, but for files that the script has open."""
    overlay.forget()
    promotion.clear(overlay.tree, keep=promotion.held(overlay.tree))


def _reopen(fd: int, mirror: str, path: str, opened: dict[str, Any], folder: Path) -> None:
    """Let an open file go on as the real one."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY | os.O_APPEND)
    if path in opened:
        length, place = opened[path]
        _cut(path, length, folder)
    else:  # a name that did not exist then, with the time in it: all of it is new
        os.makedirs(os.path.dirname(path), exist_ok=True)
        place = os.lseek(fd, 0, os.SEEK_CUR)
        source = os.open(mirror, os.O_RDONLY)
        try:
            if not os.path.lexists(path):
                copy_file(source, path)
        finally:
            os.close(source)
    target = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.lseek(target, place, os.SEEK_SET)
    os.dup2(target, fd, inheritable=False)
    os.close(target)


def _cut(path: str, length: int, folder: Path) -> None:
    """Shorten a file to what it was, and keep what is cut off."""
    now = _length(path)
    if now is None or now <= length:
        return
    kept = _kept(path, folder)
    with open(path, "rb") as source, open(kept, "ab") as target:
        source.seek(length)
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
    os.truncate(path, length)



def _set_aside(path: str, folder: Path) -> None:
    """A file that the run has made since: it is not there yet. Folders go if nothing else is in them."""
    if os.path.isdir(path) and not os.path.islink(path):
        with contextlib.suppress(OSError):
            os.rmdir(path)
    elif os.path.lexists(path):
        shutil.move(path, _kept(path, folder))


def _kept(path: str, folder: Path) -> Path:
    """Where to keep what is taken from a file."""
    kept = folder / runfolder.SNAPSHOTS / runfolder.CUT_AWAY / path.lstrip("/")
    os.makedirs(kept.parent, exist_ok=True)
    return kept
