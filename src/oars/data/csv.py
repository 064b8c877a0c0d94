"""CSV and TSV files: any row by number, read from its own bytes.

The index (``csv_index.py``) says where rows begin. Compressed files (gzip, bzip2, Zstandard) are unpacked once, into
the cache, since rows inside of them cannot be found without unpacking all that is before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oars.data import cache
from oars.data.bad import Bad
from oars.data.csv_index import Index, build, cores
from oars.data.csv_text import arrow_type, options, parse, style_of, to_numpy
from oars.data.errors import DataError
from oars.data.needs import need
from oars.data.reader import Block, Field, File, Reader

_MANY = 4 << 20  # so many bytes are parsed by several threads


class CsvReader(Reader):
    """One CSV file; ``bad`` lists rows that do not fit, which have no number here."""

    def __init__(
        self,
        path: str,
        *,
        shown: str | None = None,
        delimiter: str | None = None,
        header: bool | None = None,
        types: dict[Any, Any] | None = None,
    ) -> None:
        need("pyarrow", path)
        self.path = shown or path  # what the user called it, if it was unpacked
        self._file = File(path)
        self._style = style_of(self._file, delimiter, header, types or {})
        if not self._style.names:
            raise DataError(f"{self.path}: no rows in it, not even a header")
        self._kept: Path | None = None
        self._loaded: Index | None = None
        self._options: tuple[tuple[str, ...], Any] | None = None
        about = self._index().about
        self.bad = [Bad(self.path, row, byte, reason) for row, byte, reason in about["bad"]]
        # How many bad rows stand before each good one: row i of ours is the file's row i + that number.
        bad_rows = np.array([bad.row for bad in self.bad], np.int64)
        self._skips = bad_rows - np.arange(len(bad_rows))
        self.rows = self._index().rows - len(bad_rows)
        self._kinds: dict[str, str | np.dtype] = {
            name: self._style.types.get(name, kind)
            for name, kind in zip(self._style.names, about["kinds"], strict=True)
        }
        self._texts = dict(zip(self._style.names, about["texts"], strict=True))
        self.fields = {name: Field(_dtype(kind)) for name, kind in self._kinds.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None, "_options": None}

    def _index(self) -> Index:
        if self._loaded is None:
            style = self._style
            options = json.dumps(
                [style.delimiter, style.names, style.first, {name: str(kind) for name, kind in style.types.items()}]
            )
            try:
                self._kept = cache.entry(
                    self._file.path, f"csv index 2 {options}", lambda target: build(self._file, style, target)
                )
            except DataError as error:
                raise DataError(str(error).replace(self._file.path, self.path, 1)) from None
            self._loaded = Index(self._kept)
        return self._loaded

    def _physical(self, rows: np.ndarray) -> np.ndarray:
        return rows + np.searchsorted(self._skips, rows, "right") if len(self._skips) else rows

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        return self._read(self._physical(np.arange(start, stop)), names)

    def take(self, rows: np.ndarray, names: Sequence[str]) -> Block:
        unique, back = np.unique(rows, return_inverse=True)
        block = self._read(self._physical(unique), names)
        in_order = len(unique) == len(rows) and bool((back[:-1] < back[1:]).all())
        return block if in_order else {name: values[back] for name, values in block.items()}

    def _read(self, rows: np.ndarray, names: Sequence[str]) -> Block:
        """Rows by their number in the file, in rising order."""
        if len(rows) == 0:
            return {name: np.empty(0, self.fields[name].dtype) for name in names}
        begins, after = self._index().starts(rows), self._index().starts(rows + 1)
        firsts = np.flatnonzero(np.diff(rows, prepend=-2) > 1)
        ends = np.stack([begins[firsts], after[np.append(firsts[1:], len(rows)) - 1]], axis=1)
        data = np.empty(int((ends[:, 1] - ends[:, 0]).sum()) + len(ends), np.uint8)
        view, at = data.data, 0
        for begin, end in ends.tolist():
            self._file.read_into(view[at : at + end - begin], begin)
            at += end - begin
            if data[at - 1] != 10:  # the file's last line may lack its line feed
                data[at] = 10
                at += 1
        longest, threads = int((after - begins).max()), at >= _MANY and cores() > 1
        table, unfit, trouble = parse(
            view[:at], self._style.names, self._how(tuple(names)), len(rows), longest, threads
        )
        if table is None or unfit:
            raise DataError(
                f"{self.path}, rows {rows[0]} to {rows[-1]}, byte {ends[0, 0]}: not as they were when the file "
                f"was indexed ({trouble or unfit[0][1]}); has it changed?"
            )
        return {name: to_numpy(table[name], self._kinds[name]) for name in names}

    def _how(self, names: tuple[str, ...]) -> Any:
        if self._options is None or self._options[0] != names:
            types = {name: arrow_type(kind) for name, kind in self._kinds.items()}
            self._options = names, options(self._style, types, list(names), self._index().about["missing"])
        return self._options[1]

    def distinct(self, name: str) -> np.ndarray:
        known = self._texts[name]
        return np.array(known, object) if known is not None else super().distinct(name)

    def place(self, row: int) -> tuple[str, int]:
        return self.path, int(self._physical(np.array([row]))[0])


def _dtype(kind: str | np.dtype) -> np.dtype:
    if isinstance(kind, np.dtype):
        return kind
    return np.dtype({"int": np.int64, "bool": np.bool_, "text": object}.get(kind, np.float64))
