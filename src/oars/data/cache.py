"""What is made once from a data file and used by every later open: indexes, and unpacked copies of compressed files.

All of it lies in one folder, ``$OARS_CACHE``, else ``oars`` in the user's cache folder. It is safe to delete at any
time. An entry's name holds its file's size, time and checksum, so a file that has changed gets a new one and the old
one goes. Of several processes that want the same entry one makes it; the others wait at a lock and then read it. Under
``oars run`` the folder is the same for all ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from oars.data.errors import DataError

_BLOCK, _BLOCKS = 4096, 32


def folder() -> Path:
    """The cache folder, which may not be there yet."""
    named = os.environ.get("OARS_CACHE")
    if named:
        return Path(os.path.abspath(named))
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(home):  # no home at all
        home = os.path.join(tempfile.gettempdir(), f"oars-cache-{os.getuid()}")
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(home).st_uid != os.getuid():  # anybody may make it there
                raise DataError(f"{home} belongs to another user: set OARS_CACHE to a folder of your own")
    return Path(home) / "oars"


def fingerprint_of_many(files: list[str]) -> str:
    """Changes when one of these files does, by their sizes and times alone: there may be a million."""
    digest = hashlib.sha256()
    for file in files:
        stat = os.stat(file)
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def fingerprint(path: str) -> str:
    """Size, time and a checksum of a file: of all of it if it is small, else of blocks spread over it."""
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_size <= _BLOCK * _BLOCKS:
            check = zlib.crc32(file.read())
        else:
            check = 0
            for block in range(_BLOCKS):
                at = (stat.st_size - _BLOCK) * block // (_BLOCKS - 1)
                check = zlib.crc32(os.pread(file.fileno(), _BLOCK, at), check)
    return f"{stat.st_size:x}-{stat.st_mtime_ns:x}-{check:08x}"


def entry(path: str, kind: str, make: Callable[[Path], None], state: str | None = None) -> Path:
    """The cached file of ``kind`` (its options included) for the data file ``path``; ``make(target)`` writes it.

    ``state`` stands for the fingerprint of what is no single file.
    """
    name = hashlib.sha256(f"{os.path.abspath(path)}\0{kind}".encode()).hexdigest()[:24]
    target = folder() / f"{name}-{state or fingerprint(path)}"
    if target.exists():
        return target
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with open(folder() / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _make(target, make)
                _forget(name, target)
    except OSError as error:
        raise DataError(
            f"{path}: its index cannot be written to {folder()} ({error.strerror}); set OARS_CACHE to a "
            "folder with room"
        ) from None
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    """Whole or not at all: a process that is killed here leaves a part that the next one removes."""
    part = target.with_name(f"{target.name}.part")
    try:
        make(part)
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _forget(name: str, newest: Path) -> None:
    """Remove what was made for earlier states of the same file; who has it open keeps it."""
    for old in folder().glob(f"{name}-*"):
        if old != newest:
            with contextlib.suppress(OSError):
                old.unlink()
