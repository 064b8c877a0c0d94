"""NetCDF files: classic, 64-bit offset and CDF-5 by our own reading of the header; NetCDF-4 is HDF5 with conventions.

Rows are the entries along one dimension: ``along=``, or the record (unlimited) dimension, or the one that most
variables begin with. Columns are the variables that begin with it. Packed numbers are unpacked (``scale_factor``,
``add_offset``, ``_Unsigned``), missing ones (``_FillValue``, ``missing_value``, the default fill of floats) are NaN.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from oars.data import hdf5
from oars.data.errors import DataError
from oars.data.reader import Block, Field, File, Flat, Reader

_TYPES = {1: "i1", 2: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8", 7: "u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8"}
_DEFAULT_FILL = 9.969209968386869e36
_MOST = 100_000  # dimensions, attributes or variables: more is no header but damage


class Header:
    """The header of a classic file, read in order."""

    def __init__(self, file: File) -> None:
        self.file, self.at = file, 4
        self._held, self._from = b"", 0
        version = file.read(0, 4)[3]
        self._count = 8 if version == 5 else 4
        self._offset = 4 if version == 1 else 8
        self.records = self._number(self._count, signed=False)
        if self.records == (1 << 8 * self._count) - 1:
            self.records = -1  # being written as a stream: as many as the file holds
        self.dims = self._list(10, "dimensions", self._dimension)
        self._list(12, "attributes", self._attribute)
        self.variables: dict[str, dict[str, Any]] = {v["name"]: v for v in self._list(11, "variables", self._variable)}

    def _bytes(self, size: int) -> bytes:
        if size < 0 or self.at + size > self.file.size:
            raise DataError(
                f"{self.file.path}, byte {self.at}: the header wants {size} bytes here, but the file ends at "
                f"{self.file.size}"
            )
        if self.at + size > self._from + len(self._held):
            self._from = self.at
            self._held = self.file.read(self.at, min(max(size, 1 << 16), self.file.size - self.at))
        found = self._held[self.at - self._from : self.at - self._from + size]
        self.at += size
        return found

    def _number(self, size: int, signed: bool = True) -> int:
        return int.from_bytes(self._bytes(size), "big", signed=signed)

    def _padded(self, size: int) -> bytes:
        found = self._bytes(size)
        self._bytes(-size % 4)
        return found

    def _name(self) -> str:
        at = self.at
        try:
            return self._padded(self._number(self._count)).decode()
        except UnicodeDecodeError:
            raise DataError(f"{self.file.path}, byte {at}: a name that is not UTF-8: damaged") from None

    def _list(self, tag: int, what: str, one: Any) -> list[Any]:
        at = self.at
        found, count = self._number(4), self._number(self._count)
        if found not in (0, tag) or (found == 0 and count) or not 0 <= count <= _MOST:
            raise DataError(f"{self.file.path}, byte {at}: no list of {what} here: damaged")
        return [one() for _ in range(count)]

    def _dimension(self) -> tuple[str, int]:
        name, at = self._name(), self.at
        size = self._number(self._count)
        if size < 0:
            raise DataError(f"{self.file.path}, byte {at}: dimension {name} of length {size}: damaged")
        return name, size

    def _dtype(self) -> np.dtype:
        at, number = self.at, self._number(4)
        if number not in _TYPES:
            raise DataError(f"{self.file.path}, byte {at}: no type has the number {number}: damaged")
        return np.dtype(_TYPES[number])

    def _attribute(self) -> tuple[str, Any]:
        name, dtype, count = self._name(), self._dtype(), self._number(self._count)
        raw = self._padded(count * dtype.itemsize)
        if dtype.kind == "S":
            return name, raw.decode("utf-8", "replace")
        values = np.frombuffer(raw, dtype)
        return name, [dtype.newbyteorder("<").str, values[0].item()] if len(values) == 1 else None

    def _variable(self) -> dict[str, Any]:
        name, at = self._name(), self.at
        count = self._number(self._count)
        if not 0 <= count <= 1024:
            raise DataError(f"{self.file.path}, byte {at}: variable {name} has {count} dimensions: damaged")
        numbers = [self._number(self._count) for _ in range(count)]
        if not all(0 <= number < len(self.dims) for number in numbers):
            raise DataError(f"{self.file.path}, byte {at}: variable {name} has a dimension that is not there: damaged")
        attributes = dict(self._list(12, "attributes", self._attribute))
        dtype = self._dtype()
        stated = self._number(self._count, signed=False)
        if stated not in self._sizes(dtype, [self.dims[n][1] for n in numbers]):
            raise DataError(f"{self.file.path}, byte {at}: variable {name} is stated to have {stated} bytes: damaged")
        offset = struct.unpack(">q" if self._offset == 8 else ">i", self._bytes(self._offset))[0]
        return {
            "name": name,
            "dims": [self.dims[n][0] for n in numbers],
            "shape": [self.dims[n][1] for n in numbers],
            "record": bool(numbers) and self.dims[numbers[0]][1] == 0,
            "dtype": dtype,
            "offset": offset,
            "attributes": attributes,
        }

    def _sizes(self, dtype: np.dtype, shape: list[int]) -> set[int]:
        """What a variable's size in bytes may be stated as; one too large for its place is stated as the largest."""
        size = dtype.itemsize * math.prod(shape[1:] if shape and shape[0] == 0 else shape)
        largest = (1 << 8 * self._count) - 1
        return {size, size + -size % 4} if size + 3 < largest else {largest, largest - 3, size & largest}


