"""The child process that reads and decodes single images for the page, and the server's end of the pipe to it.

A question is a line of JSON; the answer is a line of JSON with the number of bytes that follow. Nothing that comes back
is unpickled or run. A child that dies, or thinks for too long, is replaced, and the page gets one line about it.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from oars.label.errors import LabelError

_SECONDS = 30.0
_MEMORY = 16 << 30
_KEPT = 64 << 20  # bytes of thumbnails


class Pictures:
    """Asks the child. Threads take turns."""

    def __init__(self, source: str, group: str | None, grows: bool) -> None:
        self._words = [sys.executable, "-m", "oars.label.pictures", json.dumps([source, group, grows])]
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._thumbs: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def ask(self, what: str, **more: Any) -> tuple[dict[str, Any], bytes]:
        """What the child says, and the bytes it sends along."""
        with self._turn:
            if self._child is None or self._child.poll() is not None:
                self._child = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            try:
                found, data = self._exchange(self._child, {"what": what, **more})
            except (OSError, ValueError, EOFError):
                code = self._end()
                raise LabelError(f"the process that reads images ended ({code}): the image may be damaged; the others "
                                 "can still be labelled", 500) from None
        if "error" in found:
            raise LabelError(found["error"], 500)
        return found, data

    def _exchange(self, child: subprocess.Popen[bytes], question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(question).encode() + b"\n")
        child.stdin.flush()
        return heard(child.stdout, _SECONDS)

    def _end(self) -> str:
        assert self._child is not None
        self._child.kill()
        code = self._child.wait()
        self._child = None
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def thumbs(self, rows: Sequence[int], side: int) -> np.ndarray:
        """Squares of 8 bits; those of images that cannot be read are grey."""
        missing = [row for row in dict.fromkeys(rows) if (row, side) not in self._thumbs]
        made: dict[int, np.ndarray] = {}
        for start in range(0, len(missing), 64):
            part = missing[start:start + 64]
            _, data = self.ask("thumbs", rows=part, size=side)
            tiles = np.frombuffer(data, np.uint8).reshape(len(part), side, side)
            made.update(zip(part, tiles, strict=True))
        out = np.stack([made[row] if row in made else self._thumbs[row, side] for row in rows])
        with self._turn:
            self._thumbs.update(((row, side), tile) for row, tile in made.items())
            while len(self._thumbs) * side * side > _KEPT:
                self._thumbs.popitem(last=False)
        return out

    def close(self) -> None:
        """End the child."""
        with self._turn:
            if self._child is not None:
                self._end()


def heard(pipe: Any, seconds: float) -> tuple[dict[str, Any], bytes]:
    """What a child says: a line of JSON, and the bytes that follow it."""
    until = time.monotonic() + seconds
    head = b""
    while not head.endswith(b"\n"):
        head += _some(pipe, 1, until)
    found = json.loads(head)
    data = bytearray()
    while len(data) < found["bytes"]:
        data += _some(pipe, found["bytes"] - len(data), until)
    return found, bytes(data)


def _some(pipe: Any, size: int, until: float) -> bytes:
    if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
        raise EOFError
    part = os.read(pipe.fileno(), size)
    if not part:
        raise EOFError
    return part


# ---- the child ------------------------------------------------------------------------------------------------------


def begun() -> BinaryIO:
    """Limits for a child that reads images; where it answers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    return out


def main(argv: list[str]) -> int:
    """Answer until the server goes."""
    out = begun()
    from oars.label import pixels
    from oars.label.source import Source

    source: Source | None = None
    for line in sys.stdin:
        try:
            question = json.loads(line)
            source = source or Source(*json.loads(argv[0]))
            if max(question.get("rows", [question.get("row", 0)])) >= source.rows:
                source.grown()
            if question["what"] == "thumbs":
                say(out, {}, _thumbs(source, question["rows"], question["size"]))
                continue
            image = source.images([question["row"]])[0]
            if question["what"] == "profile":
                say(out, {"profile": pixels.profile(image)}, b"")
                continue
            flat = _plain(pixels.grey(image))
            say(out, {"height": flat.shape[0], "width": flat.shape[1], "dtype": flat.dtype.name}, flat.tobytes())
        except Exception as error:  # of damaged data: the server goes on, and says it
            source = None if not isinstance(error, MemoryError) else source
            say(out, {"error": " ".join(str(error).split())[:500] or type(error).__name__}, b"")
    return 0


def _thumbs(source: Any, rows: list[int], side: int) -> bytes:
    from oars.data.errors import DataError
    from oars.label import pixels

    try:
        return b"".join(pixels.thumb(image, side).tobytes() for image in source.images(rows))
    except DataError:
        if len(rows) == 1:
            return np.full((side, side), 128, np.uint8).tobytes()
        return b"".join(_thumbs(source, [row], side) for row in rows)


def _plain(image: np.ndarray) -> np.ndarray:
    """As one of the three types the page knows."""
    if image.dtype in (np.uint8, np.uint16):
        return np.ascontiguousarray(image)
    if image.dtype == bool:
        return image.astype(np.uint8)
    return image.astype("<f4")


def say(out: BinaryIO, found: dict[str, Any], data: bytes) -> None:
    """An answer, as ``heard`` takes it."""
    out.write(json.dumps({**found, "bytes": len(data)}).encode() + b"\n" + data)
    out.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
