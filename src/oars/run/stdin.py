"""The script's standard input on many ranks: the voice reads it, every rank gets the same bytes.

mpirun's own forwarding loses files and pipes on some systems, so the supervisor hands its stdin itself, as a file
descriptor over a local socket, to the voice.
"""

from __future__ import annotations

import io
import os
import socket
import sys
from typing import Any

VARIABLE = "OARS_STDIN"


class StdinServer:
    """The supervisor's side: gives its stdin to whoever connects; ``serve`` is called when ``socket`` is readable."""

    def __init__(self, place: str) -> None:
        self.path = os.path.join(place, "stdin")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self.path)
        self.socket.listen(1)

    def serve(self) -> None:
        """Answer one rank."""
        connection, _ = self.socket.accept()
        with connection:
            try:
                socket.send_fds(connection, [b"0"], [0])
            except OSError:  # our own stdin is closed: the rank keeps the empty one it has
                pass

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


def take_stdin(path: str) -> None:
    """The voice's side: descriptor 0 becomes the supervisor's stdin."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if fds:
        os.dup2(fds[0], 0)
        os.close(fds[0])


def share_stdin(world: Any, terminal: bool) -> None:
    """``sys.stdin`` (``input()``, iteration, ``.buffer``) gives every rank what the voice reads."""
    raw = _Shared(world, terminal)
    shared = io.TextIOWrapper(io.BufferedReader(raw), encoding=sys.stdin.encoding, errors=sys.stdin.errors)
    sys.stdin = shared
    sys.__stdin__ = shared  # type: ignore[misc]


class _Shared(io.RawIOBase):
    name = "<stdin>"
    mode = "rb"

    def __init__(self, world: Any, terminal: bool) -> None:
        self._world, self._terminal, self._pid = world, terminal, os.getpid()

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return self._terminal

    def readinto(self, buffer: Any) -> int:
        if os.getpid() != self._pid:  # a forked child is alone
            data = os.read(0, len(buffer))
        else:
            data = self._world.broadcast(lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        self._world.board.enter("input")  # a user who takes his time is no stall
        return os.read(0, size)
