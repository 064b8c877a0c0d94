"""Promotion: the voice has died, and what this rank sees becomes real.

The survivor runs the same script, a little behind the dead voice or a little ahead. So whatever the voice or this rank
has changed (ledger, journal, mirror) is made, at its real place, what this rank sees there: its own file, the original
that the voice kept, or nothing. What the voice was writing when it died goes with the rest.

In order, so that a death or a full disk leaves nothing half done that cannot be put right:

1. originals that other survivors still need are kept, and all that will change is written down in the ledger;
2. what is to appear is laid beside its place under a temporary name: a hard link into the mirror, or a complete copy
   on another file system. Until here nothing has changed, and an error takes the temporaries away again;
3. what this rank does not see is removed, folders last;
4. folders are made and the temporaries renamed to their places: a file that both have is there at every moment.

The mirror stays whole all the while. A rank killed in the middle leaves a ledger that tells the next survivor all it
has touched, and the next survivor does the same from its own mirror.

Left alone: what nobody wrote down (other programs' files; a folder that holds one stays), and what is older than the
run although the ledger says that the voice changed it: then the voice was on another host, and it was that host's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from oars.adapt.files import held, real
from oars.adapt.files.overlay import Overlay
from oars.adapt.files.view import ABSENT, KEPT, LOWER, THROUGH
from oars.adapt.files.voice import Voice

SLACK = 60  # seconds by which the clocks of hosts and file servers may differ
LARGE = 1 << 20  # bytes: from here on reading two files is cheaper than writing one safely

_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


class Want(NamedTuple):
    """What is to stand at a path: ``what`` is at ``source``, a place in the mirror or among the kept originals."""

    source: str
    what: os.stat_result

    @property
    def folder(self) -> bool:
        return stat.S_ISDIR(self.what.st_mode)


class Promotion:
    """One attempt to make real what a rank sees. ``run`` raises OSError with the name of the file that cannot be."""

    def __init__(self, overlay: Overlay, voice: Voice) -> None:
        self.overlay, self.voice = overlay, voice
        self._plain: set[str] = set()  # folders that are really there, without links on the way
        self.wanted: dict[str, Want | None] = {}  # every path touched, folders before what is in them; None: nothing
        for path in sorted(overlay.touched()):
            self._want(path)
        self.beside: dict[str, str] = {}  # path -> temporary
        self.in_place: set[str] = set()  # files that must keep their inode
        self.copied: dict[str, Want] = {}
        self.made: dict[str, os.stat_result] = {}  # folders, and what they are to be
        for path, want in self.wanted.items():
            if want and not want.folder:
                there = self._there(path)
                if there is None or (there.st_dev, there.st_ino) != (want.what.st_dev, want.what.st_ino):
                    self._plan(path, want, there)

    def run(self) -> None:
        changing = {path: self._there(path) for path in self.wanted}
        self.voice.promise({p: was for p, was in changing.items() if was or self.wanted[p]}, self.in_place)
        self.voice.promise(dict.fromkeys(self.beside.values()), set())
        try:
            self._lay_beside()
            for path in reversed(self.wanted):  # what is in a folder before the folder
                self._remove(path, self.wanted[path])
            for path, want in self.wanted.items():
                if want:
                    with _naming(path):
                        self._put(path, want)
            for path in reversed(self.made):  # only now: one may be closed to us
                mode = stat.S_IMODE(self.made[path].st_mode)
                real.chmod(path, mode | real.lstat(path).st_mode & stat.S_ISGID)
        except OSError:
            for place in self.beside.values():
                with contextlib.suppress(OSError):
                    real.unlink(place)
            raise

    def catch_up(self) -> None:
        """Add what a loader worker was just writing into a file when it was copied."""
        for path, want in self.copied.items():
            with contextlib.suppress(OSError):
                if real.lstat(want.source).st_size > want.what.st_size:
                    held.catch_up(want.source, path)

    # -- what is wanted ----------------------------------------------------------------------------------------------

    def _want(self, path: str) -> None:
        """Find out what is to be at ``path``."""
        where, source, state = self.overlay.find(path, follow=False)
        ending = _beside_database(path, self.overlay)
        if where != path or ending == "-journal":
            # Its way goes over a link of ours: under this name there is nothing. Or it belongs to a transaction
            # that goes on in the mirror: elsewhere it would be taken for a crashed one, and rolled back.
            self.wanted[path] = None
            return
        if ending and _lstat(self.overlay.tree + path):  # SQLite's own, which nobody wrote down
            source, state = self.overlay.tree + path, -1
        if state in (LOWER, THROUGH):
            return
        there = self._there(path)
        if state in (KEPT, ABSENT) and self.overlay.kept(path) is not None and there:
            if there.st_ctime < self.overlay.start - SLACK:
                return
        what, folder = _lstat(source), path.rpartition("/")[0]
        if state == KEPT and not self._is_plain(folder) and not self.wanted.get(folder):
            return  # in a folder of another host's
        self.wanted[path] = Want(source, what) if what and stat.S_IFMT(what.st_mode) in _KINDS else None

    def _plan(self, path: str, want: Want, there: os.stat_result | None) -> None:
        """Decide how the file ``path`` is to get there."""
        if there and stat.S_ISREG(there.st_mode) and stat.S_ISREG(want.what.st_mode):
            if self.voice.stays(path, there, self.overlay.kept(path)):
                self.in_place.add(path)
                return
        folder = path.rpartition("/")[0]
        while not self._is_plain(folder):
            folder = folder.rpartition("/")[0]
        self.beside[path] = self.voice.beside(folder, path)

    def _there(self, path: str) -> os.stat_result | None:
        """What really stands at ``path``, if the way there is what it seems."""
        return _lstat(path) if self._is_plain(path.rpartition("/")[0]) else None

    def _is_plain(self, folder: str) -> bool:
        """Whether a folder is really there, without links on the way."""
        if folder and folder not in self._plain:
            there = _lstat(folder)
            if there is None or not stat.S_ISDIR(there.st_mode) or not self._is_plain(folder.rpartition("/")[0]):
                return False
            with contextlib.suppress(OSError):  # NFS asks the server what is in a folder when it is opened
                real.close(real.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._plain.add(folder)
        return True

    # -- changes -----------------------------------------------------------------------------------------------------

    def _lay_beside(self) -> None:
        """Make the temporaries; a path where all is well already needs none."""
        copies: dict[tuple[int, int], str] = {}  # by inode, since a file may have several names
        for path, place in list(self.beside.items()):
            want = self.wanted[path]
            assert want
            with _naming(path):
                try:
                    real.link(want.source, place, follow_symlinks=False)
                except OSError:  # another file system, or one without links
                    if stat.S_ISLNK(want.what.st_mode):
                        real.symlink(real.readlink(want.source), place)
                    elif _same_contents(want, self._there(path), path):
                        del self.beside[path]
                        continue
                    else:
                        _copy(want, place, copies)
                        self.copied[path] = want
                self._give_group(path, place)
        for place in copies.values():
            fd = real.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                real.close(fd)

    def _give_group(self, path: str, place: str) -> None:
        """Give what was made in the mirror the group it would have had at its real place."""
        there, new, folder = self._there(path), real.lstat(place), real.lstat(os.path.dirname(place))
        group = there.st_gid if there else folder.st_gid if folder.st_mode & stat.S_ISGID else new.st_gid
        if group != new.st_gid:
            with contextlib.suppress(OSError):
                real.chown(place, -1, group, follow_symlinks=False)

    def _remove(self, path: str, want: Want | None) -> None:
        """Remove what stands at ``path`` if nothing is wanted there, or something that cannot take its place."""
        there = self._there(path)
        if there is None or want and want.folder == stat.S_ISDIR(there.st_mode):
            return
        self._plain.discard(path)
        try:
            (real.rmdir if stat.S_ISDIR(there.st_mode) else real.unlink)(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # something of another program's is in it
                raise

    def _put(self, path: str, want: Want) -> None:
        """Let the folder or file that is wanted appear."""
        if want.folder:
            if _make_folder(path):
                self.made[path] = want.what
        elif path in self.in_place:
            source = real.open(want.source, os.O_RDONLY | os.O_CLOEXEC)
            target = real.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                real.copy_contents(source, target)
                os.ftruncate(target, real.lseek(target, 0, os.SEEK_CUR))
            finally:
                real.close(source)
                real.close(target)
        elif path in self.beside:
            try:
                real.rename(self.beside[path], path)
            except FileNotFoundError:  # somebody has removed its folder while the script ran
                _make_folder(os.path.dirname(path))
                real.rename(self.beside[path], path)


def _beside_database(path: str, overlay: Overlay) -> str:
    """The ending of ``path`` if it lies beside an SQLite database that this rank has in its mirror."""
    for ending in ("-journal", "-wal", "-shm"):
        if path.endswith(ending):
            base = overlay.find(path.removesuffix(ending), follow=False)[1]
            if base.startswith(overlay.tree):
                with contextlib.suppress(OSError), real.open_file(base, "rb") as file:
                    return ending if file.read(16) == b"SQLite format 3\0" else ""
    return ""


def _copy(want: Want, place: str, copies: dict[tuple[int, int], str]) -> None:
    inode = want.what.st_dev, want.what.st_ino
    if inode in copies:
        with contextlib.suppress(OSError):
            return real.link(copies[inode], place)
    source = real.open(want.source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        real.copy_file(source, place)
    finally:
        real.close(source)
    copies[inode] = place


def _make_folder(path: str) -> bool:
    """``os.makedirs`` that no patch diverts; whether there was something to make."""
    try:
        real.mkdir(path)
    except FileExistsError:
        return False
    except FileNotFoundError:
        _make_folder(os.path.dirname(path))
        real.mkdir(path)
    return True


def _same_contents(want: Want, there: os.stat_result | None, path: str) -> bool:
    """Whether a large file stands at ``path`` as it is wanted: the voice had finished it."""
    if there is None or not stat.S_ISREG(there.st_mode) or not there.st_size == want.what.st_size >= LARGE:
        return False
    with real.open_file(want.source, "rb") as one, real.open_file(path, "rb") as other:
        while chunk := one.read(LARGE):
            if chunk != other.read(LARGE):
                return False
    return True


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors inside are about ``path``."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _lstat(path: str) -> os.stat_result | None:
    try:
        return real.lstat(path)
    except OSError:
        return None
