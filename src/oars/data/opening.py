"""``oars.data.open``: from a path and the user's wishes to rows."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oars.data import cache
from oars.data.bad import Bad, act_on, check_policy
from oars.data.dataset import Columns, Data
from oars.data.errors import DataError
from oars.data.kinds import joined
from oars.data.labels import labelled
from oars.data.reader import Reader
from oars.data.transforms import decode

_BLOCK = 256


def open_data(
    path: Any, columns: Sequence[str] | None, label: Any, dtype: Any, on_bad: str, given: dict[str, Any],
    people: Any = None, how: Sequence[str] | None = None,
) -> Data:
    """What ``oars.data.open`` does."""
    check_policy(on_bad)
    given = {name: value for name, value in given.items() if value is not None}
    if people is None and how is not None:
        raise ValueError("how= is for labels=, a file of oars label --export")
    if people is not None and label is not None:
        raise ValueError(f"label={label!r} and labels={people!r}: choose one")
    labels = [] if label is None else list(label) if isinstance(label, (list, tuple)) else [label]
    wanted = None
    if columns is not None:
        if isinstance(columns, str):
            raise ValueError(f"columns={columns!r}: give a list, [{columns!r}]")
        wanted = [*columns, *(name for name in labels if name not in columns)]
    named, files = _files(path)
    only_names = wanted is not None and all(isinstance(name, str) for name in wanted)
    reader = joined(named, files, wanted if only_names else None, given)
    bad = list(reader.bad)
    act_on(bad, on_bad, named)
    rows: range | np.ndarray = range(len(reader))
    if people is not None:
        reader, rows = labelled(reader, people, how)
    if on_bad != "raise":
        more = _checked(reader)
        if more:
            rows = np.setdiff1d(rows, [row for row, _ in more])
            bad += [found for _, found in more]
            act_on(bad, on_bad, named)
    return _data(reader, wanted, labels or ([reader.label] if reader.label in reader.fields else []), dtype, rows, bad)


def _files(path: Any) -> tuple[str, list[str]]:
    if isinstance(path, (list, tuple)):
        if not path:
            raise ValueError("no file is named")
        files = [os.fspath(one) for one in path]
        return files[0], files
    named = os.fspath(path)
    if not os.path.exists(named) and glob.has_magic(named):
        files = sorted(glob.glob(named))
        if not files:
            raise DataError(f"{named}: no file has such a name")
        return named, files
    return named, [named]


def _data(
    reader: Reader,
    wanted: Sequence[Any] | None,
    labels: Sequence[Any],
    dtype: Any,
    rows: range | np.ndarray,
    bad: Sequence[Bad],
) -> Data:
    known = list(reader.fields)

    def name_of(key: Any) -> str:
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            if not -len(known) <= key < len(known):
                raise ValueError(f"column {key} of {len(known)}: {reader.path}")
            return known[key]
        if key not in reader.fields:
            raise ValueError(f"{reader.path} has no column {key!r}; it has {', '.join(known) or 'none'}")
        return key

    label_names = [name_of(key) for key in labels]
    names = [
        name
        for name in (map(name_of, wanted) if wanted is not None else reader.usual or known)
        if name not in label_names
    ]
    if not names:
        raise ValueError(
            f"{reader.path}: nothing is left besides the label {', '.join(label_names)}"
            if label_names
            else f"{reader.path} has no columns"
        )
    classes: list[Any] | None = reader.classes if label_names == [reader.label] else None
    coded = None
    if len(label_names) == 1 and reader.fields[label_names[0]].dtype == object:
        coded = classes = reader.distinct(label_names[0]).tolist()
    label = Columns(reader, label_names, None, coded) if label_names else None
    return Data(
        reader, Columns(reader, names, None if dtype is None else np.dtype(dtype), None), label, classes, rows, bad
    )


def _checked(reader: Reader) -> list[tuple[int, Bad]]:
    """Rows that cannot be read, found by reading all of them once; the cache knows it the next time."""
    kept = cache.entry(reader.path, "bad rows 1", lambda target: _check(reader, target), reader.state())
    return [(row, Bad(*bad)) for row, bad in json.loads(kept.read_text())]


def _check(reader: Reader, target: Path) -> None:
    encoded = [name for name, field in reader.fields.items() if field.encoded]
    found: list[tuple[int, Bad]] = []

    def go(start: int, stop: int) -> None:
        try:
            block = reader.span(start, stop, list(reader.fields))
        except DataError as error:
            if stop - start == 1:
                found.append((start, _bad(reader, start, str(error))))
                return
            middle = (start + stop) // 2
            go(start, middle)
            go(middle, stop)
            return
        for row in range(start, stop) if encoded else ():
            try:
                for name in encoded:
                    decode(block[name][row - start])
            except DataError as error:
                found.append((row, _bad(reader, row, str(error))))

    for start in range(0, len(reader), _BLOCK):
        go(start, min(start + _BLOCK, len(reader)))
    target.write_text(json.dumps(found))


def _bad(reader: Reader, row: int, text: str) -> Bad:
    file, number = reader.place(row)
    return Bad(file, number, -1, text.removeprefix(file).lstrip(":, ") or text)
