"""View: what a rank that is not the voice finds when it looks at a path.

The file system as it was for the run (the real one, with the voice's changes undone by its ledger), and over it
this rank's own changes, which live in a mirror tree: what the script knows as ``/a/b`` is ``<overlay>/tree/a/b``.

``find`` turns any path into its canonical name and the place in the real file system that stands for it:

- ``THROUGH``: devices, caches, the run folder: real for everyone;
- ``LOWER``: untouched by anyone, the real path itself;
- ``KEPT``: changed or removed by the voice, the original it kept;
- ``HERE``: a file or link of this rank's, in the mirror;
- ``NEW``: a folder of this rank's, in the mirror, with nothing real below it;
- ``PURE``: anything inside such a folder, where the mirror alone counts and nothing is written down;
- ``ABSENT``: removed by this rank, or made by the voice.

The voice may act at any moment, so a look is: act on the place found, then ask whether the ledger grew, and if so
look again. The voice writes its line before it changes anything, hence what was seen before the ledger grew is good.

When this rank becomes the voice itself (``promotion.py``) its view is what is real; processes forked from it learn that
from the journal.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from time import time
from typing import Any

from oars.adapt.files import real
from oars.adapt.files.ledger import Gate, Ledger
from oars.adapt.files.voice import Voice

THROUGH, LOWER, KEPT, HERE, NEW, PURE, ABSENT, GONE, TEMPORARY = range(9)
Place = tuple[str, str, int]  # canonical name, place in the real file system, state

_REAL = (THROUGH, TEMPORARY)
_SAME = object()
_NOTHING: dict[str, Any] = {}
_ISLNK = stat.S_IFLNK


class View:
    """This rank's picture of the file system. ``root`` is its overlay folder, ``token`` its name as a voice."""

    voice: Voice | None = None  # once this rank is the voice
    speaker = ""  # the token of the last rank that became the voice

    def __init__(
        self, token: str, root: str, shared_dir: str, ledger: Ledger, through: list[str],
        promoted: Callable[[], None],
    ) -> None:  # fmt: skip
        self.token = token
        self.shared_dir = shared_dir
        self.start = time()
        self._promoted = promoted  # called in a forked child when the rank has become the voice
        self.root = root
        self.tree = root + "/tree"
        self.through = tuple(through)
        self._kept = shared_dir + "/kept/"
        self.ledger = ledger
        self._journal = Ledger(root + "/journal")
        self._journal.hold()
        self.gate = Gate(root + "/gate", self.news)
        self.pid = os.getpid()
        self._before: dict[str, dict[str, str | None]] = {}  # folder -> name -> kept original, None: was not there
        self._mine: dict[str, dict[str, int]] = {}  # folder -> name -> HERE, NEW, GONE, THROUGH, TEMPORARY
        self._places: dict[str, tuple[int, str]] = {}  # folder as the script writes it -> state, canonical name
        for folder in through:
            self._set(folder.rstrip("/"), THROUGH)
        self._cwd = real.getcwd()
        real.mkdir(self.tree)
        real.close(real.open(root + "/file", os.O_CREAT | os.O_WRONLY, 0o600))  # what is below it is "not a directory"
        os.register_at_fork(before=self._before_fork)

    # -- looking -------------------------------------------------------------------------------------------------

    def seen(self, act: Callable[..., Any], path: Any, follow: bool, *args: Any, **kw: Any) -> Any:
        """``act(place of path, ...)``, an action that only looks."""
        while True:
            try:
                result = act(self.find(path, follow)[1], *args, **kw)
            except OSError as error:
                if not self.news():
                    error.filename = os.fspath(path)
                    raise
            else:
                if not self.news():
                    return result

    def open_seen(self, path: Any, flags: int, mode: int = 0o777, follow: bool = True) -> int:
        """A descriptor of the file this rank finds at ``path``, for reading."""
        while True:
            try:
                fd = real.open(self.find(path, follow)[1], flags, mode)
            except OSError as error:
                if not self.news():
                    error.filename = os.fspath(path)
                    raise
            else:
                if not self.news():
                    return fd
                real.close(fd)

    def settled(self, path: Any, follow: bool) -> tuple[Place, os.stat_result | None]:
        """Where ``path`` is and what is there (None: nothing)."""
        while True:
            place = self.find(path, follow)
            try:
                there = real.lstat(place[1])
            except (FileNotFoundError, NotADirectoryError):
                there = None
            if not self.news():
                return place, there

    def names(self, path: Any) -> dict[str, os.DirEntry[str] | None]:
        """What a folder holds for this rank, each name with the real entry behind it where there is one."""
        while True:
            where, target, state = self.find(path)
            try:
                with real.scandir(target) as entries:
                    found: dict[str, os.DirEntry[str] | None] = {entry.name: entry for entry in entries}
            except OSError as error:
                if not self.news():
                    error.filename = os.fspath(path)
                    raise
                continue
            if state in (LOWER, KEPT):
                self._merge(where.rstrip("/"), state, found)
            if not self.news():
                return found if state not in (NEW, PURE) else dict(sorted(found.items()))

    def _merge(self, where: str, state: int, found: dict[str, os.DirEntry[str] | None]) -> None:
        """Undo the voice's changes in the folder ``where`` and apply our own."""
        if state == KEPT:  # the kept folder is empty; whatever of the real one is left and not written down is original
            try:
                found.update({name: None for name in real.listdir(where or "/")})
            except OSError:
                pass
        for name, kept in self._before.get(where, _NOTHING).items():
            if kept is None:
                found.pop(name, None)
            else:
                found[name] = None
        for name, own in sorted(self._mine.get(where, _NOTHING).items()):  # in the voice's order (``Voice.listed``)
            if own == GONE:
                found.pop(name, None)
            elif own not in _REAL:
                found[name] = None

    # -- finding -------------------------------------------------------------------------------------------------

    def find(self, path: Any, follow: bool = True, hops: int = 0) -> Place:
        """Canonical name, place and state of ``path``; a symbolic link at its end is followed if ``follow``."""
        name = path if type(path) is str else os.fsdecode(path)
        cut = name.rfind("/") + 1
        tail = name[cut:]
        if tail == "" or tail == "." or tail == "..":
            return self._find_folder(name[:cut], tail, hops)
        head = name[:cut]
        folder = self._places.get(head)
        if folder is None:
            folder = self._enter(head, hops)
        kind, where = folder
        full = where + "/" + tail
        if kind == LOWER:
            target, state = full, LOWER
            own = self._mine.get(where, _NOTHING).get(tail)
            if own is not None:
                if own in _REAL:
                    return full, full, THROUGH
                target, state = (self.root + "/absent", ABSENT) if own == GONE else (self.tree + full, own)
            else:
                kept = self._before.get(where, _NOTHING).get(tail, _SAME)
                if kept is None:
                    return full, self.root + "/absent", ABSENT
                if kept is not _SAME:
                    target, state = self._kept + kept, KEPT
        elif kind == PURE:
            target, state = self.tree + full, PURE
        elif kind == THROUGH:
            return full, full, THROUGH
        else:
            return full, where + "/x", ABSENT  # where: a place below which nothing can be
        if follow:
            try:
                if real.lstat(target).st_mode & 0o170000 == _ISLNK:
                    return self._chase(path, where, target, hops)
            except OSError:
                pass
        return full, target, state

    def _chase(self, path: Any, where: str, target: str, hops: int) -> Place:
        if hops > 40:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        link = real.readlink(target)
        return self.find(link if link.startswith("/") else f"{where}/{link}", True, hops + 1)

    def _find_folder(self, head: str, tail: str, hops: int) -> Place:
        """``find`` for names that end in ``/``, ``.`` or ``..``."""
        if not head and not tail:
            return "", self.root + "/absent", ABSENT
        kind, where = self._places.get(head) or self._enter(head, hops)
        if kind == ABSENT:
            return where, where, ABSENT
        if tail == "..":
            where = os.path.dirname(where)
        if not where:
            return "/", "/", LOWER
        return self.find(where, True, hops + 1) if kind != THROUGH or tail == ".." else (where, where, THROUGH)

    def _enter(self, head: str, hops: int) -> tuple[int, str]:
        """State and canonical name of a folder: ``head`` is empty (the working folder) or ends in a slash."""
        stripped = head.rstrip("/")
        if head.startswith(self.through):
            place = THROUGH, stripped
        elif not stripped and head:
            place = LOWER, ""
        else:
            full, target, state = self.find(stripped or self._cwd, True, hops + 1)
            full = full.rstrip("/")
            if state == THROUGH or (full + "/").startswith(self.through):
                place = THROUGH, full
            elif state == ABSENT:
                place = ABSENT, target
            elif state == HERE:
                place = ABSENT, self.root + "/file"
            elif state == NEW or state == PURE:
                place = PURE, full
            elif state == KEPT and not os.path.isdir(target):
                place = ABSENT, self.root + "/file"
            else:
                place = LOWER, full
        if len(self._places) > 20000:
            self._places.clear()
        self._places[head] = place
        return place

    # -- the working folder ----------------------------------------------------------------------------------------

    def chdir(self, path: Any) -> None:
        """Go to a folder, which may exist in the overlay alone."""
        if isinstance(path, int):
            real.fchdir(path)
            self._cwd = real.getcwd().removeprefix(self.tree) or "/"
        else:
            where, target, _ = self.find(path)
            self.seen(real.chdir, path, True)
            self._cwd = where if target != where else real.getcwd()
        self._places.clear()

    def getcwd(self) -> str:
        """The working folder, as the script knows it."""
        return self._cwd

    # -- news ------------------------------------------------------------------------------------------------------

    def news(self) -> bool:
        """Take in what the voice (or a process forked from this rank) has written down since; was there anything?"""
        if self.voice is not None:
            return False
        grew = False
        if self.ledger.grew():
            for path, kept in self.ledger.read():
                if not path:
                    self.speaker = kept
                    continue
                folder, _, name = path.rpartition("/")
                self._before.setdefault(folder, {}).setdefault(name, kept)
                grew = True
        if self.gate.forked and self._journal.grew():
            for path, own in self._journal.read():
                if path:
                    self._set(path, own)
                else:
                    self._promoted()
                grew = True
        if grew:
            self._places.clear()
        return grew

    def mark(self, where: str, own: int | None) -> None:
        """Write down that this rank made (``HERE``, ``NEW``) or removed (``GONE``) ``where``; None forgets it."""
        self._set(where, own)
        self._journal.append([where, own])

    def _set(self, where: str, own: int | None) -> None:
        folder, _, name = where.rpartition("/")
        if own is None:
            self._mine.get(folder, {}).pop(name, None)
        else:
            self._mine.setdefault(folder, {})[name] = own
        self._places.clear()

    def temporaries(self) -> list[str]:
        """The real files and folders that this rank has made for itself (``tempfile``)."""
        every = ((f"{folder}/{name}", own) for folder, names in self._mine.items() for name, own in names.items())
        return [path for path, own in every if own == TEMPORARY]

    def touched(self) -> set[str]:
        """Every path that the voice or this rank has changed, and all that is in the mirror."""
        paths = {f"{folder}/{name}" for folder, names in self._before.items() for name in names}
        for folder, names in self._mine.items():
            paths.update(f"{folder}/{name}" for name, own in names.items() if own not in _REAL)
        shells = [self.tree]
        while shells:
            with real.scandir(shells.pop()) as entries:
                for entry in entries:
                    paths.add(entry.path[len(self.tree) :])
                    if entry.is_dir(follow_symlinks=False):
                        shells.append(entry.path)
        return paths

    def kept(self, path: str) -> str | None:
        """Under which name the voice kept what was at ``path``, empty if nothing was; None: it has not changed it."""
        folder, _, name = path.rpartition("/")
        names = self._before.get(folder, _NOTHING)
        return (names[name] or "") if name in names else None

    def voice_to_be(self) -> Voice:
        """The voice that goes on where the one whose ledger this is has stopped."""
        self.news()
        voice = Voice(self.token, self.shared_dir, self.ledger, self.through, self.pid)
        voice.succeed({f"{folder}/{name}": kept is not None for folder, names in self._before.items()
                       for name, kept in names.items()})
        return voice

    def act_as(self, voice: Voice) -> None:
        """See what is real from here on, in the working folder too; children hear of it."""
        if os.getpid() == self.pid:
            self._journal.append(["", None])
        self.voice = voice
        for table in (self._before, self._mine, self._places):
            table.clear()
        try:
            real.chdir(self._cwd)
        except OSError:  # this rank has removed it: it stays nowhere
            pass

    def _before_fork(self) -> None:
        # Alone, a process knows its own journal; from its first fork on it must follow it.
        if not self.gate.forked:
            self._journal.skip()
            self.gate.forked = True


class Entry:
    """What ``os.scandir`` gives: like ``os.DirEntry``, but it answers for this rank."""

    __slots__ = ("name", "path", "_real")

    def __init__(self, name: Any, path: Any, behind: os.DirEntry[str] | None) -> None:
        self.name = name
        self.path = path
        self._real = behind

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self.path).st_ino

    def is_symlink(self) -> bool:
        return self._real.is_symlink() if self._real else os.path.islink(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: int, follow: bool) -> bool:
        if self._real and not self._real.is_symlink():  # known without asking the file system again
            check = self._real.is_dir if kind == stat.S_IFDIR else self._real.is_file
            return check(follow_symlinks=False)
        try:
            return stat.S_IFMT(self.stat(follow_symlinks=follow).st_mode) == kind
        except OSError:
            return False


class Entries:
    """The iterator and context manager that ``os.scandir`` returns."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
