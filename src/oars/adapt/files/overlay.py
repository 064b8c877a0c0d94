"""Overlay: how a rank that is not the voice changes files: in its mirror tree, with the errors one process would get.

A file that exists is copied up before it is changed (not if it is truncated anyway); a name that goes is marked
``GONE``; a new folder is ``NEW`` and from then on plain, since nothing real is below it. Permission is asked of
the real parent, so that what fails for the voice fails here.

Mode and times of folders that were there before the run are not tracked. The mirror tree and the journal of HERE,
NEW and GONE are all that making a survivor's overlay real (``promotion.py``) needs.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Any

from oars.adapt.files import real
from oars.adapt.files.view import ABSENT, GONE, HERE, KEPT, LOWER, NEW, PURE, THROUGH, View

_OWN = (THROUGH, HERE, NEW, PURE)  # places that can be changed as they are


def _fail(number: int, *paths: Any) -> OSError:
    if len(paths) == 2:
        return OSError(number, os.strerror(number), os.fspath(paths[0]), None, os.fspath(paths[1]))
    return OSError(number, os.strerror(number), os.fspath(paths[0]))


class Overlay(View):
    """The file functions of a rank whose files are not the run's."""

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """``os.open`` with flags that may write."""
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        (where, target, state), there = self.settled(path, follow=not (exclusive or flags & os.O_NOFOLLOW))
        try:
            if flags & os.O_TMPFILE == os.O_TMPFILE:  # a file without a name, in the folder ``path``
                return real.open(self.root if there else target, flags, mode)
            if state in _OWN:
                return real.open(target, flags, mode)
            if there is None and not flags & os.O_CREAT:
                return real.open(target, flags)
            if there is not None and (exclusive or not stat.S_ISREG(there.st_mode)):
                return real.open(target, flags, mode)  # fails as it must, or is a pipe or a device
            if there is None:
                self._room(where)
            else:
                self._permit(target, os.W_OK)
                self._lift(where, empty=bool(flags & os.O_TRUNC))
            fd = real.open(self.tree + where, flags, mode)
        except OSError as error:
            raise self._named(error, path) from None
        self.mark(where, HERE)
        return fd

    def to_write(self, path: Any, empty: bool) -> str:
        """A real path for code that opens ``path`` for writing where we cannot see it (C++): the mirror's file."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0)
        real.close(self.open(path, flags, 0o666))
        return self.find(path)[1]

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        (where, target, state), there = self.settled(os.fsdecode(path).rstrip("/") or "/", follow=False)
        try:
            if there is not None or state in (THROUGH, PURE):
                return real.mkdir(target, mode)
            self._room(where)
            real.mkdir(self.tree + where, mode)
        except OSError as error:
            raise self._named(error, path) from None
        self.mark(where, NEW)

    def rmdir(self, path: Any) -> None:
        (where, target, state), there = self.settled(path, follow=False)
        try:
            if there is not None and state not in (THROUGH, PURE):
                self._permit_names(where)
            if there is None or not stat.S_ISDIR(there.st_mode) or state in _OWN:
                real.rmdir(target)
                self._places.clear()
            elif self.names(where):
                raise _fail(errno.ENOTEMPTY, path)
        except OSError as error:
            raise self._named(error, path) from None
        if state not in (THROUGH, PURE):
            self._forget(where)

    def unlink(self, path: Any) -> None:
        (where, target, state), there = self.settled(path, follow=False)
        try:
            if there is not None and state not in (THROUGH, PURE):
                self._permit_names(where)
            if there is None or stat.S_ISDIR(there.st_mode) or state in _OWN:
                real.unlink(target)
                self._places.clear()
        except OSError as error:
            raise self._named(error, path) from None
        if state not in (THROUGH, PURE):
            self._forget(where)

    def rename(self, source: Any, target: Any) -> None:
        """``os.rename`` and ``os.replace``: the source is copied up whole, then moved inside the mirror."""
        (old, old_at, old_state), was = self.settled(source, follow=False)
        (new, new_at, new_state), there = self.settled(target, follow=False)
        try:
            if was is None:
                raise _fail(errno.ENOENT, source)
            if old == new:
                return
            folder = stat.S_ISDIR(was.st_mode)
            if folder and (new + "/").startswith(old + "/"):
                raise _fail(errno.EINVAL, source)
            if there is not None and new_state in (LOWER, KEPT):  # the mirror cannot tell, so we do
                if stat.S_ISDIR(there.st_mode) != folder:
                    raise _fail(errno.ENOTDIR if folder else errno.EISDIR, source)
                if folder and self.names(new):
                    raise _fail(errno.ENOTEMPTY, source)
            if old_state not in (THROUGH, PURE):
                self._permit_names(old)
            if new_state not in (THROUGH, PURE):
                self._room(new)
            if old_state in (LOWER, KEPT):
                self._lift_tree(old) if folder else self._lift(old)
                old_at = self.tree + old
            if new_state in (LOWER, KEPT, ABSENT):
                new_at = self.tree + new
            _move(old_at, new_at)
        except OSError as error:
            raise self._named(error, source, target) from None
        if new_state not in (THROUGH, PURE):
            self.mark(new, NEW if folder else HERE)
        if old_state not in (THROUGH, PURE):
            self._forget(old)
        self._places.clear()

    def link(self, source: Any, target: Any, *, follow_symlinks: bool = True) -> None:
        self._appear(target, lambda at: real.link(self._own(source, follow_symlinks, ""), at), source)

    def symlink(self, source: Any, target: Any, target_is_directory: bool = False) -> None:
        self._appear(target, lambda at: real.symlink(source, at), source)

    def _appear(self, path: Any, make: Callable[[str], None], source: Any) -> None:
        (where, target, state), there = self.settled(path, follow=False)
        try:
            if there is None and state not in (THROUGH, PURE):
                self._room(where)
                target = self.tree + where
            make(target)
        except OSError as error:
            raise self._named(error, source, path) from None
        if state not in (THROUGH, PURE):
            self.mark(where, HERE)
        self._places.clear()

    def adjust(self, act: Callable[..., Any], path: Any, *args: Any, **kw: Any) -> Any:
        """``act`` (chmod, utime, chown, truncate, ...) on a file of this rank's own, copied up if need be."""
        follow = kw.get("follow_symlinks", True)
        try:
            return act(self._own(path, follow, "write" if act is real.truncate else "owner"), *args, **kw)
        except OSError as error:
            raise self._named(error, path) from None

    def adopt(self) -> None:
        """This rank joins a run that is going: what the voice has made of files so far is taken for its own doing."""
        self.news()
        for path in sorted(f"{folder}/{name}" for folder, names in self._before.items() for name in names):
            if self.find(path, follow=False)[2] != PURE:  # else it came with its folder
                self._adopt(path)

    def keep(self, yes: bool = True) -> None:
        """Let the overlay outlive this process, or no longer."""
        try:
            real.symlink("journal", self.root + "/keep") if yes else real.unlink(self.root + "/keep")
        except OSError:
            pass

    # -- inside ------------------------------------------------------------------------------------------------------

    def _adopt(self, where: str) -> None:
        """Have here what really stands at ``where``, in a file that is already here and open in place."""
        place = self.tree + where
        try:
            there = real.lstat(where)
        except OSError:
            self._forget(where)
            return
        real.makedirs(os.path.dirname(place), exist_ok=True)
        if stat.S_ISDIR(there.st_mode):
            real.makedirs(place, exist_ok=True)
            for name in real.listdir(where):
                self._adopt(f"{where}/{name}")
            self.mark(where, NEW)
            return
        if stat.S_ISLNK(there.st_mode):
            real.symlink(real.readlink(where), place)
        elif stat.S_ISREG(there.st_mode):
            source = real.open(where, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.path.lexists(place):
                    target = real.open(place, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
                    try:
                        real.copy_contents(source, target)
                    finally:
                        real.close(target)
                else:
                    real.copy_file(source, place)
            finally:
                real.close(source)
        self.mark(where, HERE)

    def _own(self, path: Any, follow: bool, right: str) -> str:
        """The place of ``path``, once it is one that we may change; ``right``: the permission to ask for, if any."""
        (where, target, state), there = self.settled(path, follow)
        if there is None or state in _OWN:
            return target
        if stat.S_ISDIR(there.st_mode):
            return self._stand_in(where, there) if right == "owner" else target
        if right == "owner" and there.st_uid != os.geteuid() and os.geteuid() != 0:
            raise _fail(errno.EPERM, path)
        if right == "write":
            self._permit(target, os.W_OK)
        self._lift(where)
        return self.tree + where

    def _stand_in(self, where: str, there: os.stat_result) -> str:
        """A folder that takes a change of mode or times for one that was there before the run."""
        if there.st_uid != os.geteuid() and os.geteuid() != 0:
            raise _fail(errno.EPERM, where)
        stand_in = self.root + "/folder"
        real.makedirs(stand_in, exist_ok=True)
        return stand_in

    def _permit(self, place: str, wanted: int) -> None:
        """Raise what the kernel would if this process may not do ``wanted`` at ``place``."""
        if not real.access(place, wanted, effective_ids=True):
            read_only = os.path.exists(place) and real.statvfs(place).f_flag & os.ST_RDONLY
            raise _fail(errno.EROFS if read_only else errno.EACCES, place)

    def _permit_names(self, where: str) -> None:
        """Raise what the kernel would if this process may not change the names in the folder of ``where``."""
        self._permit(self.find(os.path.dirname(where) or "/")[1], os.W_OK | os.X_OK)

    def _room(self, where: str) -> None:
        """Make sure that something new can stand at ``where``, in this rank's view and in the mirror."""
        parent = os.path.dirname(where)
        target = self.find(parent or "/")[1]
        if not stat.S_ISDIR(real.stat(target).st_mode):
            raise _fail(errno.ENOTDIR, where)
        self._permit(target, os.W_OK | os.X_OK)
        real.makedirs(self.tree + parent, exist_ok=True)

    def _lift(self, where: str, empty: bool = False) -> None:
        """Copy a file or link up into the mirror and mark it ours."""
        place = self.tree + where
        real.makedirs(os.path.dirname(place), exist_ok=True)
        _, there = self.settled(where, follow=False)
        if there is not None and stat.S_ISLNK(there.st_mode):
            real.symlink(self.seen(real.readlink, where, False), place)
        else:
            source = self.open_seen(where, os.O_RDONLY | os.O_CLOEXEC, follow=False)
            try:
                real.copy_file(source, place, empty)
            except OSError as error:
                try:
                    real.unlink(place)
                except OSError:
                    pass
                raise error
            finally:
                real.close(source)
        self.mark(where, HERE)

    def _lift_tree(self, where: str) -> None:
        """Copy a folder with all that this rank finds in it up into the mirror and mark it ours."""
        _, was = self.settled(where, follow=False)
        real.makedirs(self.tree + where, exist_ok=True)
        for name in self.names(where):
            (inner, _, state), there = self.settled(f"{where}/{name}", follow=False)
            if there is not None and state in (LOWER, KEPT):
                self._lift_tree(inner) if stat.S_ISDIR(there.st_mode) else self._lift(inner)
        if was is not None:
            real.chmod(self.tree + where, stat.S_IMODE(was.st_mode) | stat.S_IRWXU)
        self.mark(where, NEW)

    def _forget(self, where: str) -> None:
        """``where`` is gone from the mirror: hide what may be below it, and drop the mirror's empty shell."""
        self.mark(where, None)
        if self.settled(where, follow=False)[1] is not None:
            self.mark(where, GONE)
        for folder, _, _ in os.walk(self.tree + where, topdown=False):
            real.rmdir(folder)

    def _named(self, error: OSError, *paths: Any) -> OSError:
        """``error`` with the script's own names, or with the overlay's if that is what is full."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return full(error, self.root)
        return _fail(error.errno or errno.EIO, *paths)


def full(error: OSError, root: str) -> OSError:
    """The error of a full disk, telling that it is the overlay's."""
    text = f"{os.strerror(error.errno or 0)} (this rank's private files; set TMPDIR to a larger place)"
    return OSError(error.errno, text, root)


def _move(source: str, target: str) -> None:
    try:
        real.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        fd = real.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.path.lexists(target):
                real.unlink(target)
            real.copy_file(fd, target)
        finally:
            real.close(fd)
        real.unlink(source)
