"""Labels that people gave to rows of a source (``oars label``), as one more column of it.

A file of labels knows rows by their numbers, which shift when a source is written anew. So it also has a checksum of
each image, and some of them are compared before any label is used.
"""

from __future__ import annotations

import csv
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from oars.data.decode import decode
from oars.data.errors import DataError
from oars.data.reader import Block, Field, Reader

HOW = ("human", "page", "model", "exam", "audit", "disputed")
USUAL = ("human", "page", "audit", "model")  # what a training may use: the exam is to test it
_COMPARED = 16
_NEEDED = {"row", "label", "class", "how"}


class Labelled(Reader):
    """A reader with a column ``label`` besides its own; rows without one have -1."""

    def __init__(self, reader: Reader, labels: np.ndarray, classes: list[str]) -> None:
        self._reader, self._labels = reader, labels
        self.path, self.rows, self.bad = reader.path, len(reader), reader.bad
        self.fields = {**reader.fields, "label": Field(np.dtype(np.int64))}
        self.label, self.classes = "label", classes
        image = image_column(reader)  # what was labelled; a file may hold labels of its own, which are not meant
        self.usual = [image] if image else reader.usual

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        block = self._reader.span(start, stop, [name for name in names if name != "label"])
        return {**block, "label": self._labels[start:stop]} if "label" in names else block

    def take(self, rows: np.ndarray, names: Sequence[str]) -> Block:
        block = self._reader.take(rows, [name for name in names if name != "label"])
        return {**block, "label": self._labels[rows]} if "label" in names else block

    def distinct(self, name: str) -> np.ndarray:
        return np.unique(self._labels) if name == "label" else self._reader.distinct(name)

    def place(self, row: int) -> tuple[str, int]:
        return self._reader.place(row)

    def state(self) -> str:
        return f"{self._reader.state()}-{zlib.crc32(self._labels.tobytes()):08x}"


def labelled(reader: Reader, path: str | os.PathLike[str], how: Sequence[str] | None) -> tuple[Labelled, np.ndarray]:
    """The reader with its labels, and the rows that have one which was given in one of the ways ``how``."""
    ways = USUAL if how is None else tuple(how)
    if isinstance(how, str) or not set(ways) <= set(HOW) - {"disputed"}:
        raise ValueError(f"how={how!r}: give a list of some of {', '.join(HOW[:-1])}")
    named = os.fspath(path)
    lines = _lines(named)
    chosen = [line for line in lines if line["how"] in ways and line["label"]]
    if not chosen:
        raise DataError(f"{named}: none of its {len(lines)} labels is one of {', '.join(ways)}")
    names: dict[int, str] = {}
    labels = np.full(len(reader), -1, np.int64)
    for line in lines:
        try:
            row = int(line["row"])
            number = int(line["class"]) if line["label"] else -1
        except ValueError:
            raise DataError(f"{named}: {line['row']!r} and {line['class']!r} should be a row and a class") from None
        if not 0 <= row < len(reader):
            raise DataError(f"{named}: row {row} of {len(reader)}: {reader.path} is not the source that was labelled")
        if number >= 0 and names.setdefault(number, line["label"]) != line["label"]:
            raise DataError(f"{named}: class {number} is both {names[number]} and {line['label']}")
        labels[row] = number if line["how"] in ways else -1
    if names and sorted(names)[-1] >= 10_000:
        raise DataError(f"{named}: class {max(names)}: there are not that many")
    _compare(reader, named, chosen)
    classes = [names.get(number, str(number)) for number in range(max(names) + 1)]
    return Labelled(reader, labels, [_plain(name) for name in classes]), np.flatnonzero(labels >= 0)


def _lines(named: str) -> list[dict[str, str]]:
    try:
        with open(named, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = _NEEDED - set(table.fieldnames or ())
            if missing:
                raise DataError(f"{named}: it has no column {sorted(missing)[0]}: it is no file of oars label --export")
            lines = [{name: value or "" for name, value in line.items() if name is not None} for line in table]
    except OSError as error:
        raise DataError(f"{named}: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{named}: damaged: {error}") from None
    return lines


def _plain(name: str) -> str:
    """Without what protects spreadsheets from formulas."""
    return name[1:] if name[:1] == "'" and name[1:2] in ("=", "+", "-", "@", "\t", "\r") else name


def _compare(reader: Reader, named: str, lines: list[dict[str, Any]]) -> None:
    """Some images, all over the file, are still those that were labelled."""
    if image_column(reader) is None:  # columns=[...] without it
        return
    checked = [line for line in lines if line.get("check", "") not in ("", "00000000")]
    picked = {int(at) for at in np.linspace(0, len(checked) - 1, _COMPARED)} if checked else set()
    for at in sorted(picked):
        row = int(checked[at]["row"])
        if f"{checksum(reader, row):08x}" != checked[at]["check"]:
            raise DataError(f"{named}: row {row} of {reader.path} is not the image that was labelled: the source has "
                            "changed since; label it again, or use the file that was labelled")


def image_column(reader: Reader) -> str | None:
    """The column that is the image of a row, if there is one."""
    return next((name for name, field in reader.fields.items() if field.encoded or (
        field.shape is not None and len(field.shape) >= 2 and field.dtype.kind in "biuf")), None)


def checksum(reader: Reader, row: int) -> int:
    """Of the image of a row: tells it from others, wherever it has gone."""
    column = image_column(reader)
    assert column is not None
    value = reader.take(np.array([row]), [column])[column][0]
    return checksum_of(decode(value) if reader.fields[column].encoded else value)


def checksum_of(image: np.ndarray) -> int:
    """Of the pixels."""
    return zlib.crc32(np.ascontiguousarray(image).tobytes())
