"""The library below Python (``native/``), preloaded into ranks: what Python asks of it, and how ranks get it.

It stands between a rank with all its children and libc. It does nothing until ``begin`` names a file that says which
side this rank is on. Code of ours that must reach the files as they really are runs ``with plain():``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oars.plan import Plan
from oars.runfolder import UsageError

PATH = str(Path(__file__).with_name("_preload.abi3.so"))
LOWER, THROUGH, KEPT, HERE, NEW, PURE, ABSENT, GONE = range(8)  # what a path stands for, see native/view.c


def trouble() -> str:
    """Why ranks cannot preload the library here, or ``""``."""
    if not os.path.exists(PATH):
        return f"the file library is not built ({PATH} is missing): install manyoars again, where there is a C compiler"
    if re.search(r"[\s:]", PATH):
        return f"the file library cannot be preloaded from a path with a space or a colon in it: {PATH}"
    if platform.libc_ver()[0] != "glibc":
        return "the file library needs glibc, and this Python is built on another libc"
    return ""


def sees_all() -> bool:
    """Whether system calls that pass libc by can be handed back to us here."""
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    return platform.machine() == "x86_64" and release is not None and (int(release[1]), int(release[2])) >= (5, 11)


def needed(plan: Plan) -> bool:
    """Whether files are not simply those of the one rank: several write, or what is written is thrown away."""
    return plan.ranks > 1 or bool(plan.resume) or plan.stop_after is not None


def before_rank(plan: Plan, path: str = PATH) -> list[str]:
    """What stands before a rank's command; one line if ranks cannot have the library."""
    if not needed(plan):
        return []
    if why := trouble():
        raise UsageError(why)
    return preload(path)


def preload(path: str = PATH) -> list[str]:
    """A command's beginning that preloads the library, after those that a site preloads itself."""
    others = os.environ.get("LD_PRELOAD", "")
    return ["/usr/bin/env", "LD_PRELOAD=" + ":".join(filter(None, [others, path]))]


@functools.cache
def _calls() -> Any:
    calls = ctypes.PyDLL(None)  # it does not wait, but where it says so
    if not hasattr(calls, "oars_files_begin"):
        return None
    calls.oars_files_alone.argtypes = [ctypes.c_double]
    calls.oars_files_room.restype = ctypes.c_size_t
    calls.oars_files_changes.restype = ctypes.c_long
    return calls


def loaded() -> bool:
    """Whether this process has the library."""
    return _calls() is not None


def begin(config: str) -> None:
    """From here on this process and its children see the files of the side that ``config`` names."""
    if _calls() is None:
        raise SystemExit("oars: the file library is not loaded: something between oars and its ranks removes LD_PRELOAD"
                         " from the environment (a launcher's wrapper?), or this Python is statically linked")
    _check(_calls().oars_files_begin(os.fsencode(config)), config)
    # a fork waits for a promotion: here without the interpreter's lock, which the promotion needs
    os.register_at_fork(before=ctypes.CDLL(None).oars_files_pass)
    others = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path and path != PATH]
    os.environ.pop("LD_PRELOAD", None)  # children get it all the same
    if others:
        os.environ["LD_PRELOAD"] = ":".join(others)


def _check(result: int, path: str = "") -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result), path or None)
    return result


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """In here this thread's calls reach the files as they really are."""
    calls = _calls()
    if calls is not None:
        calls.oars_files_plain(1)
    try:
        yield
    finally:
        if calls is not None:
            calls.oars_files_plain(-1)


def is_voice() -> bool:
    """Whether this process's files are the run's."""
    return _calls() is not None and _calls().oars_files_side() == 1


def has_children() -> bool:
    """Whether other processes of this rank may have files open."""
    return bool(_calls().oars_files_children())


def changes() -> int:
    """Grows when this thread makes a file, changes one that it has not changed before, or removes one."""
    calls = _calls()
    return calls.oars_files_changes() if calls is not None else 0


def find(path: str, follow: bool = True) -> tuple[str, str, int]:
    """The canonical name of ``path``, the real place that stands for it (none if it is ABSENT), and what it is."""
    room = _calls().oars_files_room()
    where, target = ctypes.create_string_buffer(room), ctypes.create_string_buffer(room)
    state = _calls().oars_files_find(os.fsencode(path), int(follow), where, target)
    if state < 0 or state == ABSENT:
        return path if state < 0 else os.fsdecode(where.value), "", ABSENT
    return os.fsdecode(where.value), os.fsdecode(target.value), state


def mark(path: str, state: int) -> None:
    """Write down that ``path`` is one of HERE, NEW, GONE, or (0) none of these any more."""
    _check(_calls().oars_files_mark(os.fsencode(path), state), path)


def promise(path: str, in_place: bool) -> None:
    """``path`` changes next: keep what stands there; ``in_place``: it will not get a new inode."""
    _check(_calls().oars_files_promise(os.fsencode(path), int(in_place)), path)


def speak() -> None:
    """Tell what is left of the voice before that this rank speaks, and wait until it has ended its changes."""
    _check(_calls().oars_files_speak())


def become_voice() -> None:
    """What is real is what this process sees from here on, and so its children."""
    _check(_calls().oars_files_become_voice())


@contextlib.contextmanager
def alone(seconds: float = 10) -> Iterator[None]:
    """No other thread and no child changes files in here; who does not leave in time hangs, and is not waited for."""
    waiting = ctypes.CDLL(None)  # without the interpreter's lock: another thread may need it to leave
    waiting.oars_files_alone.argtypes = [ctypes.c_double]
    waiting.oars_files_alone(seconds)
    try:
        with plain():
            yield
    finally:
        _calls().oars_files_open()


# ---- the logs that the library keeps (native/tables.c) ----


def lines(path: str) -> Iterator[tuple[str, str, str]]:
    """Tag, name of the kept original (or length) and path of every whole line of a log."""
    with plain(), open(path, "rb") as log:
        data = log.read()
    for line in data.split(b"\n"):
        if line.endswith(b";"):
            tag, _, rest = line[:-1].partition(b" ")
            kept = b""
            if tag in (b"f", b"d", b"l", b"a"):
                kept, _, rest = rest.partition(b" ")
            yield tag.decode(), os.fsdecode(kept), os.fsdecode(urllib.parse.unquote_to_bytes(rest))


def before(shared: str) -> dict[str, str | None]:
    """What the voices have changed: path -> the name of what was there in ``kept``, None for nothing."""
    found: dict[str, str | None] = {}
    for tag, kept, path in lines(shared + "/ledger"):
        if tag in "-fdl":
            found.setdefault(path, None if tag == "-" else kept)
    return found


def made(shared: str) -> tuple[set[str], dict[str, int]]:
    """What the run has made that was not there before; the files that it appends to, and how long they were before."""
    made: set[str] = set()
    appended: dict[str, int] = {}
    for tag, length, path in lines(shared + "/ledger"):
        if tag == "-":
            made.add(path)
        elif tag == "a":
            appended.setdefault(path, int(length))
    return made, appended


def mine(root: str) -> dict[str, int]:
    """What this rank has made (HERE, NEW) or removed (GONE) in its own view."""
    found: dict[str, int] = {}
    for tag, _, path in lines(root + "/journal"):
        if tag in "HNG":
            found[path] = {"H": HERE, "N": NEW, "G": GONE}[tag]
        elif tag == "F":
            found.pop(path, None)
    return found
