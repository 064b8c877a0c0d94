"""Folders of images: one folder per class, or all in one. Files are listed by name and decoded by content."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from oars.data import cache
from oars.data.errors import DataError
from oars.data.needs import need
from oars.data.reader import Block, Field, Reader

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"P5", b"P6")


def is_image(head: bytes) -> bool:
    """Whether a file that begins like this is an image."""
    return head.startswith(_MAGIC) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


class ImageReader(Reader):
    """The encoded images of a folder; the classes are its subfolders, sorted."""

    def __init__(self, path: str) -> None:
        need("PIL.Image", path)
        self.path = path
        self._files: list[str] = []
        labels: list[int] = []
        classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
        for number, name in enumerate(classes) if classes else [(0, "")]:
            found = sorted(_images(os.path.join(path, name) if name else path))
            self._files += found
            labels += [number] * len(found)
        loose = [e.name for e in os.scandir(path) if classes and e.name.lower().endswith(ENDINGS) and e.is_file()]
        if loose:
            raise DataError(
                f"{path}: images ({sorted(loose)[0]}) beside folders of images ({classes[0]}): which class?"
            )
        if not self._files:
            raise DataError(f"{path}: no images in it")
        self._labels = np.array(labels, np.int64)
        self.rows = len(self._files)
        self.fields = {"image": Field(np.dtype(object), None, encoded=True)}
        if classes:
            self.fields["label"] = Field(np.dtype(np.int64))
            self.label, self.classes = "label", classes

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        return self.take(np.arange(start, stop), names)

    def take(self, rows: np.ndarray, names: Sequence[str]) -> Block:
        block: Block = {}
        if "image" in names:
            block["image"] = np.empty(len(rows), object)
            for at, row in enumerate(rows):
                try:
                    with open(self._files[row], "rb") as file:
                        block["image"][at] = file.read()
                except OSError as error:
                    raise DataError(f"{self._files[row]}: {error.strerror}") from None
        if "label" in names:
            block["label"] = self._labels[rows]
        return block

    def distinct(self, name: str) -> np.ndarray:
        return np.unique(self._labels)

    def place(self, row: int) -> tuple[str, int]:
        return self._files[row], -1

    def state(self) -> str:
        return cache.fingerprint_of_many(self._files)


def _images(path: str) -> list[str]:
    return [
        os.path.join(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if name.lower().endswith(ENDINGS) and not name.startswith(".")
    ]
