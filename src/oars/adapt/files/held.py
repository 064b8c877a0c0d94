"""What this process holds open in its mirror (a log, a csv, a database, a mapped array) goes on at the real place.

Where the mirror's file became real by a hard link it is the same inode, and there is nothing to do. Where it was
copied, descriptors are replaced by ones of the real file with the same flags and offset, and shared mappings are laid
anew over the same addresses. Files without a name any more are left as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
from collections.abc import Iterator

from oars.adapt.files import real

_MAP_SHARED, _MAP_FIXED = 1, 16


def paths(tree: str) -> set[str]:
    """What this process has open below ``tree``."""
    return {path for _, path in _descriptors(tree)} | {path for path, *_ in _mappings(tree)}


def follow(tree: str) -> None:
    """Re-point all that is open below ``tree`` to what now stands at its real place."""
    streams: dict[tuple[str, int], list[list[int]]] = {}  # by file and flags: descriptors that share one offset
    for fd, path in _descriptors(tree):
        if _copied(path, path[len(tree) :]):
            alike = streams.setdefault((path, fcntl.fcntl(fd, fcntl.F_GETFL)), [])
            for group in alike:
                if _share(group[0], fd):
                    group.append(fd)
                    break
            else:
                alike.append([fd])
    mappings = [mapping for mapping in _mappings(tree) if _copied(mapping[0], mapping[0][len(tree) :])]
    for path in {path for path, _ in streams} | {path for path, *_ in mappings}:
        catch_up(path, path[len(tree) :])
    for (path, flags), groups in streams.items():
        for group in groups:
            _reopen(group, path[len(tree) :], flags)
        catch_up(path, path[len(tree) :])
    for path, start, end, perms, offset in mappings:
        _map_again(path[len(tree) :], start, end, perms, offset)


def clear(tree: str, keep: set[str]) -> None:
    """Empty the mirror, but for what is to stay."""
    folders = [tree]
    for folder in folders:  # grows: every folder comes after the one it is in
        with real.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.path not in keep:
                    with contextlib.suppress(OSError):
                        real.unlink(entry.path)
    for folder in reversed(folders[1:]):
        with contextlib.suppress(OSError):
            real.rmdir(folder)


def _descriptors(tree: str) -> Iterator[tuple[int, str]]:
    """This process's descriptors of what has a name below ``tree``."""
    for name in real.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = real.readlink(f"/proc/self/fd/{name}")
            if path.startswith(tree + "/"):
                there, open_one = real.lstat(path), real.fstat(int(name))
                if (there.st_dev, there.st_ino) == (open_one.st_dev, open_one.st_ino):
                    yield int(name), path


def _mappings(tree: str) -> Iterator[tuple[str, int, int, str, int]]:
    """This process's shared mappings of files below ``tree``: path, start, end, permissions, offset."""
    with real.open_file("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, perms, offset, _, _, *path = line.rstrip("\n").split(None, 5)
            if path and path[0].startswith(tree + "/") and perms[3] == "s":
                start, end = addresses.split("-")
                yield path[0], int(start, 16), int(end, 16), perms, int(offset, 16)


def _copied(path: str, place: str) -> bool:
    """Whether ``place`` is there and is not the file ``path`` itself."""
    try:
        one, other = real.lstat(path), real.stat(place)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) != (other.st_dev, other.st_ino)


def _share(one: int, other: int) -> bool:
    """Whether two descriptors of one file are duplicates: then moving one moves the other."""
    try:
        at = real.lseek(one, 0, os.SEEK_CUR)
        if real.lseek(other, 0, os.SEEK_CUR) != at:
            return False
        real.lseek(one, at + 1, os.SEEK_SET)
        try:
            return real.lseek(other, 0, os.SEEK_CUR) == at + 1
        finally:
            real.lseek(one, at, os.SEEK_SET)
    except OSError:  # a folder
        return False


def catch_up(path: str, place: str) -> None:
    """Add what another thread or process has written at the end of ``path`` since it was copied to ``place``."""
    there = real.lstat(path)
    if not stat.S_ISREG(there.st_mode) or there.st_size <= real.stat(place).st_size:
        return
    source, target = real.open(path, os.O_RDONLY | os.O_CLOEXEC), real.open(place, os.O_WRONLY | os.O_CLOEXEC)
    try:
        real.lseek(source, real.lseek(target, 0, os.SEEK_END), os.SEEK_SET)
        real.copy_contents(source, target)
    finally:
        real.close(source)
        real.close(target)


def _reopen(fds: list[int], place: str, flags: int) -> None:
    mode = stat.S_IMODE(real.stat(place).st_mode)
    try:
        new = real.open(place, flags | os.O_CLOEXEC)
    except PermissionError:  # made read-only after it was opened
        real.chmod(place, mode | stat.S_IRUSR | stat.S_IWUSR)
        new = real.open(place, flags | os.O_CLOEXEC)
        real.chmod(place, mode)
    try:
        with contextlib.suppress(OSError):  # a folder has no offset to speak of
            real.lseek(new, real.lseek(fds[0], 0, os.SEEK_CUR), os.SEEK_SET)
        for fd in fds:
            os.dup2(new, fd, inheritable=os.get_inheritable(fd))
    finally:
        real.close(new)


def _map_again(place: str, start: int, end: int, perms: str, offset: int) -> None:
    mmap = ctypes.CDLL(None, use_errno=True).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = real.open(place, (os.O_RDWR if "w" in perms else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        protection = sum(bit for bit, letter in ((1, "r"), (2, "w"), (4, "x")) if letter in perms)
        if mmap(start, end - start, protection, _MAP_SHARED | _MAP_FIXED, fd, offset) != start:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
    finally:
        real.close(fd)
