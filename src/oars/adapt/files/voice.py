"""The voice's side: before it changes a path for the first time, it writes down what the path was.

One line per path goes into the ledger, before the change: ``[path, null]`` when there was nothing, else
``[path, name]`` with the original kept as ``<shared_dir>/kept/<name>`` (a file, an empty folder with the same
mode, or a symbolic link). The other ranks put these originals over what they find.

A kept file is a hard link to the old inode where possible, and the voice goes on with a fresh inode put in its
place: nothing is copied for ``open(path, 'w')``, and a slower rank that has the old file open reads on undisturbed.
Files of other owners, with several names, or on another file system than the shared folder are copied and
changed in place; above ``LIMIT`` bytes such a file is changed without being kept.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from oars.adapt.files import real
from oars.adapt.files.ledger import Ledger

LIMIT = 1 << 30  # bytes: what we are willing to copy of a file about to be changed

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Voice:
    """Keeps the originals of what this rank is about to change. Each method is called before the change."""

    def __init__(self, shared_dir: str, ledger: Ledger, through: list[str]) -> None:
        self._kept = shared_dir + "/kept"
        self._ledger = ledger
        self._through = tuple(through)
        self._seen: set[str] = set()
        self._linked: set[tuple[int, int]] = set()  # inodes that live in kept/ too
        self._real_dirs: dict[str, str] = {}
        self._count = 0
        real.makedirs(self._kept, exist_ok=True)

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
        was = _lstat(old) if old is not None else None
        if old is not None and was is not None:
            self._keep_tree(old, was)
        if new is not None:
            there = _lstat(new)
            if there is None:
                self._note(new, None)
            elif not stat.S_ISDIR(there.st_mode):
                self._keep_name(new, there)
            elif was is not None and old is not None and stat.S_ISDIR(was.st_mode):
                self._keep_name(new, there)
                for name in _names(old) or []:  # the folder stays, what moves into it is new
                    self._note(new + "/" + name, None)
        self._real_dirs.clear()

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
        if self._ledger.grew():  # a forked child of this rank writes here too
            self._seen.update(path for path, _ in self._ledger.read())
        return where in self._seen

    def _note(self, where: str, kept: str | None) -> None:
        if not self._known(where):
            self._ledger.append([where, kept])
            self._seen.add(where)

    def _new_name(self) -> str:
        self._count += 1
        return f"{os.getpid()}-{self._count}"

    def _keep_contents(self, where: str, was: os.stat_result, empty: bool, known: bool) -> None:
        """Keep a regular file that is about to be written, by giving the writer a fresh inode where we can."""
        parent = os.path.dirname(where)
        swap = (
            (was.st_nlink == 1 or known)
            and was.st_uid == os.geteuid()
            and _may_change_names(where)
            and (empty or was.st_size <= LIMIT)
        )
        if not known:
            name = self._new_name()
            if not (swap and self._link(where, was, name)):
                if was.st_size > LIMIT:
                    return
                self._copy(where, name)
            self._note(where, name)
        if swap:
            fresh = f"{parent}/.{os.path.basename(where)[:200]}.oars-{self._new_name()}"
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
        if self._known(where):
            return
        name = self._new_name()
        kept = f"{self._kept}/{name}"
        if stat.S_ISDIR(was.st_mode):
            real.mkdir(kept, 0o700)
            real.chmod(kept, stat.S_IMODE(was.st_mode))
            real.utime(kept, ns=(was.st_atime_ns, was.st_mtime_ns))
        elif stat.S_ISLNK(was.st_mode):
            real.symlink(real.readlink(where), kept)
        elif not stat.S_ISREG(was.st_mode):
            return
        elif not self._link(where, was, name):
            if was.st_size > LIMIT:
                return
            self._copy(where, name)
        self._note(where, name)

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


def _lstat(path: str) -> os.stat_result | None:
    try:
        return real.lstat(path)
    except OSError:
        return None
