"""The board: where every rank says which collective it is in, for the supervisor, who looks once a second.

A rank that hangs cannot be asked, so it tells beforehand: ``enter`` and ``leave`` around each collective cost about a
microsecond, one ``struct.pack_into`` on shared memory. Slots go by the rank a process was started as, all through the
run. A slot may be read half written: a stall is seconds long, and the next look is whole.

Ranks of one host share memory, not a file, though ``board`` in the run folder leads to it (a link to the supervisor's
descriptor): a write to a mapped file may wait for its disk, just when a checkpoint keeps that busy. It goes when the
last process does.

Beside that stand *marks*: what a rank's last meetings are, as hashes. Ranks of one host look at their neighbours'
before and behind each meeting, which costs two reads of memory, and so notice that they are in different ones.

Ranks on several hosts share a file. A mapped page travels whole over NFS, so each rank has a page of its own, and the
``gone`` marks, which any rank may set, have theirs and are written byte by byte. The writer's kernel sends a page when
it likes (30 s on Linux), so a rank on another host than the supervisor's sends its own once a second, by a thread; if
that cannot run, the kernel's 30 s remain. The reader opens the file anew for each look, by which NFS must ask the
server. So what is read of another host is some seconds old, or in the worst case half a minute: enough for the default
``--stall 60``, not for a ``--stall 5``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
from pathlib import Path
from time import perf_counter, sleep, time  # as they are now: scripts are given another clock later
from typing import NamedTuple

_HEAD = struct.Struct("<16sIIII64s")  # magic, ranks, where slots begin, bytes a slot, the supervisor's pid, its host
_MAGIC = b"oars board 1"
_GONE = 128  # one byte a rank, after the head
_LIVE = struct.Struct("<Qdd16s")  # collectives completed; since when (time()) in this one, or in none; waited; its name
_FIXED = struct.Struct("<I64s")  # pid, host; at _FIXED_AT in the slot
_FIXED_AT = 128  # a cache line away from what changes
SERVES = "serving"  # the name of what a parameter server is in: it waits for nobody, unless it is stopped
_MARKS_AT = 256
_MARKS = 4  # of so many meetings: nobody is further ahead than one
_NUMBER = 0xFFFF  # in a mark: its meeting's number; above it the hash


class Slot(NamedTuple):
    """What one rank says of itself; ``pid`` 0: nothing yet."""

    rank: int
    pid: int
    host: str
    gone: bool
    done: int  # collectives completed
    kind: str  # the collective it is in, or ""
    since: float  # when it entered that, or left the last
    waited: float  # seconds spent in collectives so far


class Board:
    """Every rank's slot. ``create`` is the supervisor's, ``open`` a rank's."""

    def __init__(self, path: Path, fd: int, rank: int | None) -> None:
        self.path, self.fd, self.rank = path, fd, rank
        _, self.ranks, self.first, self.stride, self.supervisor, host = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
        self.host = _text(host)
        self.done = 0
        self._waited = self._began = 0.0
        self._names: dict[str, bytes] = {}
        self._marks = self._every = memoryview(b"")  # this rank's, and the whole board
        self._beside: list[int] = []  # where the neighbours' marks begin in it
        if rank is not None:
            self._page = mmap.mmap(fd, self.stride, offset=self.first + rank * self.stride)
            _FIXED.pack_into(self._page, _FIXED_AT, os.getpid(), socket.gethostname().encode()[:64])
            _LIVE.pack_into(self._page, 0, 0, time(), 0.0, b"")
            self._marks = memoryview(self._page)[_MARKS_AT : _MARKS_AT + 8 * _MARKS].cast("Q")
            for place in range(_MARKS):  # of another process, which had this board before
                self._marks[place] = 0

    @classmethod
    def create(cls, path: Path, ranks: int, hosts: int = 1) -> Board:
        """A board for ``ranks`` ranks, nobody on it yet."""
        stride = mmap.ALLOCATIONGRANULARITY
        first = -(-(_GONE + ranks) // stride) * stride  # on the page after the head and the marks
        try:
            if hosts > 1:
                raise OSError("memory is one host's")
            fd = os.memfd_create("oars-board")
            os.symlink(f"/proc/{os.getpid()}/fd/{fd}", path)
        except (AttributeError, OSError):  # or the system has no such memory, or the file system no links
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Zeros and not a hole: a page that finds no room when it is first written kills its writer (SIGBUS).
        os.pwrite(fd, bytes(first + ranks * stride), 0)
        os.pwrite(fd, _HEAD.pack(_MAGIC, ranks, first, stride, os.getpid(), socket.gethostname().encode()[:64]), 0)
        return cls(path, fd, None)

    def grow(self, more: int) -> int:
        """Slots for ``more`` ranks behind all there have ever been; the number of the first of them."""
        magic, ranks, first, *rest = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))
        if _GONE + ranks + more > first:
            raise ValueError(f"a run that began like this has room for {first - _GONE} ranks")
        os.pwrite(self.fd, bytes(more * self.stride), first + ranks * self.stride)
        os.pwrite(self.fd, _HEAD.pack(magic, ranks + more, first, *rest), 0)
        return ranks

    @classmethod
    def open(cls, path: Path, rank: int) -> Board:
        """This rank's place on the board."""
        board = cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), rank)
        if board.host != socket.gethostname():
            threading.Thread(target=board._send, name="oars-board", daemon=True).start()
        return board

    def enter(self, kind: str) -> None:
        """This rank comes to a collective that all ranks call."""
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = kind.encode()[:16]
        self._began = perf_counter()
        _LIVE.pack_into(self._page, 0, self.done, time(), self._waited, name)

    def leave(self, done: int) -> None:
        """The collective is over; ``done`` of them are complete, the same number on all ranks that are as far."""
        self.done = done
        self._waited += perf_counter() - self._began
        _LIVE.pack_into(self._page, 0, self.done, time(), self._waited, b"")

    def look_at(self, neighbours: list[int]) -> None:
        """Whose marks to compare with, by the ranks they were started as; none where they share no memory."""
        self._beside = []
        if neighbours:
            self._every = memoryview(mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)).cast("Q")
            self._beside = [(self.first + rank * self.stride + _MARKS_AT) // 8 for rank in neighbours]

    def mark(self, number: int, what: int) -> int:
        """This rank comes to meeting ``number``, which is ``what``. Returns what to give to ``parted``."""
        mark = (what << 16 | number & _NUMBER) & 0xFFFFFFFFFFFFFFFF
        self._marks[number % _MARKS] = mark
        return mark

    def parted(self, mark: int) -> bool:
        """Whether a neighbour is, or was, in the meeting of this number, but in another one."""
        number, every = mark & _NUMBER, self._every
        for at in self._beside:
            other = every[at + number % _MARKS]
            if other != mark and other & _NUMBER == number:
                return True
        return False

    def gone(self, rank: int) -> None:
        """``rank`` is lost; nobody waits for it any more. Any rank may say so, and all may."""
        os.pwrite(self.fd, b"\1", _GONE + rank)

    def read(self) -> list[Slot]:
        """Every rank's slot, as of now."""
        with open(self.path, "rb") as file:
            data = file.read()
        slots = []
        for rank in range(_HEAD.unpack_from(data)[1]):  # it may have grown
            at = self.first + rank * self.stride
            done, since, waited, kind = _LIVE.unpack_from(data, at)
            pid, host = _FIXED.unpack_from(data, at + _FIXED_AT)
            slots.append(Slot(rank, pid, _text(host), data[_GONE + rank] != 0, done, _text(kind), since, waited))
        return slots

    def close(self) -> None:
        """The supervisor's end of it."""
        os.close(self.fd)

    def _send(self) -> None:
        """Where pages travel by file system: this rank's, once a second."""
        while True:
            sleep(1)
            with contextlib.suppress(OSError):
                os.fdatasync(self.fd)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
