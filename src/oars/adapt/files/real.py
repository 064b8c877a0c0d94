"""The file functions as Python has them, kept before any of them is replaced; and the one way we copy a file."""

from __future__ import annotations

import errno
import os as _os
from io import FileIO
from io import open as open_file
from os import (
    _exit,
    access,
    chdir,
    chmod,
    chown,
    close,
    fchdir,
    fchmod,
    fstat,
    getcwd,
    link,
    listdir,
    lseek,
    lstat,
    makedirs,
    mkdir,
    open,
    readlink,
    remove,
    rename,
    replace,
    rmdir,
    scandir,
    stat,
    statvfs,
    symlink,
    truncate,
    unlink,
    utime,
    write,
)
from posixpath import realpath

__all__ = [
    "FileIO", "_exit", "access", "chdir", "chmod", "chown", "close", "copy_contents", "copy_file", "fchdir", "fchmod",
    "fstat", "getcwd", "link", "listdir", "lseek", "lstat", "makedirs", "mkdir", "open", "open_file", "readlink",
    "realpath", "remove", "rename", "replace", "rmdir", "scandir", "stat", "statvfs", "symlink", "truncate", "unlink",
    "utime", "write",
]  # fmt: skip

_CHUNK = 1 << 24


def copy_contents(source: int, target: int) -> None:
    """Copy all of one open file into another; shares blocks where the file system can."""
    try:
        while _os.copy_file_range(source, target, _CHUNK):
            pass
        return
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
    while chunk := _os.read(source, _CHUNK):
        view = memoryview(chunk)
        while view:
            view = view[write(target, view) :]


def copy_file(source: int, path: str, empty: bool = False) -> None:
    """Make a new file at ``path`` with the contents (unless ``empty``), mode and times of an open one."""
    was = fstat(source)
    target = open(path, _os.O_WRONLY | _os.O_CREAT | _os.O_EXCL | _os.O_CLOEXEC, 0o600)
    try:
        if not empty:
            copy_contents(source, target)
        fchmod(target, was.st_mode & 0o7777)
        if not empty:
            utime(target, ns=(was.st_atime_ns, was.st_mtime_ns))
    finally:
        close(target)
