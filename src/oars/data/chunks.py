"""Chunked data sets of HDF5 files, read without the library: where each chunk lies is known from the child."""

from __future__ import annotations

import itertools
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from oars.data.errors import DataError
from oars.data.reader import File

_SMALL = 1 << 16  # gzip grows by 1032 at most: so few bytes need no bound, and without one it is faster
_CACHE = 32 << 20  # bytes of unpacked chunks kept for the rows that are asked for next


class Chunked:
    """Rows from chunks; the ones used last stay unpacked."""

    def __init__(self, file: File, name: str, dtype: np.dtype, shape: tuple[int, ...], layout: dict[str, Any]) -> None:
        self.file, self.name, self.dtype, self.shape = file, name, dtype, shape
        self.chunk = tuple(layout["chunk"])
        self.filters: list[str] = layout["filters"]
        self.chunk_bytes = dtype.itemsize
        for size in self.chunk:
            self.chunk_bytes *= size
        if min(self.chunk) < 1 or self.chunk_bytes >= 1 << 32:
            raise DataError(f"{file.path}: {name}: chunks of {self.chunk} are not possible")
        self._fill = bytes.fromhex(layout["fill"])
        self._grid = tuple(-(-size // chunk) for size, chunk in zip(shape, self.chunk, strict=True))
        try:
            table = np.array(layout["chunks"], np.int64).reshape(-1, len(shape) + 3)
        except OverflowError:
            raise DataError(f"{file.path}: {name}: a chunk that cannot be in any file: damaged") from None
        where, astray = np.divmod(table[:, : len(shape)], np.array(self.chunk))
        if astray.any() or (where < 0).any() or (where >= np.array(self._grid)).any():
            raise DataError(f"{file.path}: {name}: a chunk that lies outside of the data set: damaged")
        keys = np.zeros(len(table), np.int64)
        for axis, size in enumerate(self._grid):
            keys = keys * size + where[:, axis]
        order = np.argsort(keys, kind="stable")
        if len(np.unique(keys)) < len(keys):
            raise DataError(f"{file.path}: {name}: two chunks for the same rows: damaged")
        self._keys, self._places = keys[order], table[order, len(shape) :]
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop``."""
        out = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype.newbyteorder("="))
        if not out.size:
            return out
        rows = self.chunk[0]
        if self.chunk[1:] == self.shape[1:]:  # as most are: a chunk is some whole rows
            for number in range(start // rows, (stop - 1) // rows + 1):
                first, last = max(number * rows, start), min((number + 1) * rows, stop)
                where, part = (number, *(0 for _ in self.chunk[1:])), out[first - start : last - start]
                if last - first == rows and out.dtype == self.dtype:  # all of it: unpack it right where it belongs
                    self._unpacked(self._key(where), where, part)
                else:
                    part[:] = self._chunk(where)[first - number * rows : last - number * rows]
            return out
        axes = [range(start // rows, (stop - 1) // rows + 1), *map(range, self._grid[1:])]
        for where in itertools.product(*axes):
            chunk = self._chunk(where)
            low = [at * size for at, size in zip(where, self.chunk, strict=True)]
            high = [min(a + size, whole) for a, size, whole in zip(low, self.chunk, self.shape, strict=True)]
            first, last = max(low[0], start), min(high[0], stop)
            target = (slice(first - start, last - start), *map(slice, low[1:], high[1:]))
            source = (
                slice(first - low[0], last - low[0]),
                *(slice(0, b - a) for a, b in zip(low[1:], high[1:], strict=True)),
            )
            out[target] = chunk[source]
        return out

    def _key(self, where: tuple[int, ...]) -> int:
        key = 0
        for at, size in zip(where, self._grid, strict=True):
            key = key * size + at
        return key

    def _chunk(self, where: tuple[int, ...]) -> np.ndarray:
        """A chunk, unpacked, and kept: other rows of it may be asked for next."""
        key = self._key(where)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept
        chunk = self._unpacked(key, where)
        self._kept[key] = chunk
        while len(self._kept) > 1 and len(self._kept) * self.chunk_bytes > _CACHE:
            self._kept.popitem(last=False)
        return chunk

    def _unpacked(self, key: int, where: tuple[int, ...], out: np.ndarray | None = None) -> np.ndarray:
        """A chunk as an array: ``out`` if given."""
        at = int(np.searchsorted(self._keys, key))
        out = np.empty(self.chunk, self.dtype) if out is None else out
        if at == len(self._keys) or self._keys[at] != key:  # never written
            out[...] = np.frombuffer(self._fill, self.dtype)[0]
            return out
        mask, offset, size = self._places[at].tolist()

        def place() -> str:
            return f"{self.file.path}: {self.name}, row {where[0] * self.chunk[0]}, byte {offset}"

        if size > self.chunk_bytes * 2 + 4096:
            raise DataError(f"{place()}: a chunk of {size} bytes where {self.chunk_bytes} are wanted")
        data: Any = self.file.read(offset, size)
        used = [name for number, name in enumerate(self.filters) if not mask >> number & 1]
        for name in reversed(used):
            if name != "shuffle" or name is not used[0]:
                data = _UNDO[name](data, self, place)
        if len(data) != self.chunk_bytes:
            raise DataError(f"{place()}: a chunk unpacks to {len(data)} bytes, not {self.chunk_bytes}")
        raw = out.reshape(-1).view(np.uint8)
        if used[:1] == ["shuffle"]:  # was done first, so it is undone last
            unshuffle(np.frombuffer(data, np.uint8), raw, self.dtype.itemsize)
        else:
            raw[:] = np.frombuffer(data, np.uint8)
        return out


def _gunzip(data: Any, chunked: Chunked, place: Callable[[], str]) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        if len(data) <= _SMALL:
            return zlib.decompress(data, bufsize=chunked.chunk_bytes)
        out = unpacker.decompress(data, chunked.chunk_bytes + 5)  # a checksum may be inside
    except zlib.error as error:
        raise DataError(f"{place()}: a damaged chunk ({error})") from None
    if not unpacker.eof:
        raise DataError(f"{place()}: a damaged chunk (its data do not end where they should)")
    return out


def unshuffle(data: np.ndarray, out: np.ndarray, width: int) -> None:
    """First bytes of all numbers, then all second bytes, ...: back to numbers; what is left over stands as it is."""
    count = len(data) // width
    columns = out[: count * width].reshape(count, width)
    for at in range(width):
        columns[:, at] = data[at * count : (at + 1) * count]
    out[count * width :] = data[count * width :]


def _unshuffle(data: Any, chunked: Chunked, place: Callable[[], str]) -> Any:
    """Where it is not the last thing to undo."""
    out = np.empty(len(data), np.uint8)
    unshuffle(np.frombuffer(data, np.uint8), out, chunked.dtype.itemsize)
    return out.data


def _fletcher(data: Any, chunked: Chunked, place: Callable[[], str]) -> bytes:
    if len(data) < 4:
        raise DataError(f"{place()}: a damaged chunk (no room for its checksum)")
    body, stored = data[:-4], int.from_bytes(data[-4:], "little")
    if _fletcher32(body) not in _same(stored):
        raise DataError(f"{place()}: a damaged chunk (Fletcher-32 differs)")
    return body


def _fletcher32(data: bytes) -> int:
    words = np.frombuffer(data[: len(data) // 2 * 2], ">u2").astype(np.uint64)
    if len(data) % 2:
        words = np.append(words, np.uint64(data[-1] << 8))
    first = second = 0
    for at in range(0, len(words), 1 << 16):  # sums stay below 2 ** 64
        part = words[at : at + (1 << 16)]
        count = len(part)
        second = (second + first * count + int((part * np.arange(count, 0, -1, dtype=np.uint64)).sum())) % 65535
        first = (first + int(part.sum())) % 65535
    return second << 16 | first


def _same(stored: int) -> set[int]:
    """A sum of 0 may be stored as 65535."""
    return {(stored >> 16) % 65535 << 16 | (stored & 65535) % 65535}


_UNDO = {"gzip": _gunzip, "shuffle": _unshuffle, "fletcher32": _fletcher}
