"""A reader is a file as rows: ``span(i, j)`` gives rows i to j, ``take([...])`` the rows named, both as columns.

``Flat`` is the one most formats come down to: numbers that lie in a file at ``offset + row * stride``. It asks for
exactly the bytes of the rows wanted, by ``pread``, so readers may be forked and pickled, and a file that has become
shorter is an error and not a crash (as it would be with a memory map).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from oars.data import cache
from oars.data.bad import Bad
from oars.data.errors import DataError

Block = dict[str, np.ndarray]  # columns, all with one entry a row
_KEEP_OPEN = 256
_PAGE = 4096  # a gap shorter than this is read along: the system reads whole pages anyway
_open_files = 0


class Field(NamedTuple):
    """A column: the type of its numbers and the shape of one row of it; None where rows differ in shape."""

    dtype: np.dtype
    shape: tuple[int, ...] | None = ()
    encoded: bool = False  # an image's bytes


class File:
    """A file read by ``pread``; opened when it is first read, in whichever process that is."""

    def __init__(self, path: str) -> None:
        self.path = path
        stat = os.stat(path)
        self.size, self._time = stat.st_size, stat.st_mtime_ns
        self._fd = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fd": -1}

    def __del__(self) -> None:
        global _open_files
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            _open_files -= 1

    def _descriptor(self) -> int:
        """An open one; to be closed again if it is not kept."""
        global _open_files
        fd = self._fd
        if fd < 0:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            if _open_files < _KEEP_OPEN:
                self._fd, _open_files = fd, _open_files + 1
        stat = os.fstat(fd)  # under a microsecond, against rows of two states of the file
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self._time):
            if fd != self._fd:
                os.close(fd)
            raise DataError(f"{self.path}: has changed since it was opened; open it again")
        return fd

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on."""
        fd = self._descriptor()
        try:
            done = os.preadv(fd, [buffer], offset)
            if done < buffer.nbytes:
                rest = buffer.cast("B")
                while done < buffer.nbytes and (got := os.preadv(fd, [rest[done:]], offset + done)):
                    done += got
            if done < buffer.nbytes:
                missing = buffer.nbytes - done
                raise DataError(f"{self.path}, byte {offset + done}: the file ends here, {missing} bytes too early")
        finally:
            if fd != self._fd:
                os.close(fd)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset``."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise DataError(f"{self.path}, byte {offset}: {size} bytes should follow, but the file ends at {self.size}")
        fd = self._descriptor()
        try:
            data = os.pread(fd, size, offset)
        finally:
            if fd != self._fd:
                os.close(fd)
        if len(data) == size:
            return data
        buffer = bytearray(size)  # more than the system reads at once
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)


class Reader:
    """What all readers have. A reader defines ``span``; ``take`` rests on it unless there is a faster way."""

    path: str
    fields: dict[str, Field]
    rows: int
    usual: Sequence[str] = ()  # the columns used unless the user says otherwise; empty: all
    label: str | None = None  # the column that is the label unless the user says otherwise
    classes: list[str] | None = None  # what the label's numbers stand for
    bad: Sequence[Bad] = ()  # rows found bad while opening; they have no number

    def __len__(self) -> int:
        return self.rows

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        """Rows ``start`` to ``stop`` of the columns ``names``."""
        raise NotImplementedError

    def take(self, rows: np.ndarray, names: Sequence[str]) -> Block:
        """The rows numbered ``rows``, in that order, of the columns ``names``."""
        if len(rows) == 0:
            return self.span(0, 0, names)
        if len(rows) == 1 or bool((np.diff(rows) == 1).all()):
            return self.span(int(rows[0]), int(rows[-1]) + 1, names)
        unique, back = np.unique(rows, return_inverse=True)
        pieces = list(runs(unique))
        parts = [self.span(start, stop, names) for start, stop in pieces]
        return {name: np.concatenate([part[name] for part in parts])[back] for name in names}

    def distinct(self, name: str) -> np.ndarray:
        """All values of a column, sorted, each once."""
        seen: list[np.ndarray] = [
            np.unique(self.span(i, min(i + 65536, self.rows), [name])[name]) for i in range(0, self.rows, 65536)
        ]
        return np.unique(np.concatenate(seen)) if seen else self.span(0, 0, [name])[name]

    def place(self, row: int) -> tuple[str, int]:
        """The file and the number in it of a row, for messages."""
        return self.path, row

    def state(self) -> str:
        """Tells this state of the data from any later one."""
        return cache.fingerprint(self.path)


def runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Sorted row numbers as pieces ``start, stop`` without gaps."""
    cuts = np.flatnonzero(np.diff(rows) > 1) + 1
    for piece in np.split(rows, cuts):
        yield int(piece[0]), int(piece[-1]) + 1


class Flat:
    """Rows of one type that lie ``stride`` bytes apart; ``dtype`` may have the file's byte order, rows come native."""

    def __init__(
        self,
        file: File,
        offset: int,
        dtype: np.dtype,
        shape: tuple[int, ...],
        rows: int,
        stride: int | None = None,
        name: str = "",
    ) -> None:
        self.file, self.offset, self.dtype, self.shape = file, offset, dtype, shape
        self.row_bytes = dtype.itemsize
        for size in shape:  # in Python's integers: a header may say anything
            self.row_bytes *= size
        self.stride = self.row_bytes if stride is None else stride
        self._native = dtype.newbyteorder("=")
        self._plain = self.stride == self.row_bytes and dtype == self._native
        end = offset + (rows - 1) * self.stride + self.row_bytes if rows else 0
        if min(offset, rows, self.stride, *shape, 0) < 0 or end > file.size:
            what = f"{name}: " if name else ""
            raise DataError(
                f"{file.path}: {what}{rows} rows of {self.row_bytes} bytes from byte {offset} on should end at "
                f"byte {end}, but the file ends at {file.size}"
            )

        self._inner = tuple(dtype.itemsize * math.prod(shape[at + 1 :]) for at in range(len(shape)))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop``, as an array of its own."""
        rows = stop - start
        if rows <= 0 or self.row_bytes == 0:
            return np.zeros((max(rows, 0), *self.shape), self._native)
        at = self.offset + start * self.stride
        if self._plain:
            rows_: np.ndarray = np.empty((rows, *self.shape), self.dtype)
            self.file.read_into(rows_.data, at)
            return rows_
        if self.stride != self.row_bytes and self.row_bytes >= _PAGE:
            out = np.empty((rows, self.row_bytes), np.uint8)
            for row in range(rows):
                self.file.read_into(out[row].data, at + row * self.stride)
            return self.of(out.reshape(-1), 0, rows, self.row_bytes)
        raw = np.empty((rows - 1) * self.stride + self.row_bytes, np.uint8)
        self.file.read_into(raw.data, at)
        return self.of(raw, 0, rows, self.stride)

    def of(self, raw: np.ndarray, offset: int, rows: int, stride: int) -> np.ndarray:
        """Rows that lie in bytes, ``stride`` apart, in this machine's byte order and without gaps."""
        values: np.ndarray = np.ndarray((rows, *self.shape), self.dtype, raw.data, offset, (stride, *self._inner))
        return values.astype(self._native)


class FlatReader(Reader):
    """A file whose columns are all flat."""

    def __init__(self, path: str, columns: dict[str, Flat], rows: int) -> None:
        self.path, self.rows, self._columns = path, rows, columns
        self.fields = {name: Field(flat.dtype.newbyteorder("="), flat.shape) for name, flat in columns.items()}

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        return {name: self._columns[name].read(start, stop) for name in names}


class Joined(Reader):
    """Several files, one after the other, as one."""

    def __init__(self, path: str, readers: Sequence[Reader]) -> None:
        self.path, self.readers = path, list(readers)
        self.starts = np.concatenate([[0], np.cumsum([len(reader) for reader in readers], dtype=np.int64)])
        self.rows = int(self.starts[-1])
        self.fields = dict(readers[0].fields)
        self.label, self.classes, self.usual = readers[0].label, readers[0].classes, readers[0].usual
        self.bad = [bad for reader in readers for bad in reader.bad]
        for reader in readers[1:]:
            self._agree(reader)

    def _agree(self, other: Reader) -> None:
        first = self.readers[0].path
        if other.classes != self.classes:
            raise DataError(f"{other.path}: its classes are not {first}'s; open them separately")
        if list(other.fields) != list(self.fields):
            raise DataError(
                f"{other.path}: its columns {', '.join(other.fields)} are not {first}'s "
                f"{', '.join(self.fields)}; open them separately, or choose columns=[...]"
            )
        for name, field in other.fields.items():
            mine = self.fields[name]
            if field.shape != mine.shape or (field.dtype.kind in "USO") != (mine.dtype.kind in "USO"):
                raise DataError(
                    f"{other.path}: column {name} has rows of {field.dtype} {field.shape}, in {first} of "
                    f"{mine.dtype} {mine.shape}"
                )
            self.fields[name] = Field(np.promote_types(field.dtype, mine.dtype), mine.shape)

    def _part(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, "right")) - 1

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        if start >= stop:
            return self._cast(self.readers[0].span(0, 0, names))
        parts = []
        while start < stop:
            at = self._part(start)
            first = int(self.starts[at])
            end = min(stop, int(self.starts[at + 1]))
            parts.append(self._cast(self.readers[at].span(start - first, end - first, names)))
            start = end
        return parts[0] if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in names}

    def take(self, rows: np.ndarray, names: Sequence[str]) -> Block:
        if len(rows) == 0:
            return self.span(0, 0, names)
        owner = np.searchsorted(self.starts, rows, "right") - 1
        order = np.argsort(owner, kind="stable")
        parts = []
        for at in np.unique(owner):
            mine = rows[order[owner[order] == at]] - self.starts[at]
            parts.append(self._cast(self.readers[at].take(mine, names)))
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return {name: np.concatenate([part[name] for part in parts])[back] for name in names}

    def _cast(self, block: Block) -> Block:
        for name, values in block.items():
            if values.dtype != self.fields[name].dtype and values.dtype.kind not in "USO":
                block[name] = values.astype(self.fields[name].dtype)
        return block

    def distinct(self, name: str) -> np.ndarray:
        return np.unique(np.concatenate([reader.distinct(name) for reader in self.readers]))

    def place(self, row: int) -> tuple[str, int]:
        at = self._part(row)
        return self.readers[at].place(row - int(self.starts[at]))

    def state(self) -> str:
        return hashlib.sha256("\n".join(reader.state() for reader in self.readers).encode()).hexdigest()[:32]
