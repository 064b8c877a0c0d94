"""Where every row of a CSV file begins, what its columns hold, and which rows are bad: found once, kept in the cache.

The file is read in blocks by several threads. First the ends of lines: a line feed inside quotes ends no row, and
whether a block begins inside quotes is known once the quotes before it are counted. Counting is exact as long as every
quote opens a field, closes one or is doubled; where one does not (``5" pipe``) the file is gone through again field by
field. Then pyarrow parses the rows in groups, which tells the types (of the whole file, so that they depend on no
rank's part of it) and the rows that do not fit.

Offsets are kept as one 64-bit base every 256 rows and short distances from it: about 2 bytes a row.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oars.data.csv_text import MISSING, Style, arrow_type, check, kind_of, options, parse
from oars.data.errors import DataError
from oars.data.reader import File

BLOCK = 8 << 20
_EVERY = 256
_LONGEST = 1 << 30  # a row; pyarrow parses less than 2 GiB at a time
_MOST_TEXTS = 10_000
_MOST_SOUGHT = 10_000


class Lines(NamedTuple):
    """What one block tells of its line ends: all relative to the block."""

    ends: np.ndarray  # one past each line feed
    after_cr: np.ndarray  # whether a carriage return stands before it
    quotes: np.ndarray
    opens: np.ndarray  # whether a quote may open a field
    closes: np.ndarray  # whether it may close one


class _Stray(Exception):
    """A quote in the middle of a field."""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build(file: File, style: Style, target: Path) -> None:
    """Write the index of ``file`` to ``target``."""
    with ThreadPoolExecutor(cores()) as pool:
        try:
            starts, closed = _starts(file, style, pool)
        except _Stray:
            starts, closed = _starts_exactly(file, style)
        if len(starts) > 1 and int(np.diff(starts).max()) > _LONGEST:
            row = int(np.diff(starts).argmax())
            raise DataError(
                f"{file.path}, row {row}, byte {starts[row]}: a row of more than 1 GiB; is a quote missing?"
            )
        about = _columns(file, style, starts, closed, pool)
    base = starts[::_EVERY]
    distance = starts - np.repeat(base, _EVERY)[: len(starts)]
    largest = int(distance.max(initial=0))
    distance = distance.astype(np.uint16 if largest < 1 << 16 else np.uint32 if largest < 1 << 32 else np.uint64)
    about |= {"rows": len(starts) - 1, "width": distance.dtype.itemsize}
    head = json.dumps(about).encode()
    with open(target, "wb") as out:
        out.write(len(head).to_bytes(8, "little"))
        out.write(head + b" " * (-len(head) % 8))
        out.write(base.astype("<i8").tobytes())
        out.write(distance.astype(distance.dtype.newbyteorder("<")).tobytes())


class Index:
    """An index as it lies in the cache."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self.about: dict[str, Any] = json.loads(file.read(size))
        self.rows: int = self.about["rows"]
        at = 8 + size + -size % 8
        count = self.rows + 1
        self._base = np.memmap(path, "<i8", "r", at, (-(-count // _EVERY),))
        self._distance = np.memmap(path, f"<u{self.about['width']}", "r", at + 8 * len(self._base), (count,))

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """Where these rows begin; the number after the last row is where that one ends."""
        return self._base[rows // _EVERY] + self._distance[rows].astype(np.int64)


# ---- line ends ----------------------------------------------------------------------------------------------------


def _lines(file: File, start: int, stop: int, delimiter: int) -> Lines:
    data = file.read(start, stop - start)
    raw = np.frombuffer(data, np.uint8)
    feeds = np.flatnonzero(raw == 10)
    before = np.where(feeds > 0, raw[feeds - 1], 0) if len(raw) else feeds
    if start and len(feeds) and feeds[0] == 0:
        before[0] = file.read(start - 1, 1)[0]
    none = np.empty(0, np.int64)
    if b'"' not in data:
        return Lines(feeds + 1, before == 13, none, none, none)
    quotes = np.flatnonzero(raw == 34)
    left = file.read(start - 1, 1) if start else b"\n"
    right = file.read(stop, 1) if stop < file.size else b"\n"
    around = np.frombuffer(left + data + right, np.uint8)
    edge = np.zeros(256, bool)
    edge[[10, 13, 34, delimiter]] = True
    return Lines(feeds + 1, before == 13, quotes, edge[around[quotes]], edge[around[quotes + 2]])


def _starts(file: File, style: Style, pool: ThreadPoolExecutor) -> tuple[np.ndarray, bool]:
    """Where rows begin, and the end of the last; and whether the last quote was closed."""
    delimiter = ord(style.delimiter)
    cuts = [*range(style.first, file.size, BLOCK), file.size]
    inside, last, found = 0, style.first, []
    for lines, start in zip(
        pool.map(lambda at: _lines(file, at, min(at + BLOCK, file.size), delimiter), cuts[:-1]), cuts, strict=False
    ):
        ends, after_cr = lines.ends, lines.after_cr
        if len(lines.quotes):
            open_before = (np.arange(len(lines.quotes)) + inside) & 1 == 1
            if start == style.first and not open_before[0] and lines.quotes[0] == 0:
                lines.opens[0] = True
            if not np.where(open_before, lines.closes, lines.opens).all():
                raise _Stray
        if inside or len(lines.quotes):
            outside = (np.searchsorted(lines.quotes, ends) + inside) & 1 == 0
            ends, after_cr = ends[outside], after_cr[outside]
            inside = (inside + len(lines.quotes)) & 1
        if len(ends):
            found.append(_without_blank(ends + start, after_cr, last))
            last = int(ends[-1]) + start
    return _closing(found, last, file.size, style.first), not inside


def _without_blank(ends: np.ndarray, after_cr: np.ndarray, last: int) -> np.ndarray:
    """The beginnings of the lines that end at ``ends`` and are not empty."""
    starts = np.concatenate([[last], ends[:-1]])
    length = ends - starts
    return starts[(length > 2) | ((length == 2) & ~after_cr)]


def _closing(found: list[np.ndarray], last: int, size: int, first: int) -> np.ndarray:
    starts = (
        np.concatenate([*found, np.array([last] if last < size else [], np.int64)])
        if found or last < size
        else (np.empty(0, np.int64))
    )
    return np.concatenate([starts, [size]]).astype(np.int64) if len(starts) else np.array([max(first, size)], np.int64)


def _starts_exactly(file: File, style: Style) -> tuple[np.ndarray, bool]:
    """The same, where quotes stand inside of fields: only one at a field's beginning opens it."""
    mark = re.escape(style.delimiter.encode())
    token = re.compile(rb"(?:\A|(?<=[\n\r" + mark + rb']))"(?:[^"]|"")*("?)|\n')
    data = file.read(0, file.size)
    ends, closed = [], True
    for found in token.finditer(data, style.first):
        if found[0] == b"\n":
            ends.append(found.end())
        elif not found[1]:
            closed = False
    every = np.array(ends, np.int64)
    after_cr = np.array([end >= 2 and data[end - 2] == 13 for end in ends], bool)
    found_ = [_without_blank(every, after_cr, style.first)] if ends else []
    return _closing(found_, ends[-1] if ends else style.first, file.size, style.first), closed


# ---- columns ------------------------------------------------------------------------------------------------------


def _groups(starts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Rows in groups of about a block."""
    row, rows = 0, len(starts) - 1
    while row < rows:
        stop = int(np.searchsorted(starts, starts[row] + BLOCK, "right")) - 1
        stop = min(max(stop, row + 1), rows)
        yield row, stop
        row = stop


class _Group(NamedTuple):
    kinds: list[str]
    missing: list[bool]
    texts: list[set[str] | None]
    bad: list[tuple[int, str]]
    spelled: list[str]  # how missing values are written here: to look for fewer is faster


def _columns(file: File, style: Style, starts: np.ndarray, closed: bool, pool: ThreadPoolExecutor) -> dict[str, Any]:
    rows = len(starts) - 1
    bad: list[tuple[int, str]] = []
    if not closed:  # nothing is known of what follows the quote
        rows -= 1
        bad.append((rows, "a quote is opened and never closed"))
    spelled = {""}
    kinds, missing = ["empty"] * len(style.names), [False] * len(style.names)
    texts: list[set[str] | None] = [set() for _ in style.names]
    for group in pool.map(lambda rows: _group(file, style, starts, *rows), _groups(starts[: rows + 1])):
        bad += group.bad
        spelled.update(group.spelled)
        for at in range(len(kinds)):
            kinds[at] = _either(kinds[at], group.kinds[at])
            missing[at] |= group.missing[at]
            mine, its = texts[at], group.texts[at]
            texts[at] = None if mine is None or its is None or len(mine) + len(its) > _MOST_TEXTS else mine | its
    for at, kind in enumerate(kinds):
        if missing[at] and kind in ("int", "bool"):
            kinds[at] = {"int": "float", "bool": "bool or missing"}[kind]
    return {
        "kinds": kinds,
        "missing": sorted(spelled),
        "texts": [
            sorted(seen) if kind == "text" and seen is not None else None
            for kind, seen in zip(kinds, texts, strict=True)
        ],
        "bad": [[row, int(starts[row]), reason] for row, reason in sorted(bad)],
    }


def _either(a: str, b: str) -> str:
    if a == b or b == "empty":
        return a
    if a == "empty":
        return b
    return "float" if {a, b} == {"int", "float"} else "text"


def _group(file: File, style: Style, starts: np.ndarray, first: int, stop: int) -> _Group:
    """What rows ``first`` to ``stop`` hold; those that do not fit are sought by halves."""
    raw = file.read(int(starts[first]), int(starts[stop] - starts[first]))
    data, spelled = memoryview(raw), [text for text in MISSING if text.encode() in raw]
    total = _Group(["empty"] * len(style.names), [False] * len(style.names), [set() for _ in style.names], [], spelled)

    types = {name: arrow_type(kind) for name, kind in style.types.items()}
    how = options(style, types, [], MISSING)

    def go(low: int, high: int) -> None:
        piece = data[starts[low] - starts[first] : starts[high] - starts[first]]
        longest = int(np.diff(starts[low : high + 1]).max())
        table, unfit, trouble = check(parse(piece, style.names, how, high - low, longest), style)
        if table is None and high - low > 1:
            if len(total.bad) > _MOST_SOUGHT:
                raise DataError(f"{file.path}: more than {_MOST_SOUGHT} rows of 8 MiB are bad, the first: {trouble}")
            middle = (low + high) // 2
            go(low, middle)
            go(middle, high)
        elif table is None:
            total.bad.append((low, trouble))
        else:
            total.bad.extend((low + row, reason) for row, reason in unfit)
            _note(table, total)

    go(first, stop)
    return total


def _note(table: Any, total: _Group) -> None:
    import pyarrow.compute as pc

    for at, column in enumerate(table.columns):
        kind = kind_of(column.type)
        total.kinds[at] = _either(total.kinds[at], kind)
        total.missing[at] |= column.null_count > 0
        seen = total.texts[at]
        if kind != "text":  # its numbers do not give its texts
            total.texts[at] = seen if kind == "empty" and not len(column) else None
        elif seen is not None:
            mine = pc.unique(column)
            total.texts[at] = seen | set(mine.to_pylist()) if len(mine) <= _MOST_TEXTS else None
