"""Parquet and Arrow files, by pyarrow. A Parquet file is read by row groups, an Arrow file by record batches.

What was read last stays in memory, so rows in order cost one reading each. Rows in random order cost a row group each:
write Parquet files for training with small row groups (``row_group_size=4096``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oars.data.bad import one_line
from oars.data.errors import DataError
from oars.data.guard import ask
from oars.data.needs import need
from oars.data.reader import Block, Field, Reader

_KEPT = 2  # row groups


class ArrowReader(Reader):
    """A Parquet (``parquet=True``) or Arrow file."""

    def __init__(self, path: str, *, parquet: bool, columns: Sequence[str] | None = None) -> None:
        need("pyarrow.parquet" if parquet else "pyarrow", path)
        self.path, self._parquet = path, parquet
        layout = ask(path, _look_parquet if parquet else _look_arrow)
        self.starts = np.concatenate([[0], np.cumsum(layout["groups"], dtype=np.int64)])
        self.rows = int(self.starts[-1])
        known = dict(layout["columns"])
        missing = [name for name in columns or () if name not in known]
        if missing:
            raise DataError(f"{path}: no column {', '.join(missing)}; there is {', '.join(known)}")
        self.fields = {}
        for name in columns if columns is not None else known:
            kind, width, nulls = known[name]
            if kind == "unreadable" and columns is not None:
                raise DataError(f"{path}: column {name} is of type {width}, which has no place in an array")
            if kind != "unreadable":
                self.fields[name] = _field(kind, width, nulls)
        self._opened: Any = None
        self._kept: OrderedDict[tuple[int, tuple[str, ...]], Block] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_kept": OrderedDict()}

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        if stop <= start:
            return {name: np.empty((0, *(self.fields[name].shape or ())), self.fields[name].dtype) for name in names}
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        parts = []
        while start < stop:
            block, low = self._group(first, names), int(self.starts[first])
            end = min(stop, int(self.starts[first + 1]))
            parts.append({name: block[name][start - low : end - low] for name in names})
            start, first = end, first + 1
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def _group(self, number: int, names: Sequence[str]) -> Block:
        key = number, tuple(names)
        if key not in self._kept:
            self._kept[key] = self._read(number, names)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _read(self, number: int, names: Sequence[str]) -> Block:
        import pyarrow as pa

        what = f"{self.path}, rows {self.starts[number]} to {self.starts[number + 1] - 1}"
        try:
            if self._opened is None:
                self._opened = _open_parquet(self.path) if self._parquet else _open_arrow(self.path)
            if self._parquet:
                table = self._opened.read_row_group(number, columns=list(names), use_threads=False)
            else:
                batch = self._opened.get_batch(number)
                batch.validate(full=True)
                table = pa.Table.from_batches([batch]).select(list(names))
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise DataError(f"{what}: {one_line(error)}") from None
        if len(table) != self.starts[number + 1] - self.starts[number]:
            raise DataError(f"{what}: {len(table)} rows there: damaged")
        return {name: _values(table[name], self.fields[name], f"{what}: {name}") for name in names}


def _open_parquet(path: str) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(open(path, "rb"), page_checksum_verification=True)


def _open_arrow(path: str) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(pa.PythonFile(open(path, "rb"), "r"))


def _look_parquet(path: str) -> dict[str, Any]:
    """In the child: what a Parquet file holds."""
    file = _open_parquet(path)
    groups = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]

    def missing(at: int) -> bool:  # a column with no statistics may turn out to have some when it is read
        groups = [file.metadata.row_group(group).column(at) for group in range(file.num_row_groups)]
        return any(g.statistics is not None and g.statistics.null_count for g in groups)

    leaves = [file.metadata.schema.column(at).path.split(".")[0] for at in range(file.metadata.num_columns)]
    return {"groups": groups, "columns": _schema(file.schema_arrow, lambda name: missing(leaves.index(name)))}


def _look_arrow(path: str) -> dict[str, Any]:
    file = _open_arrow(path)
    batches = [file.get_batch(at) for at in range(file.num_record_batches)]
    return {
        "groups": [batch.num_rows for batch in batches],
        "columns": _schema(file.schema, lambda name: any(batch.column(name).null_count for batch in batches)),
    }


def _schema(schema: Any, missing: Callable[[str], bool]) -> list[tuple[str, tuple[str, Any, bool]]]:
    import pyarrow.types as t

    found: list[tuple[str, tuple[str, Any, bool]]] = []
    for field in schema:
        kind, width = field.type, 0
        if t.is_fixed_size_list(kind):
            kind, width = kind.value_type, kind.list_size
        if t.is_dictionary(kind):
            kind = kind.value_type
        if t.is_string(kind) or t.is_large_string(kind):
            entry: tuple[str, Any, bool] = ("text", width, missing(field.name))
        elif t.is_binary(kind) or t.is_large_binary(kind):
            entry = ("bytes", width, missing(field.name))
        elif t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind):
            entry = (str(np.dtype(kind.to_pandas_dtype())), width, missing(field.name))
        else:
            entry = ("unreadable", str(field.type), False)
        found.append((field.name, entry))
    return found


def _field(kind: str, width: int, nulls: bool) -> Field:
    shape = (width,) if width else ()
    if kind in ("text", "bytes"):
        return Field(np.dtype(object), shape) if kind == "text" else Field(np.dtype(object), None, encoded=True)
    dtype = np.dtype(kind)
    return Field(np.dtype(np.float64) if nulls and dtype.kind != "f" else dtype, shape)  # missing numbers are NaN


def _values(column: Any, field: Field, what: str) -> np.ndarray:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if array.null_count and field.dtype.kind not in "fO":
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{what}, row {row} of these: a missing value in a column of {field.dtype}")
    if pa.types.is_fixed_size_list(array.type):
        inner = array.flatten()
        values = inner.to_numpy(zero_copy_only=False).reshape(len(array), -1)
    else:
        values = array.to_numpy(zero_copy_only=False)
    if field.dtype == object and array.null_count:
        values = np.array(["" if value is None else value for value in values], object)
    return values.astype(field.dtype) if values.dtype != field.dtype or not values.flags.writeable else values
