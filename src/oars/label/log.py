"""The log of what people did: events in SQLite, which are added and never changed.

An event is on disk when ``add`` returns. In WAL an action costs 2 to 6 ms. WAL needs memory that all processes share,
which network file systems do not have: there a plain journal is used, and the file is locked for one server.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oars.label.errors import LabelError

_NETWORK = re.compile(r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|afs|9p|fuse|orangefs|panfs")


def filesystem(path: Path, mounts: str | None = None) -> str:
    """The kind of file system that a path lies on, from the system's table of mounts."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return "unknown"
    where, kind = "", "unknown"
    for line in mounts.splitlines():
        words = line.split()
        point = words[1].replace("\\040", " ")
        if len(point) >= len(where) and (point == "/" or f"{path.resolve()}/".startswith(f"{point}/")):
            where, kind = point, words[2]
    return kind


def journal_for(kind: str) -> str:
    """The journal that works on this kind of file system."""
    return "truncate" if _NETWORK.search(kind) else "wal"


class Log:
    """One server's events, in a file."""

    def __init__(self, path: Path, journal: str) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
            os.chmod(path, 0o600)
            self._db.execute(f"pragma journal_mode={journal}")
            self._db.execute("pragma synchronous=full")
            self._db.execute("create table if not exists event(n integer primary key, at real not null, "
                             "who text not null, kind text not null, data text not null, action text unique)")
            self._db.execute("create table if not exists session(secret text primary key, person text not null)")
        except sqlite3.Error as error:
            raise LabelError(f"{path}: the log of labels cannot be opened ({error}): is it damaged, or the disk full?",
                             507) from None

    def add(self, who: str, kind: str, data: dict[str, Any], action: str | None = None) -> int:
        """Write one event down; its number. ``action`` is the page's name for it: no two events have the same."""
        with self._lock:
            try:
                return int(self._db.execute("insert into event(at, who, kind, data, action) values(?, ?, ?, ?, ?) "
                                            "returning n", (time.time(), who, kind, json.dumps(data),
                                                            action)).fetchall()[0][0])
            except sqlite3.Error as error:
                raise LabelError(f"nothing was saved: {error}; make room on the disk, then repeat the last action",
                                 507) from None

    def events(self) -> Iterator[tuple[int, float, str, str, dict[str, Any]]]:
        """All of them: number, time, person, kind, data."""
        with self._lock:
            try:
                for n, at, who, kind, data in self._db.execute("select n, at, who, kind, data from event order by n"):
                    yield n, at, who, kind, json.loads(data)
            except (sqlite3.Error, ValueError) as error:
                raise LabelError(f"the log of labels is damaged ({error}): put a copy of it back") from None

    def actions(self) -> dict[str, int]:
        """The names of actions, and their events."""
        with self._lock:
            return dict(self._db.execute("select action, n from event where action is not null").fetchall())

    def sessions(self) -> dict[str, str]:
        """Who a cookie belongs to."""
        with self._lock:
            return dict(self._db.execute("select secret, person from session").fetchall())

    def add_session(self, secret: str, person: str) -> None:
        """Remember a browser, so that it is known after a restart."""
        with self._lock:
            try:
                self._db.execute("insert into session values(?, ?)", (secret, person))
            except sqlite3.Error as error:
                raise LabelError(f"nobody can enter: {error}; make room on the disk", 507) from None

    def close(self) -> None:
        """Close the file; its events are there already."""
        with self._lock:
            self._db.close()