class Meaning:
    """What a variable's stored numbers stand for."""

    def __init__(self, dtype: np.dtype, attributes: dict[str, Any]) -> None:
        self.stored = dtype.newbyteorder("=")
        if str(attributes.get("_Unsigned", "")).lower() == "true" and dtype.kind == "i":
            self.stored = np.dtype(f"u{dtype.itemsize}")
        given = {name: value for name, value in attributes.items() if isinstance(value, list)}
        self.scale, self.add = (
            np.dtype(given[name][0]).type(given[name][1]) if name in given else None
            for name in ("scale_factor", "add_offset")
        )
        fills = [given[name][1] for name in ("_FillValue", "missing_value") if name in given]
        if self.stored.kind == "f" and "_FillValue" not in given:
            fills.append(_DEFAULT_FILL)
        self.fills = [fill for fill in (self._as_stored(f) for f in fills) if fill is not None]
        self.dtype = self._result()
        if self.dtype.kind != "f":
            self.fills = []

    def _as_stored(self, fill: Any) -> Any:
        with np.errstate(all="ignore"):
            try:
                value = np.array(fill).astype(self.stored)[()]
            except (ValueError, OverflowError):
                return None
        return value if value == value else None  # NaN is missing already

    def _result(self) -> np.dtype:
        parts = [value.dtype for value in (self.scale, self.add) if value is not None]
        if self.stored.kind not in "iuf":
            return self.stored
        if parts:
            result = np.result_type(self.stored, *parts)
            return result if result.kind == "f" else np.dtype(np.float64)
        if self.stored.kind in "iu" and self.fills and self.stored.itemsize < 8:  # all of these a float holds exactly
            return np.dtype(np.float32 if self.stored.itemsize < 3 else np.float64)
        return self.stored

    def of(self, values: np.ndarray) -> np.ndarray:
        """The numbers themselves."""
        values = values.view(self.stored) if values.dtype != self.stored else values
        missing = None
        for fill in self.fills:
            missing = values == fill if missing is None else missing | (values == fill)
        out = values.astype(self.dtype, copy=False)
        if self.scale is not None:
            out = out * self.dtype.type(self.scale)
        if self.add is not None:
            out = out + self.dtype.type(self.add)
        if missing is not None and missing.any():
            out = out.copy() if out is values else out
            out[missing] = np.nan
        return out


class ClassicReader(Reader):
    """A classic file. Record variables lie interleaved: where most of a record is wanted it is read whole."""

    def __init__(self, path: str, columns: Sequence[str] | None, along: str | None) -> None:
        self.path, self._file = path, File(path)
        header = Header(self._file)
        sizes = [self._size(v) for v in header.variables.values() if v["record"]]
        self._record = sizes[0] if len(sizes) == 1 else sum(size + -size % 4 for size in sizes)
        along, names = choose(
            path,
            {n: v["dims"] for n, v in header.variables.items()},
            columns,
            along,
            next((name for name, size in header.dims if size == 0), None),
        )
        chosen = [header.variables[name] for name in names]
        self.rows = dict(header.dims)[along]
        if chosen[0]["record"]:
            self.rows = header.records if header.records >= 0 else self._streamed(header)
        self._flat, self._meaning, self._text = {}, {}, set()
        for v in chosen:
            shape, dtype = tuple(v["shape"][1:]), v["dtype"]
            if dtype.kind == "S":  # characters of one text
                dtype, shape = np.dtype(f"S{shape[-1] if shape else 1}"), shape[:-1]
                self._text.add(v["name"])
            self._flat[v["name"]] = Flat(
                self._file, v["offset"], dtype, shape, self.rows, self._record if v["record"] else None, v["name"]
            )
            self._meaning[v["name"]] = Meaning(dtype, v["attributes"])
        self.fields = {
            name: Field(np.dtype(object) if name in self._text else self._meaning[name].dtype, flat.shape)
            for name, flat in self._flat.items()
        }

    def _size(self, variable: dict[str, Any]) -> int:
        size = variable["dtype"].itemsize
        for length in variable["shape"][1:]:
            size *= length
        return size

    def _streamed(self, header: Header) -> int:
        first = min(v["offset"] for v in header.variables.values() if v["record"])
        return max(0, self._file.size - first) // max(1, self._record)

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        raw = self._together(start, stop, names)
        block = {}
        for name in names:
            values = raw[name] if raw else self._flat[name].read(start, stop)
            block[name] = hdf5.texts(values) if name in self._text else self._meaning[name].of(values)
        return block

    def _together(self, start: int, stop: int, names: Sequence[str]) -> Block | None:
        """The columns from one reading of the records, if that is the fewer reads and not many more bytes."""
        flats = [self._flat[name] for name in names]
        if (
            stop <= start
            or any(f.stride != self._record for f in flats)
            or len(flats) < 2
            or (4 * sum(f.row_bytes for f in flats) < 3 * self._record)
        ):
            return None
        low = min(f.offset for f in flats) + start * self._record
        high = max(f.offset + f.row_bytes for f in flats) + (stop - 1) * self._record
        raw = np.empty(high - low, np.uint8)
        self._file.read_into(raw.data, low)
        here = {name: flat.offset + start * self._record - low for name, flat in zip(names, flats, strict=True)}
        return {name: self._flat[name].of(raw, at, stop - start, self._record) for name, at in here.items()}


