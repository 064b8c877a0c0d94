"""Promotion: the voice has died, and what this rank sees becomes os.

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
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from typing import NamedTuple

from oars.adapt.files import library
from oars.adapt.files.copying import copy_contents, copy_file
from oars.adapt.files.library import ABSENT, KEPT, LOWER, THROUGH
from oars.adapt.files.own import Own

SLACK = 60  # seconds by which the clocks of hosts and file servers may differ
LARGE = 1 << 20  # bytes: from here on reading two files is cheaper than writing one safely

_numbers = itertools.count()
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFSOCK, stat.S_IFIFO)


class Want(NamedTuple):
    """What is to stand at a path: ``what`` is at ``source``, a place in the mirror or among the kept originals."""

    source: str
    what: os.stat_result

    @property
    def folder(self) -> bool:
        return stat.S_ISDIR(self.what.st_mode)


class Promotion:
    """One attempt to make real what a rank sees. ``run`` raises OSError with the name of the file that cannot be."""

    def __init__(self, overlay: Own) -> None:
        self.overlay = overlay
        self._before = library.before(overlay.shared)
        kept = overlay.shared + "/kept"
        with os.scandir(kept) as originals:
            self._linked = {(there.st_dev, there.st_ino) for there in (_lstat(e.path) for e in originals) if there}
        self._plain: set[str] = set()  # folders that are really there, without links on the way
        self.wanted: dict[str, Want | None] = {}  # every path touched, folders before what is in them; None: nothing
        for path in sorted(overlay.touched()):
            self._want(path)
        self.beside: dict[str, str] = {}  # path -> temporary
        self.in_place: set[str] = set()  # files that must keep their inode
        self.copied: dict[str, Want] = {}
        self.led_to: set[str] = set()  # sockets and pipes in the mirror that links lead to from now on
        self.made: dict[str, os.stat_result] = {}  # folders, and what they are to be
        for path, want in self.wanted.items():
            if want and not want.folder:
                there = self._there(path)
                if there is None or (there.st_dev, there.st_ino) != (want.what.st_dev, want.what.st_ino):
                    self._plan(path, want, there)

    def run(self) -> None:
        changing = {path: self._there(path) for path in self.wanted}
        for path, was in changing.items():
            if was or self.wanted[path]:
                with _naming(path):
                    library.promise(path, path in self.in_place)
        for place in self.beside.values():
            library.promise(place, False)
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
                os.chmod(path, mode | os.lstat(path).st_mode & stat.S_ISGID)
        except OSError:
            for place in self.beside.values():
                with contextlib.suppress(OSError):
                    os.unlink(place)
            raise

    def catch_up(self) -> None:
        """Add what a loader worker was just writing into a file when it was copied."""
        for path, want in self.copied.items():
            with contextlib.suppress(OSError):
                if os.lstat(want.source).st_size > want.what.st_size:
                    _append_rest(want.source, path)

    # -- what is wanted ----------------------------------------------------------------------------------------------

    def _want(self, path: str) -> None:
        """Find out what is to be at ``path``."""
        where, source, state = library.find(path, follow=False)
        if where != path:  # its way goes over a link of ours: under this name there is nothing
            self.wanted[path] = None
            return
        if state in (LOWER, THROUGH):
            return
        there = self._there(path)
        if state in (KEPT, ABSENT) and path in self._before and there:
            if there.st_ctime < self.overlay.start - SLACK:
                return
        what, folder = _lstat(source), path.rpartition("/")[0]
        if state == KEPT and not self._is_plain(folder) and not self.wanted.get(folder):
            return  # in a folder of another host's
        self.wanted[path] = Want(source, what) if what and stat.S_IFMT(what.st_mode) in _KINDS else None

    def _plan(self, path: str, want: Want, there: os.stat_result | None) -> None:
        """Decide how the file ``path`` is to get there."""
        if there and stat.S_ISREG(there.st_mode) and stat.S_ISREG(want.what.st_mode):
            if self._stays(path, there):
                self.in_place.add(path)
                return
        folder = path.rpartition("/")[0]
        while not self._is_plain(folder):
            folder = folder.rpartition("/")[0]
        name = f"{self.overlay.token}-{os.getpid()}-p{next(_numbers)}"
        self.beside[path] = f"{folder}/.{os.path.basename(path)[:150]}.oars-{name}"

    def _stays(self, path: str, was: os.stat_result) -> bool:
        """Whether the file at ``path`` must keep its inode."""
        if path in self._before:
            several = was.st_nlink > 1 and (self._before[path] or "").endswith("~")
        else:
            several = was.st_nlink > 1 and (was.st_dev, was.st_ino) not in self._linked
        folder = os.path.dirname(path) or "/"
        return several or was.st_uid != os.geteuid() or not os.access(folder, os.W_OK | os.X_OK, effective_ids=True)

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
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
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
                    os.link(want.source, place, follow_symlinks=False)
                except OSError:  # another file system, or one without links
                    if stat.S_ISLNK(want.what.st_mode):
                        os.symlink(os.readlink(want.source), place)
                    elif not stat.S_ISREG(want.what.st_mode):  # somebody listens at it, loader workers for instance
                        os.symlink(want.source, place)
                        self.led_to.add(want.source)
                    elif _same_contents(want, self._there(path), path):
                        del self.beside[path]
                        continue
                    else:
                        _copy(want, place, copies)
                        self.copied[path] = want
                self._give_group(path, place)
        for place in copies.values():
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _give_group(self, path: str, place: str) -> None:
        """Give what was made in the mirror the group it would have had at its real place."""
        there, new, folder = self._there(path), os.lstat(place), os.lstat(os.path.dirname(place))
        group = there.st_gid if there else folder.st_gid if folder.st_mode & stat.S_ISGID else new.st_gid
        if group != new.st_gid:
            with contextlib.suppress(OSError):
                os.chown(place, -1, group, follow_symlinks=False)

    def _remove(self, path: str, want: Want | None) -> None:
        """Remove what stands at ``path`` if nothing is wanted there, or something that cannot take its place."""
        there = self._there(path)
        if there is None or want and want.folder == stat.S_ISDIR(there.st_mode):
            return
        self._plain.discard(path)
        try:
            (os.rmdir if stat.S_ISDIR(there.st_mode) else os.unlink)(path)
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
            source = os.open(want.source, os.O_RDONLY | os.O_CLOEXEC)
            target = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                copy_contents(source, target)
                os.ftruncate(target, os.lseek(target, 0, os.SEEK_CUR))
            finally:
                os.close(source)
                os.close(target)
        elif path in self.beside:
            try:
                os.rename(self.beside[path], path)
            except FileNotFoundError:  # somebody has removed its folder while the script ran
                _make_folder(os.path.dirname(path))
                os.rename(self.beside[path], path)


def _append_rest(source: str, target: str) -> None:
    """Add to ``target`` what ``source`` has beyond its length."""
    with open(source, "rb") as one, open(target, "ab") as other:
        one.seek(other.seek(0, os.SEEK_END))
        shutil.copyfileobj(one, other)


def clear(tree: str, keep: set[str]) -> None:
    """Empty the mirror, but for what is to stay."""
    for folder, folders, names in os.walk(tree, topdown=False):
        for path in (f"{folder}/{name}" for name in names):
            if path not in keep:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        for name in folders:
            with contextlib.suppress(OSError):
                (os.unlink if os.path.islink(f"{folder}/{name}") else os.rmdir)(f"{folder}/{name}")


def held(tree: str) -> set[str]:
    """What this process has open or mapped below ``tree``."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found.update(line.rstrip("\n").split(None, 5)[5] for line in maps if " /" in line)
    return {path for path in found if path.startswith(tree + "/")}


def _copy(want: Want, place: str, copies: dict[tuple[int, int], str]) -> None:
    inode = want.what.st_dev, want.what.st_ino
    if inode in copies:
        with contextlib.suppress(OSError):
            return os.link(copies[inode], place)
    source = os.open(want.source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        copy_file(source, place)
    finally:
        os.close(source)
    copies[inode] = place


def _make_folder(path: str) -> bool:
    """``os.makedirs`` that no patch diverts; whether there was something to make."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    except FileNotFoundError:
        _make_folder(os.path.dirname(path))
        os.mkdir(path)
    return True


def _same_contents(want: Want, there: os.stat_result | None, path: str) -> bool:
    """Whether a large file stands at ``path`` as it is wanted: the voice had finished it."""
    if there is None or not stat.S_ISREG(there.st_mode) or not there.st_size == want.what.st_size >= LARGE:
        return False
    with open(want.source, "rb") as one, open(path, "rb") as other:
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
        return os.lstat(path)
    except OSError:
        return None
