"""Tar archives, strictly: where each member's bytes lie, without unpacking anything.

Python's own ``tarfile`` ends quietly at a damaged header in mid-archive, as if the archive were over. Here that is an
error which names the byte. Names that lead out of the archive (absolute, ``..``), links, devices and other special
members are marked as refused; nothing in this room ever creates a file by a member's name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple, Protocol

from oars.data.errors import DataError

BLOCK = 512
END = bytes(2 * BLOCK)
_LONGEST_NAME = 1 << 16  # bytes in a GNU long name or a pax header; real ones are a few hundred
_REGULAR, _FOLDER = (b"0", b"\0", b"7"), b"5"
_SPECIAL = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
            b"S": "a sparse file"}


class Member(NamedTuple):
    """One file in an archive; ``refused`` says why it must not be used, and is empty for good ones."""

    name: str
    offset: int
    size: int
    refused: str = ""


class Stream(Protocol):
    """Bytes, forwards only."""

    def read(self, count: int, /) -> bytes: ...


class Source(Protocol):
    """What an archive is read from: forwards only."""

    def read(self, count: int, /) -> bytes: ...
    def skip(self, count: int) -> bool: ...
    def tell(self) -> int: ...


class Window:
    """A part of an open file, read by position: an archive within an archive."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._at, self.end = file, start, start + size

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes, fewer at the end."""
        self._file.seek(self._at)
        data = self._file.read(max(0, min(count, self.end - self._at)))
        self._at += len(data)
        return data

    def skip(self, count: int) -> bool:
        """Go on by ``count`` bytes; False if there are fewer."""
        self._at += count
        return self._at <= self.end

    def tell(self) -> int:
        """The position in the file."""
        return self._at


class Unzipped:
    """The content of a gzip file or stream, a piece at a time, so that its size does not matter.

    More than 200 times what was read is taken for a bomb: photographs do not compress, XML does twentyfold.
    """

    def __init__(self, file: Stream, piece: int = 1 << 18) -> None:
        self._file, self._piece = file, piece
        self._inflate, self._ready, self._at = zlib.decompressobj(31), b"", 0
        self._may = 1 << 20  # bytes that may still come out; some for nothing, as small archives are mostly zeros

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes, fewer at the end."""
        parts, missing = [], count
        while missing and (self._ready or self._more()):
            parts.append(self._ready[:missing])
            self._ready = self._ready[missing:]
            missing -= len(parts[-1])
        self._at += count - missing
        return b"".join(parts)

    def skip(self, count: int) -> bool:
        """Go on by ``count`` bytes; False if there are fewer."""
        while count > 0:
            got = len(self.read(min(count, self._piece)))
            if not got:
                return False
            count -= got
        return True

    def tell(self) -> int:
        """The position in the unpacked content."""
        return self._at

    def _more(self) -> bool:
        while not self._ready:
            packed = self._inflate.unconsumed_tail or self._inflate.unused_data
            if not packed:
                packed = self._file.read(self._piece)
                self._may += 200 * len(packed)
            if not packed:
                if not self._inflate.eof:
                    raise DataError("the gzip stream is cut off")
                return False
            if self._inflate.eof:  # another gzip member follows; zeros after the last one are padding
                if not packed.strip(b"\0"):
                    return False
                self._inflate = zlib.decompressobj(31)
            try:
                self._ready = self._inflate.decompress(packed, self._piece)
            except zlib.error as error:
                raise DataError(f"the gzip stream is damaged ({error})") from None
            self._may -= len(self._ready)
            if self._may < 0:
                raise DataError("the gzip stream unpacks to more than 200 times its size")
        return True


def members(source: Source) -> Iterator[Member]:
    """The files of an archive in order, folders left out; a member's bytes may be read while it is the current one."""
    long_name: str | None = None
    pax_size: int | None = None
    while True:
        at = source.tell()
        block = source.read(BLOCK)
        if len(block) < BLOCK:
            raise DataError(f"the archive is cut off at byte {at + len(block)}: it has no end mark")
        if not block.strip(b"\0"):
            return
        name, size, kind = _parse(block, at)
        if kind in (b"L", b"x", b"g", b"K"):
            if size > _LONGEST_NAME:
                raise DataError(f"the archive is damaged at byte {at}: a name of {size} bytes")
            text = source.read(size)
            if len(text) < size or not source.skip(-size % BLOCK):
                raise DataError(f"the archive is cut off at byte {source.tell()}")
            if kind == b"L":
                long_name = _text(text.rstrip(b"\0"))
            elif kind == b"x":
                long_name, pax_size = _pax(text, at, long_name)
            continue
        name, size = long_name or name, size if pax_size is None else pax_size
        long_name = pax_size = None
        start = source.tell()
        if kind != _FOLDER and not (kind in _REGULAR and name.endswith("/")):  # that is how old archives mark a folder
            yield Member(name, start, size, _refusal(name, kind))
        if not source.skip(start + size + (-size % BLOCK) - source.tell()):
            raise DataError(f"the archive is cut off within {name}, which should end at byte {start + size}")


def header(name: str, size: int) -> bytes:
    """A ustar header that is the same whenever and by whomever it is written."""
    block = bytearray(BLOCK)
    for at, text in ((0, name.encode()), (100, b"0000644"), (108, b"0000000"), (116, b"0000000"),
                     (124, b"%011o" % size), (136, b"00000000000"), (148, b" " * 8), (156, b"0"),
                     (257, b"ustar\0" b"00")):
        block[at:at + len(text)] = text
    if len(name.encode()) > 100 or size >= 8 ** 11:
        raise ValueError(f"no plain tar header can hold {name} with {size} bytes")
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padding(size: int) -> bytes:
    """What follows a member of ``size`` bytes."""
    return bytes(-size % BLOCK)


def _parse(block: bytes, at: int) -> tuple[str, int, bytes]:
    """Name, size and type flag of a header."""
    total = sum(block) - sum(block[148:156]) + 8 * 32
    try:
        stated = _number(block[148:156])
        size = _number(block[124:136])
    except ValueError:
        stated = size = -1
    if stated != total or size < 0:
        raise DataError(f"the archive is damaged at byte {at}: no valid header there")
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].split(b"\0", 1)[0]):
        name = prefix + b"/" + name
    kind = block[156:157]
    return _text(name), 0 if kind in (_FOLDER, b"1", b"2", b"3", b"4", b"6") else size, kind


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's way for large sizes
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _pax(text: bytes, at: int, name: str | None) -> tuple[str | None, int | None]:
    """The path and size that a pax header gives to the member after it."""
    size = None
    while text:
        length, _, _ = text.partition(b" ")
        if not length.isdigit() or not 0 < len(length) + 3 <= int(length) <= len(text):
            raise DataError(f"the archive is damaged at byte {at}: a broken pax header")
        key, _, value = text[len(length) + 1:int(length) - 1].partition(b"=")
        text = text[int(length):]
        if key == b"path":
            name = _text(value)
        elif key == b"size" and value.isdigit():
            size = int(value)
    return name, size


def _refusal(name: str, kind: bytes) -> str:
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    if kind not in _REGULAR:
        return f"a member of unknown type {kind!r}"
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or parts[0].endswith(":"):
        return "an absolute name"
    if ".." in parts:
        return "a name with .."
    return ""
