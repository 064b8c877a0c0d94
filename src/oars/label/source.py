"""The images that are labelled: any source of ``oars.data.open``, of which one column is the image."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

import oars.data
from oars.data.decode import decode
from oars.data.errors import DataError
from oars.data.labels import image_column

MOST_PIXELS = 64 << 20  # of an encoded image; more is taken for a decompression bomb


class Source:
    """Images by row. It reads in the process that asks: the server asks a child (``pictures.py``)."""

    def __init__(self, path: str, group: str | None = None) -> None:
        self.path = path
        data = oars.data.open(path, group=group)
        self.reader = data.reader
        fields = self.reader.fields
        column = image_column(self.reader)
        if column is None:
            raise DataError(f"{path} has no images: of its columns ({', '.join(fields)}) none has rows of two "
                            "dimensions")
        self.column = column
        self.field = fields[self.column]
        self.rows = len(self.reader)
        if self.rows == 0:
            raise DataError(f"{path} has no rows")

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
