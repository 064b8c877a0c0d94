"""Ledger: an append-only file of JSON lines which one side writes and others follow as it grows.

Two of them are in use. The voice's ledger tells the other ranks what a path was before the run changed it; a
rank's journal tells its forked children (loader workers) what the rank did to its overlay, and the other way
round. Following costs one ``lseek`` per look; only growth is read.

Who writes may be killed in the middle of a line. So an append starts on a line of its own, and a line that is no
JSON counts as not written: the change it announces had not begun.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

from oars.adapt.files import real

_here = threading.local()


def written() -> int:
    """The records that this thread has written: grows with every file it makes, changes anew or removes."""
    return getattr(_here, "written", 0)


class Ledger:
    """Lines of JSON in a file that only grows. ``grew()`` is cheap; ``read()`` gives what is new."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = real.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._end = 0
        # NFS clients trust cached sizes for seconds; only opening a file anew asks the server.
        self._nfs = _file_system_of(path).startswith("nfs")

    def append(self, *records: Any) -> None:
        """Add a line for each record, visible to every reader when this returns."""
        _here.written = written() + len(records)
        # One write call on O_APPEND: lines of several processes never mix.
        data = "".join(["\n", *(json.dumps(record) + "\n" for record in records)]).encode()
        if real.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
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
        return [record for record in map(_parsed, data.splitlines()) if record is not None]

    def hold(self) -> None:
        """Lock the file for as long as this process and its forks live: who gets the lock knows that they do not."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def skip(self) -> None:
        """Take all present lines as read."""
        self._end = real.lseek(self._fd, 0, os.SEEK_END)


class Gate:
    """Entered for every change of this rank's files, by its threads and forked children; ``alone`` waits for them all.

    While nothing has been forked that is a lock of Python's. ``news`` is called on entering once there are children.
    """

    def __init__(self, path: str, news: Callable[[], Any], forked: bool = False) -> None:
        self.forked = forked
        self._news = news
        self._lock = threading.RLock()
        self._depth = 0  # a finalizer may change files while its thread is changing files
        self._fd = real.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.register_at_fork(after_in_child=self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self.forked and self._depth == 1:
            self._lockf(fcntl.LOCK_SH)
            self._news()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self.forked and self._depth == 0:
            self._lockf(fcntl.LOCK_UN)
        self._lock.release()

    @contextlib.contextmanager
    def alone(self, seconds: float = 10) -> Iterator[None]:
        """Like entering, but without company; who does not leave within ``seconds`` hangs, and is not waited for."""
        until = monotonic() + seconds
        ours = self._lock.acquire(timeout=seconds)
        self._depth += 1
        try:
            while self.forked and not self._lockf(fcntl.LOCK_EX | fcntl.LOCK_NB) and monotonic() < until:
                sleep(0.001)
            yield
        finally:
            self._depth -= 1
            self._lockf(fcntl.LOCK_UN)
            if ours:
                self._lock.release()

    def _lockf(self, how: int) -> bool:
        try:
            fcntl.lockf(self._fd, how)
        except OSError as error:  # else a file system without locks
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True

    def _renew(self) -> None:
        self._lock, self._depth = threading.RLock(), 0


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # empty, or cut short by a death
        return None


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
