"""The voice's side: before it changes a path for the first time, it writes down what the path was.

One line per path goes into the ledger, before the change: ``[path, null]`` when there was nothing, else
``[path, name]`` with the original kept as ``<shared_dir>/kept/<name>`` (a file, an empty folder with the same
mode, or a symbolic link). The other ranks put these originals over what they find.

A kept file is a hard link to the old inode where possible, and the voice goes on with a fresh inode put in its
place: nothing is copied for ``open(path, 'w')``, and a slower rank that has the old file open reads on undisturbed.
On another file system than the shared folder's the original is copied. Files of other owners or with several names
are copied and changed in place, their ``name`` ends in ``~``; above ``LIMIT`` bytes a file that would have to be
copied is changed without being kept.

A line ``["", token]`` says that the voice has died and another rank speaks. What is left of the dead one (its loader
workers live on for seconds; or it was only stopped, and wakes) reads it before its next change, and ends. A worker
reads it and makes its change in one turn (``turn``), and the new voice waits for turns that have begun.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from oars.adapt.files import real
from oars.adapt.files.ledger import Gate, Ledger

LIMIT = 1 << 30  # bytes: what we are willing to copy of a file about to be changed

_numbers = itertools.count()
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ALWAYS = nullcontext()


class Voice:
    """Keeps the originals of what this rank, the process ``pid`` and its forks, is about to change: called before."""

    def __init__(self, token: str, shared_dir: str, ledger: Ledger, through: tuple[str, ...], pid: int) -> None:
        self._token = token
        self._kept = shared_dir + "/kept"
        self._ledger = ledger
        self._through = through
        self._seen: dict[str, bool] = {}  # what the run has changed -> whether it was there before
        self._linked: set[tuple[int, int]] = set()  # inodes that live in kept/ too
        self._real_dirs: dict[str, str] = {}
        self._pid = pid
        real.makedirs(self._kept, exist_ok=True)
        self._gate = Gate(shared_dir + "/gate", self._heed, forked=True)

    def succeed(self, seen: Mapping[str, bool]) -> None:
        """Go on where another voice stopped, which had written down the paths ``seen``, and which were there before."""
        self._seen.update(seen)
        with real.scandir(self._kept) as kept:
            self._linked.update((there.st_dev, there.st_ino) for there in (_lstat(e.path) for e in kept) if there)

    def listed(self, path: Any, names: list[str]) -> list[str]:
        """What a folder holds, in the order in which other ranks list it: what was there before the run as the file
        system has it, then by name what the run has made. Where that lies in a folder is chance."""
        self._heed()
        folder = real.realpath(os.fsdecode(path)).rstrip("/")
        if not self._seen or (folder + "/").startswith(self._through):
            return names
        if any(folder[:end] in self._seen for end in (*_slashes(folder), len(folder))):
            return sorted(names)
        return sorted(names, key=lambda name: "" if self._seen.get(f"{folder}/{name}", True) else name)

    def opening(self, path: Any, flags: int) -> None:
        """``os.open(path, flags)`` comes next; nothing to do unless it may write."""
        if flags & _WRITING:
            exclusive = bool(flags & os.O_CREAT and flags & os.O_EXCL)
            self.writing(path, bool(flags & os.O_TRUNC), flags & os.O_CREAT, exclusive)

    def writing(self, path: Any, empty: bool, create: int = 1, exclusive: bool = False) -> None:
        """The contents of the file ``path`` change next; ``empty``: its old contents are thrown away first."""
        where = self._canonical(path, follow=not exclusive)
        if where is None:
            return
        was = _lstat(where)
        if was is None:
            if create:
                self._note(where, None)
        elif stat.S_ISREG(was.st_mode) and not exclusive:
            known = self._known(where)
            if known and (was.st_dev, was.st_ino) not in self._linked:
                return
            if real.access(where, os.W_OK, effective_ids=True):
                self._keep_contents(where, was, empty, known)

    def making(self, path: Any) -> None:
        """Something that is not there yet (a folder, a link) appears at ``path`` next."""
        where = self._changeable(path)
        if where is not None and _lstat(where) is None:
            self._note(where, None)
            self._real_dirs.clear()

    def removing(self, path: Any) -> None:
        """The name ``path`` goes next: a file, a link or an empty folder."""
        where = self._changeable(path)
        if where is not None:
            was = _lstat(where)
            if was is not None and (not stat.S_ISDIR(was.st_mode) or _names(where) == []):
                self._keep_name(where, was)
            self._real_dirs.clear()

    def renaming(self, source: Any, target: Any) -> None:
        """``os.rename(source, target)`` comes next."""
        old, new = self._changeable(source), self._changeable(target)
        was = _lstat(os.fsdecode(source))
        if old is not None and was is not None:
            self._keep_tree(old, was)
        if new is not None:
            there = _lstat(new)
            if there is None:
                self._note(new, None)
            elif not stat.S_ISDIR(there.st_mode) or was is not None and stat.S_ISDIR(was.st_mode):
                self._keep_name(new, there)
            if was is not None and stat.S_ISDIR(was.st_mode) and (there is None or stat.S_ISDIR(there.st_mode)):
                self._note_all([(new + inner, None) for inner in _below(os.fsdecode(source))])
        self._real_dirs.clear()

    def promise(self, paths: Mapping[str, os.stat_result | None], in_place: Container[str]) -> None:
        """All of ``paths``, each with what stands there, change next, those ``in_place`` without a new inode."""
        notes: list[tuple[str, str | None]] = []
        for where, was in paths.items():
            if was is None:
                notes.append((where, None))
            elif not self._known(where) and (name := self._keep(where, was, where in in_place)) is not None:
                notes.append((where, name))
        self._note_all(notes)

    def stays(self, where: str, was: os.stat_result, kept: str | None) -> bool:
        """Whether the file at ``where`` must keep its inode; ``kept``: its original's name if the run changed it."""
        if kept is None:
            several = was.st_nlink > 1 and (was.st_dev, was.st_ino) not in self._linked
        else:
            several = was.st_nlink > 1 and kept.endswith("~")
        return several or was.st_uid != os.geteuid() or not _may_change_names(where)

    def beside(self, folder: str, where: str) -> str:
        """A name in ``folder`` for what will be moved to ``where`` once it is complete."""
        return f"{folder}/.{os.path.basename(where)[:200]}.oars-{self._new_name()}"

    def turn(self) -> AbstractContextManager[None]:
        """Around a change and what is called before it. The rank itself needs none: the next voice comes at its end."""
        return _ALWAYS if os.getpid() == self._pid else self._gate

    def speak(self) -> None:
        """Tell what is left of the voice before that this one speaks, and let it end."""
        self._ledger.append(["", self._token])
        with self._gate.alone():
            pass

    def _changeable(self, path: Any) -> str | None:
        """The canonical name of ``path``; None if we may not change names in its folder: nothing will happen then."""
        where = self._canonical(path, follow=False)
        return where if where is not None and _may_change_names(where) else None

    def _canonical(self, path: Any, follow: bool) -> str | None:
        """``path`` without symbolic links on its way (and at its end, if ``follow``); None if it is not watched."""
        if isinstance(path, int):
            return None
        name = os.fsdecode(path)
        if not name or "\0" in name:
            return None
        head, tail = os.path.split(name.rstrip("/") or "/")
        if tail in ("", ".", ".."):
            return None
        directory = self._real_dirs.get(head) if head[:1] == "/" else None
        if directory is None:
            directory = self._real_dirs[head] = real.realpath(head or ".").rstrip("/")
        where = directory + "/" + tail
        if follow and os.path.islink(where):
            where = real.realpath(where)
        return None if (where + "/").startswith(self._through) else where

    def _known(self, where: str) -> bool:
        self._heed()
        return where in self._seen

    def _heed(self) -> None:
        if self._ledger.grew():  # a forked child of this rank writes here too
            for path, kept in self._ledger.read():
                if path:
                    self._seen.setdefault(path, kept is not None)
                elif kept != self._token:
                    self._end()

    def _end(self) -> None:
        if os.getpid() == self._pid:
            real.write(2, b"oars: this rank was taken for dead and another writes the run's files: it ends here\n")
        real._exit(1)

    def _note(self, where: str, kept: str | None) -> None:
        self._note_all([(where, kept)])

    def _note_all(self, notes: list[tuple[str, str | None]]) -> None:
        notes = [(where, kept) for where, kept in notes if not self._known(where)]
        if notes:
            self._ledger.append(*notes)
            self._seen.update((where, kept is not None) for where, kept in notes)

    def _new_name(self) -> str:
        return f"{self._token}-{os.getpid()}-{next(_numbers)}"

    def _keep_contents(self, where: str, was: os.stat_result, empty: bool, known: bool) -> None:
        """Keep a regular file that is about to be written, by giving the writer a fresh inode where we can."""
        swap = (
            (was.st_nlink == 1 or known)
            and was.st_uid == os.geteuid()
            and _may_change_names(where)
            and (empty or was.st_size <= LIMIT)
        )
        if not known:
            name = self._keep(where, was, in_place=not swap)
            if name is None:
                return
            self._note(where, name)
        if swap:
            fresh = self.beside(os.path.dirname(where), where)
            self._note(fresh, None)
            source = real.open(where, os.O_RDONLY | os.O_CLOEXEC)
            try:
                real.copy_file(source, fresh, empty)
                if was.st_gid != os.getegid():
                    real.chown(fresh, -1, was.st_gid)
                    real.chmod(fresh, stat.S_IMODE(was.st_mode))
            finally:
                real.close(source)
            real.rename(fresh, where)

    def _keep_name(self, where: str, was: os.stat_result) -> None:
        """Keep what stands at a name that is about to go."""
        if not self._known(where) and (name := self._keep(where, was)) is not None:
            self._note(where, name)

    def _keep(self, where: str, was: os.stat_result, in_place: bool = False) -> str | None:
        """Put what stands at ``where`` into kept/ and say under which name; None if we will not."""
        name = self._new_name() + ("~" if in_place else "")
        kept = f"{self._kept}/{name}"
        if stat.S_ISDIR(was.st_mode):
            real.mkdir(kept, 0o700)
            real.chmod(kept, stat.S_IMODE(was.st_mode))
            real.utime(kept, ns=(was.st_atime_ns, was.st_mtime_ns))
        elif stat.S_ISLNK(was.st_mode):
            real.symlink(real.readlink(where), kept)
        elif not stat.S_ISREG(was.st_mode):
            return None
        elif in_place or not self._link(where, was, name):
            if was.st_size > LIMIT:
                return None
            self._copy(where, name)
        return name

    def _keep_tree(self, where: str, was: os.stat_result) -> None:
        if self._known(where):
            return
        if stat.S_ISDIR(was.st_mode):
            for name in _names(where) or []:
                self._keep_tree(f"{where}/{name}", real.lstat(f"{where}/{name}"))
        self._keep_name(where, was)

    def _link(self, where: str, was: os.stat_result, name: str) -> bool:
        try:
            real.link(where, f"{self._kept}/{name}", follow_symlinks=False)
        except OSError:  # another file system, or one without links
            return False
        self._linked.add((was.st_dev, was.st_ino))
        return True

    def _copy(self, where: str, name: str) -> None:
        source = real.open(where, os.O_RDONLY | os.O_CLOEXEC)
        try:
            real.copy_file(source, f"{self._kept}/{name}")
        finally:
            real.close(source)


def _may_change_names(where: str) -> bool:
    return real.access(os.path.dirname(where) or "/", os.W_OK | os.X_OK, effective_ids=True)


def _names(folder: str) -> list[str] | None:
    """What is in a folder; None if we may not look (then the change that comes next fails too)."""
    try:
        return real.listdir(folder)
    except OSError:
        return None


def _below(folder: str) -> Iterator[str]:
    """The names of all that is in a folder and its folders, each with a slash before it."""
    for name in _names(folder) or []:
        yield "/" + name
        was = _lstat(f"{folder}/{name}")
        if was is not None and stat.S_ISDIR(was.st_mode):
            yield from (f"/{name}{inner}" for inner in _below(f"{folder}/{name}"))


def _lstat(path: str) -> os.stat_result | None:
    try:
        return real.lstat(path)
    except OSError:
        return None


def _slashes(path: str) -> list[int]:
    return [i for i, letter in enumerate(path) if letter == "/"]
