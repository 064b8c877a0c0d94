"""The images that are labelled: any source of ``oars.data.open``, of which one column is the image.

A source that grows is an HDF5 file that somebody writes (SWMR), or a folder of images: rows are added at its end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

import oars.data
from oars.data.bad import one_line
from oars.data.decode import decode
from oars.data.errors import DataError
from oars.data.labels import image_column
from oars.data.reader import Block, Field, Reader

MOST_PIXELS = 64 << 20  # of an encoded image; more is taken for a decompression bomb


class Source:
    """Images by row. It reads in the process that asks: the server asks a child (``pictures.py``)."""

    def __init__(self, path: str, group: str | None = None, grows: bool = False) -> None:
        self.path, self._group = path, group
        self.reader = Growing(path, group) if grows and not os.path.isdir(path) else oars.data.open(
            path, group=group).reader
        fields = self.reader.fields
        column = image_column(self.reader)
        if column is None:
            raise DataError(f"{path} has no images: of its columns ({', '.join(fields)}) none has rows of two "
                            "dimensions")
        self.column = column
        self.field = fields[self.column]
        self.rows = len(self.reader)
        if self.rows == 0 and not grows:
            raise DataError(f"{path} has no rows")

    def grown(self) -> int:
        """Look again; how many rows there are now. It is an error if those of before are not the first of them."""
        if isinstance(self.reader, Growing):
            now = self.reader.look()
        else:
            newer = oars.data.open(self.path, group=self._group).reader
            now = len(newer)
            for row in range(min(self.rows, now)):
                if newer.place(row) != self.reader.place(row):
                    raise DataError(f"{self.path}: {os.path.basename(newer.place(row)[0])} came, which stands before "
                                    f"{os.path.basename(self.reader.place(row)[0])} by name: rows would shift; number "
                                    "files with leading zeros")
            self.reader = newer
        if now < self.rows:
            raise DataError(f"{self.path}: has changed: it has {now} rows and had {self.rows}")
        self.rows = now
        return now

    def images(self, rows: Sequence[int]) -> list[np.ndarray]:
        """The images of these rows."""
        block = self.reader.take(np.asarray(rows, np.int64), [self.column])[self.column]
        if not self.field.encoded:
            return list(block)
        return [self._decoded(data, row) for data, row in zip(block, rows, strict=True)]

    def _decoded(self, data: bytes, row: int) -> np.ndarray:
        import io

        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as head:
                width, height, mode = head.width, head.height, head.mode
        except Exception as error:  # decoders of damaged files raise almost anything
            raise DataError(f"{self.key(row)}: no image ({' '.join(str(error).split())[:200]})") from None
        if width * height > MOST_PIXELS:
            raise DataError(f"{self.key(row)}: {width} × {height} pixels, more than {MOST_PIXELS:,}: it is not decoded")
        if mode.startswith("I") or mode == "F":  # 16 and 32 bits, as detectors write TIFF and PNG
            return np.asarray(Image.open(io.BytesIO(data)))
        return decode(data)

    def key(self, row: int) -> str:
        """What the row is called beside its number: its file, and its number there."""
        file, number = self.reader.place(row)
        base = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        name = os.path.relpath(file, base or ".")
        return name if number < 0 else f"{name}:{number}"

    def state(self) -> str:
        """Changes when the source does."""
        return self.reader.state()


class Growing(Reader):
    """The images of an HDF5 file that another program may be writing. Each process opens the file for itself."""

    def __init__(self, path: str, group: str | None) -> None:
        self.path = path
        self._opened: tuple[int, Any] | None = None
        self._inherited: list[Any] = []  # opened before a fork: never closed here
        with open(path, "rb") as file:
            if file.read(8) != b"\x89HDF\r\n\x1a\n":
                raise DataError(f"{path}: only an HDF5 file or a folder of images can be followed as it grows")
        images = self._found(group)
        self._name = images.name
        self.rows = len(images)
        self.fields = {self._name: Field(images.dtype.newbyteorder("="), tuple(images.shape[1:]))}

    def look(self) -> int:
        """How many rows there are now."""
        images = self._images()
        images.refresh()
        self.rows = len(images)
        return self.rows

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        try:
            block = {name: np.asarray(self._images()[start:stop]) for name in names}
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(f"{self.path}: {self._name}, rows {start} to {stop - 1}: {one_line(error)}") from None
        if any(len(values) != stop - start for values in block.values()):
            raise DataError(f"{self.path}: {self._name}, rows {start} to {stop - 1} are not there yet")
        return block

    def _images(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            if self._opened:
                self._inherited.append(self._opened[1])
            self._opened = os.getpid(), self._file()[self._name]
        return self._opened[1]

    def _file(self) -> Any:
        import h5py

        try:
            return h5py.File(self.path, "r", swmr=True)
        except OSError as error:
            raise DataError(f"{self.path}: {one_line(error)}; to be read while it is written, a file is written with "
                            "libver='latest' and swmr_mode = True") from None

    def _found(self, group: str | None) -> Any:
        """The first data set of images, as ``image_column`` would choose it."""
        import h5py

        file = self._file()
        if group and group not in file:
            raise DataError(f"{self.path}: no group {group!r}")
        found: list[Any] = []
        (file[group] if group else file).visititems(lambda name, item: found.append(item) if isinstance(
            item, h5py.Dataset) and item.ndim >= 3 and item.dtype.kind in "biuf" else None)
        if not found:
            raise DataError(f"{self.path} has no images: no data set in it has rows of two dimensions")
        return found[0]
