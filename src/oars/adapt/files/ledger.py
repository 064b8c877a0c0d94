"""Ledger: an append-only file of JSON lines which one side writes and others follow as it grows.

Two of them are in use. The voice's ledger tells the other ranks what a path was before the run changed it; a
rank's journal tells its forked children (loader workers) what the rank did to its overlay, and the other way
round. Following costs one ``lseek`` per look; only growth is read.
"""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

from oars.adapt.files import real


class Ledger:
    """Lines of JSON in a file that only grows. ``grew()`` is cheap; ``read()`` gives what is new."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = real.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._end = 0
        # NFS clients trust cached sizes for seconds; only opening a file anew asks the server.
        self._nfs = _file_system_of(path).startswith("nfs")

    def append(self, record: Any) -> None:
        """Add one line, visible to every reader when this returns."""
        # One write call on O_APPEND: lines of several processes never mix.
        real.write(self._fd, (json.dumps(record) + "\n").encode())
        if self._nfs:
            os.fsync(self._fd)

    def grew(self) -> bool:
        """Whether there may be lines that ``read`` has not given yet."""
        if self._nfs:
            real.close(real.open(self._path, os.O_RDONLY))
        return real.lseek(self._fd, 0, os.SEEK_END) != self._end

    def read(self) -> list[Any]:
        """The lines added since the last call, in order."""
        size = real.lseek(self._fd, 0, os.SEEK_END)
        data = os.pread(self._fd, size - self._end, self._end)
        data = data[: data.rfind(b"\n") + 1]
        self._end += len(data)
        return [json.loads(line) for line in data.splitlines()]

    def hold(self) -> None:
        """Lock the file for as long as this process and its forks live: who gets the lock knows that they do not."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def skip(self) -> None:
        """Take all present lines as read."""
        self._end = real.lseek(self._fd, 0, os.SEEK_END)


def _file_system_of(path: str) -> str:
    """The type of the file system that holds ``path`` (``ext4``, ``nfs4``), or ``""`` if nobody says."""
    path = real.realpath(path) + "/"
    best, kind = "", ""
    try:
        with real.open_file("/proc/self/mounts") as mounts:
            for line in mounts:
                _, point, this_kind, *_ = line.split(" ")
                if path.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
                    best, kind = point, this_kind
    except OSError:
        pass
    return kind
