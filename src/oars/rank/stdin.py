"""The script's standard input on many ranks: the voice reads it, every rank gets the same bytes.

mpirun's own forwarding loses files and pipes on some systems, so the supervisor hands its stdin itself, as a file
descriptor over a local socket, to the voice. Where that is a terminal, all ranks can ask for its size.
"""

from __future__ import annotations

import functools
import io
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oars.rank import seams

if TYPE_CHECKING:
    from oars.engine.world import World

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


def stand_in_terminal(size: Sequence[int]) -> None:
    """The other ranks' side: descriptor 0 becomes a terminal of the same size, at which nobody types.

    Programs that a script starts (``stty size``) say there what they say on the voice; who reads finds its end.
    """
    import fcntl
    import termios
    import tty

    _, slave = os.openpty()  # the other end stays open: without it the size cannot be asked for
    tty.setraw(slave)
    mode = termios.tcgetattr(slave)
    mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0  # a read does not wait
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", size[1], size[0], 0, 0))
    os.dup2(slave, 0)
    os.close(slave)


def tell_terminal_size(size: Sequence[int]) -> None:
    """``os.get_terminal_size()`` answers as at the user's terminal: ranks write to files, and would get an error."""
    def layer(real: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def get_terminal_size(fd: int = 1, /) -> os.terminal_size:
            try:
                return real(fd)
            except OSError:
                if fd != 1:
                    raise
                return os.terminal_size((size[0], size[1]))

        return get_terminal_size

    seams.tell_terminal_size(layer)


def share_stdin(world: World, terminal: bool) -> None:
    """``sys.stdin`` (``input()``, iteration, ``.buffer``) gives every rank what the voice reads."""
    raw = _Shared(world, terminal)
    shared = io.TextIOWrapper(io.BufferedReader(raw), encoding=sys.stdin.encoding, errors=sys.stdin.errors)
    sys.stdin = shared
    sys.__stdin__ = shared  # type: ignore[misc]


class _Shared(io.RawIOBase):
    name = "<stdin>"
    mode = "rb"

    def __init__(self, world: World, terminal: bool) -> None:
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
