"""Packed images as rows: tar shards (``shards.py``) and TFRecords as TensorFlow's Inception scripts wrote them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from oars.data import cache, shards, tfrecord
from oars.data.reader import Block, Field, Reader

_TEXT = Field(np.dtype(object))


class PackedReader(Reader):
    """Samples of ``packed``, which has ``sample(i)``. Besides image and label, ``columns=`` may ask for the others."""

    fields = {
        "image": Field(np.dtype(object), None, encoded=True),
        "label": Field(np.dtype(np.int64)),
        "boxes": Field(np.dtype(object), None),
        "key": _TEXT,
        "name": _TEXT,
        "class": _TEXT,
    }
    usual = ("image", "label")
    label = "label"

    def __init__(self, path: str, packed: Any, files: Sequence[Any]) -> None:
        self.path, self._packed, self._files = path, packed, [os.fspath(file) for file in files]
        self.rows = len(packed)
        self.classes = list(getattr(packed, "classes", None) or []) or None

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        return self.take(np.arange(start, stop), names)

    def take(self, rows: np.ndarray, names: Sequence[str]) -> Block:
        block: Block = {name: np.empty(len(rows), self.fields[name].dtype) for name in names}
        for at, row in enumerate(rows.tolist()):
            sample = self._sample(row, names)
            for name in names:
                block[name][at] = sample.get(name, "")
        return block

    def _sample(self, row: int, names: Sequence[str]) -> dict[str, Any]:
        if set(names) <= set(self.usual) and hasattr(self._packed, "image"):  # without its JSON
            image, label = self._packed.image(row)
            return {"image": image, "label": label}
        return self._packed.sample(row)

    def distinct(self, name: str) -> np.ndarray:
        labels = getattr(self._packed, "labels", None)
        return np.unique(labels) if name == "label" and labels is not None else super().distinct(name)

    def state(self) -> str:
        return cache.fingerprint_of_many(self._files)


def open_shards(path: str) -> Reader:
    """A packed folder, or WebDataset's tar files."""
    packed = shards.Reader(path)
    return PackedReader(path, packed, packed._files)


def open_tfrecord(path: str) -> Reader:
    """One TFRecord file."""
    packed = tfrecord.Reader(path)
    return PackedReader(path, packed, packed.files)
