"""The tape: what a script was given, in order, so that it can be led through the same part of itself again.

A script that is resumed runs from its beginning, but what it did before the snapshot is not done again: it is *played*.
Nothing is computed; the script is handed what it saw the first time: the numbers it read, the sizes of its batches and
of its models' results, the times it asked for, and where its random streams stood. All that is recorded here, a few
bytes each, and lies in ``snapshots/tape`` of the run folder; a snapshot says how many of its bytes belong to it.

Every rank records the same bytes (all are global values), the voice writes them. An entry is one letter and what
belongs to it:

====== ============================================= ====== ==========================================================
letter what the script did                           letter what belongs to other entries
====== ============================================= ====== ==========================================================
f i I  read a float, an int, a large int             k K    a new kind's description, counted from 0; one used once
t n j  read True, False, another value               g      where a random stream stood, before it was drawn from
a L    read an array; one too large to record
b e    got a batch; came to a loader's end
c x    called a model; one that failed
s o    made an optimizer step; a closure's call in it
T N    asked for the time (float, nanoseconds)
====== ============================================= ====== ==========================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.records import varint

_open = os.open  # the script's is watched
LARGEST = 1 << 16  # bytes of one read that are recorded
_CHUNK = 1 << 16  # bytes between writes
_IN_MEMORY = 1 << 26  # bytes held back while the disk is full
_LONG_KIND, _MANY_KINDS = 1000, 20_000
_MAGIC = b"OARSTAPE1\n"
_DID = {**dict.fromkeys("fiItnjaL", "read a value"), "b": "got a batch", "e": "came to the end of a loader",
        "c": "called a model", "x": "called a model that failed", "s": "made an optimizer step",
        "o": "called an optimizer's closure", "T": "asked for the time", "N": "asked for the time"}


class Damaged(Exception):
    """A snapshot, or its tape, is not whole; says why."""


class Diverged(BaseException):
    """The script does not go the way it went when it was recorded; no script is to catch this."""


class Tape:
    """Records or plays; ``busy`` counts reasons to do neither: code that is not the script's, no snapshots wanted."""

    def __init__(self) -> None:
        self.busy = 1
        self.playing = False
        self.voice = False
        self.trouble = ""  # why what was recorded could not be written
        self.strict = True  # playing on as many ranks as then: what is not passed over comes out the same
        self.skips = False  # playing, and past the first optimizer step: from there on nothing is computed
        self._path = Path()
        self._fd: int | None = None
        self._buffer = bytearray()
        self._start = 0  # where in the file the buffer belongs
        self._before = (0, b"")  # the last chunk written: a new voice writes it again
        self._digest = _new_digest()
        self._kinds: dict[Any, int] = {}
        self._described: list[Any] = []  # played
        self._only: Any = None  # a description that comes once
        self._at = 0
        self._clock_shift: dict[str, Any] = {}

    # -- recording

    def begin(self, folder: Path, voice: bool, mark: dict[str, Any] | None = None) -> None:
        """Record from here on; with a snapshot's ``mark``, play what was recorded up to it first."""
        self._path, self.voice = folder / runfolder.SNAPSHOTS / runfolder.TAPE, voice
        if mark is None:
            self._buffer += _MAGIC
        else:
            data = read_tape(folder, mark)
            self._buffer, self._at, self.playing = bytearray(data), len(_MAGIC), True
            self._digest.update(data)
        os.register_at_fork(after_in_child=self._stop)
        self.busy = 0

    def _stop(self) -> None:
        self.busy += 1  # a forked process is no part of the run's one story

    def give_up(self) -> None:
        """Record no more: what the script does cannot be played."""
        self.busy += 1
        self._buffer = bytearray()

    def put(self, data: bytes) -> None:
        """Append one entry."""
        self._buffer += data

    def place(self) -> int:
        """Where the next entry goes, for ``insert``; good until the next ``flush``."""
        return len(self._buffer)

    def insert(self, at: int, data: bytes) -> None:
        """Put an entry where it belongs, before what came later."""
        self._buffer[at:at] = data

    def put_kind(self, letter: bytes, kind: Any) -> None:
        """Append ``letter`` with the number of ``kind``, described once: nested tuples of numbers, strings, None."""
        number = self._kinds.get(kind)
        if number is None:
            text = json.dumps(kind)
            if len(text) > _LONG_KIND or len(self._kinds) > _MANY_KINDS:  # names of samples, say: no two are alike
                self._buffer += b"K" + _text(text) + letter + b"\0"
                return
            number = self._kinds[kind] = len(self._kinds)
            self._buffer += b"k" + _text(text)
        self._buffer += letter + varint(number)

    def put_value(self, value: Any) -> None:
        """Append something the script read: a number, or a NumPy array."""
        if type(value) is float:
            self._buffer += b"f" + _DOUBLE(value)
        elif value is True or value is False:
            self._buffer += b"t" if value else b"n"
        elif type(value) is int:
            self._buffer += b"i" + _LONG(value) if -(1 << 63) <= value < 1 << 63 else b"I" + _text(str(value))
        elif hasattr(value, "nbytes"):
            if value.nbytes > LARGEST or value.dtype == object:
                self._buffer += b"L"
            else:
                data = zlib.compress(value.tobytes(), 1)
                self._buffer += b"a" + _text(json.dumps([value.dtype.str, value.shape])) + varint(len(data)) + data
        elif isinstance(value, complex):
            self._buffer += b"j" + _text(json.dumps([value.real, value.imag]))
        else:
            self._buffer += b"L"

    def flush_some(self) -> None:
        """Write if there is enough; called where nothing will be inserted before."""
        if len(self._buffer) > _CHUNK:
            self.flush()

    def flush(self) -> bool:
        """Write what was recorded; False (and ``trouble``) if that failed: it is kept and tried again."""
        if not self._buffer:
            return not self.trouble
        chunk = bytes(self._buffer)
        if self.voice:
            try:
                self._write(chunk, self._start)
                self.trouble = ""
            except OSError as error:
                self.trouble = error.strerror or str(error)
                if len(chunk) > _IN_MEMORY:
                    self.give_up()
                return False
        self._digest.update(chunk)
        self._before = self._start, chunk
        self._start += len(chunk)
        self._buffer = bytearray()
        return True

    def _write(self, chunk: bytes, at: int) -> None:
        if self._fd is None:
            self._path.parent.mkdir(exist_ok=True)
            self._fd = _open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        view = memoryview(chunk)
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done

    def become_voice(self) -> None:
        """The voice died: write from here on, and again what it may not have come to write."""
        self.voice = True
        if self.playing:
            return
        try:
            self._write(self._before[1], self._before[0])
        except OSError as error:
            self.trouble = error.strerror or str(error)

    def mark(self) -> tuple[dict[str, Any], int | None] | None:
        """What a snapshot says of the tape so far, and the descriptor to sync; None if it could not be written."""
        if not self.flush():
            return None
        return {"bytes": self._start, "digest": self._digest.hexdigest()}, self._fd

    # -- playing

    def played_out(self) -> bool:
        """Whether all has been played: the next boundary is where the snapshot was taken."""
        return self._at >= len(self._buffer)

    def play_on(self, data: bytes) -> None:
        """Play further, to a later place: ``data`` is the tape up to there."""
        if data[: len(self._buffer)] != self._buffer:
            raise Damaged("its tape was changed since it was written")
        self._digest.update(data[len(self._buffer) :])
        self._buffer = bytearray(data)

    def played_to(self) -> None:
        """Go on recording where the snapshot was taken; what the tape held after it is gone."""
        self._start, self._buffer, self.playing, self.skips = len(self._buffer), bytearray(), False, False
        self._before = self._start, b""
        self._kinds = {_tupled(kind): i for i, kind in enumerate(self._described)}
        if self.voice:
            self._write(b"", self._start)
            assert self._fd is not None
            os.ftruncate(self._fd, self._start)

    def peek(self) -> str:
        """The letter of the next entry, or ``""``."""
        while True:
            letter = chr(self._buffer[self._at]) if self._at < len(self._buffer) else ""
            if letter not in ("k", "K"):
                return letter
            self._at += 1
            if letter == "k":
                self._described.append(json.loads(self._text()))
            else:
                self._only = json.loads(self._text())

    def take(self, letters: str) -> str:
        """Go past the next entry's letter, which must be one of these."""
        letter = self.peek()
        if letter == "" or letter not in letters:
            then = f"it {_DID.get(letter, letter)}" if letter else "the snapshot was taken before"
            raise Diverged(f"it {_DID[letters[0]]} where, the first time, {then}")
        self._at += 1
        return letter

    def take_kind(self, letter: str) -> Any:
        """The description that ``put_kind`` was given, tuples as lists."""
        self.take(letter)
        number, only, self._only = self._varint(), self._only, None
        return self._described[number] if only is None else only

    def take_value(self) -> Any:
        """What the script read; ``TooLarge`` if that was not recorded."""
        letter = self.take("fiItnjaL")
        if letter == "f":
            return _double(self._bytes(8))[0]
        if letter == "i":
            return _long(self._bytes(8))[0]
        if letter in "tn":
            return letter == "t"
        if letter == "I":
            return int(self._text())
        if letter == "j":
            return complex(*json.loads(self._text()))
        if letter == "L":
            return TooLarge
        import numpy as np

        dtype, shape = json.loads(self._text())
        return np.frombuffer(zlib.decompress(self._bytes(self._varint())), np.dtype(dtype)).reshape(shape).copy()

    def take_bytes(self) -> bytes:
        """What ``put_bytes`` put after a letter that was just taken."""
        return self._bytes(self._varint())

    def _bytes(self, count: int) -> bytes:
        self._at += count
        return bytes(self._buffer[self._at - count : self._at])

    def _text(self) -> str:
        return self._bytes(self._varint()).decode()

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._buffer[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    # -- the clock

    def shifted(self, name: str, clock: Callable[..., Any]) -> Any:
        """What this rank's clock shows; after a resume it goes on from what the script has read before."""
        return clock() + self._clock_shift.get(name, 0)

    def time(self, name: str, clock: Callable[..., Any]) -> Any:
        """What the script reads from ``time.<name>``: ``clock()``, recorded, or what it read then."""
        whole = name.endswith("_ns")
        if self.playing:
            self.take("N" if whole else "T")
            return (_long if whole else _double)(self._bytes(8))[0]
        value = clock()
        self._buffer += (b"N" + _LONG(value)) if whole else (b"T" + _DOUBLE(value))
        if len(self._buffer) > _IN_MEMORY:  # a script that does nothing else, for hours
            self.give_up()
        return value


    def clocks(self) -> dict[str, Any]:
        """What the clocks show that count from nowhere in particular."""
        return {name: getattr(time, name)() + self._clock_shift.get(name, 0) for name in _CLOCKS}

    def set_clocks(self, then: dict[str, Any]) -> None:
        """Let them go on from ``then``: the script subtracts what it has read before."""
        self._clock_shift = {name: value - getattr(time, name)() for name, value in then.items() if name in _CLOCKS}


_CLOCKS = ("perf_counter", "monotonic", "process_time", "perf_counter_ns", "monotonic_ns")
TooLarge = object()


def put_bytes(letter: bytes, data: bytes) -> bytes:
    """An entry: a letter with bytes."""
    return letter + varint(len(data)) + data


def read_tape(folder: Path, mark: dict[str, Any]) -> bytes:
    """The part of the tape that belongs to a snapshot; Damaged if it is not as it was then."""
    try:
        with open(folder / runfolder.SNAPSHOTS / runfolder.TAPE, "rb") as file:
            data = file.read(mark["bytes"])
    except OSError as error:
        raise Damaged(f"its tape cannot be read ({error.strerror})") from None
    if len(data) < mark["bytes"]:
        raise Damaged("its tape is cut short")
    digest = _new_digest()
    digest.update(data)
    if digest.hexdigest() != mark["digest"]:
        raise Damaged("its tape was changed since it was written")
    return data


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=16)


_DOUBLE, _LONG = struct.Struct("<d").pack, struct.Struct("<q").pack
_double, _long = struct.Struct("<d").unpack, struct.Struct("<q").unpack


def _text(text: str) -> bytes:
    data = text.encode()
    return varint(len(data)) + data


def _tupled(value: object) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


tape = Tape()  # this rank's
