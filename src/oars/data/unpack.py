"""Compressed files, unpacked once into the cache, with a bound on how far they may grow."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from oars.data import cache
from oars.data.bad import one_line
from oars.data.errors import DataError
from oars.data.needs import need

MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "Zstandard"}
MOST_TIMES = 200  # larger than this many times the file: text and images do not compress that well, bombs do
ALWAYS = 64 << 20  # but this much is harmless
_PIECE = 1 << 20


def method(head: bytes) -> str | None:
    """How a file that begins with ``head`` is compressed."""
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)


def opened(path: str, how: str) -> IO[bytes] | Any:
    """A stream of what is inside."""
    if how == "gzip":
        return gzip.open(path, "rb")
    if how == "bzip2":
        return bz2.open(path, "rb")
    pyarrow = need("pyarrow", path)
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(open(path, "rb"), "r"), "zstd")


def peek(path: str, how: str, size: int) -> bytes:
    """The first ``size`` bytes inside."""
    return guarded(path, how, lambda stream: stream.read(size))


def guarded(path: str, how: str, act: Callable[[Any], Any]) -> Any:
    """``act(stream)``; damage is reported in one line."""
    try:
        with opened(path, how) as stream:
            return act(stream)
    except (EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
        if isinstance(error, DataError):
            raise
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise
        raise DataError(f"{path}: damaged {how} data ({one_line(error)})") from None


def unpacked(path: str, how: str) -> str:
    """The path of the unpacked copy in the cache."""
    with open(path, "rb") as file:
        limit = max(ALWAYS, MOST_TIMES * file.seek(0, 2))
    return str(
        cache.entry(path, "unpacked", lambda target: guarded(path, how, lambda s: bounded(s, target, limit, path)))
    )


def bounded(stream: Any, target: Path, limit: int, path: str) -> None:
    """Copy a stream to ``target``, but no more than ``limit`` bytes of it."""
    done = 0
    with open(target, "wb") as out:
        while piece := stream.read(_PIECE):
            done += len(piece)
            if done > limit:
                raise DataError(
                    f"{path}: grows to more than {limit} bytes, as a decompression bomb would; if it is none, "
                    "unpack it yourself"
                )
            if shutil.disk_usage(target.parent).free < len(piece) + (64 << 20):
                raise DataError(
                    f"{path}: no room in {target.parent} to unpack it; set OARS_CACHE to a folder with room"
                )
            out.write(piece)