class Netcdf4Reader(Reader):
    """Variables of a NetCDF-4 file."""

    def __init__(self, path: str, sets: Sequence[hdf5.Set], names: Sequence[str]) -> None:
        self.path, self.rows = path, sets[0].rows
        self._sets = dict(zip(names, sets, strict=True))
        self._meaning = {n: None if s.text else Meaning(s.dtype, s.attributes) for n, s in self._sets.items()}
        self.fields = {}
        for name, one in self._sets.items():
            meaning = self._meaning[name]
            chars = one.dtype.kind == "S"
            self.fields[name] = Field(
                np.dtype(object) if meaning is None or chars else meaning.dtype,
                one.shape[:-1] if chars and one.dtype.itemsize == 1 and one.shape else one.shape,
            )

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        block = {}
        for name in names:
            values, meaning = self._sets[name].column.read(start, stop), self._meaning[name]
            if values.dtype.kind == "S":
                if values.dtype.itemsize == 1 and values.ndim > 1:
                    values = np.ascontiguousarray(values).view(f"S{values.shape[-1]}")[..., 0]
                values = hdf5.texts(values)
            block[name] = values if meaning is None or values.dtype == object else meaning.of(values)
        return block


def choose(
    path: str,
    dims: dict[str, Sequence[str | None]],
    columns: Sequence[str] | None,
    along: str | None,
    record: str | None,
) -> tuple[str, list[str]]:
    """The dimension whose entries are rows, and the variables along it."""
    for name in columns or ():
        if name not in dims:
            raise DataError(f"{path}: no variable {name}; there is {', '.join(dims) or 'none'}")
    leading = [d[0] for name, d in dims.items() if d and d[0] is not None and (columns is None or name in columns)]
    if along is None:
        if not leading:
            raise DataError(f"{path}: no variable with rows in it")
        along = record if record in leading else Counter(leading).most_common(1)[0][0]
    names = [name for name in (columns if columns is not None else dims) if dims[name] and dims[name][0] == along]
    others = [name for name in columns or () if name not in names]
    if others or not names:
        raise DataError(
            f"{path}: {', '.join(others) or 'no variable'} {'is not' if others else 'is'} along dimension "
            f"{along}; dimensions: {', '.join(sorted({str(d) for ds in dims.values() for d in ds}))}"
        )
    return str(along), names


def open_netcdf4(
    path: str,
    described: dict[str, dict[str, Any]],
    columns: Sequence[str] | None = None,
    along: str | None = None,
    group: str | None = None,
) -> Reader:
    """The variables of a NetCDF-4 file along one dimension."""
    described = {
        name: one
        for name, one in described.items()
        if not str(one["attributes"].get("NAME", "")).startswith("This is a netCDF dimension but not")
    }
    inside = hdf5.choose(path, described, columns, group)
    prefix = f"{group.strip('/')}/" if group else ""
    record = next((one["dims"][0] for one in described.values() if one["unlimited"] and one["dims"]), None)
    _, names = choose(path, {name: described[prefix + name]["dims"] for name in inside}, columns, along, record)
    file = File(path)
    return Netcdf4Reader(path, [hdf5.Set(described[prefix + name], file) for name in names], names)
