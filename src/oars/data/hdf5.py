"""HDF5 files. What is inside is found out in a child process (``guard.py``); rows are then read by our own code.

A data set without chunks is flat. Of a chunked one the child tells where each chunk lies, and ``chunks.py`` reads and
unpacks the chunks that hold the wanted rows. So the library is at work only once per file, and neither forks nor
damaged chunks meet it. What we do not unpack ourselves (filters other than gzip, shuffle and Fletcher-32; texts of
varying length; data in other files) is read by h5py, opened anew in every process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from oars.data.bad import one_line
from oars.data.chunks import Chunked
from oars.data.errors import DataError
from oars.data.guard import ask
from oars.data.needs import need
from oars.data.reader import Block, Field, File, Flat, Reader

_CHUNK_CACHE = 64 << 20
_OURS = {1: "gzip", 2: "shuffle", 3: "fletcher32"}  # HDF5's numbers of filters
_ALWAYS, _MOST_TIMES = 1 << 30, 1100  # data may be this large, or this many times larger than their file (gzip: 1032)


class Set:
    """A data set of a file as the child has reported it."""

    def __init__(self, layout: dict[str, Any], file: File) -> None:
        self.name: str = layout["name"]
        self.rows: int = layout["shape"][0]
        self.shape: tuple[int, ...] = tuple(layout["shape"][1:])
        self.unlimited: bool = layout["unlimited"]
        self.attributes: dict[str, Any] = layout["attributes"]
        self.dims: list[str | None] = layout["dims"]
        self.text: bool = layout["text"]
        self.dtype = np.dtype(object) if self.text else dtype_from(layout["dtype"])
        self.how = layout["how"]
        total = self.dtype.itemsize * math.prod((self.rows, *self.shape))
        if total > max(_ALWAYS, _MOST_TIMES * file.size):
            raise DataError(
                f"{file.path}: {self.name}: {self.rows} rows of shape {self.shape} should have {total} bytes, "
                f"in a file of {file.size}: damaged"
            )
        self.column: Flat | Chunked | Library
        if self.how == "flat":
            self.column = Flat(file, layout["offset"], self.dtype, self.shape, self.rows, name=self.name)
        elif self.how == "chunked":
            self.column = Chunked(file, self.name, self.dtype, (self.rows, *self.shape), layout)
        else:
            self.column = Library(file.path, self.name, self.dtype, self.shape, self.text)


def describe(path: str) -> tuple[dict[str, dict[str, Any]], bool]:
    """What the child tells of the data sets that have rows, by name; and whether the file is NetCDF-4."""
    need("h5py", path)
    answer = ask(path, look)
    return {one["name"]: one for one in answer["sets"]}, answer["netcdf"]


# ---- in the child -------------------------------------------------------------------------------------------------


def look(path: str) -> dict[str, Any]:
    """All data sets of a file with what it takes to read their rows, and whether the file is NetCDF-4."""
    import h5py

    with h5py.File(path, "r") as file:
        found: list[dict[str, Any]] = []
        seen: set[Any] = set()

        def walk(group: Any, prefix: str, depth: int) -> None:
            if depth > 32:
                raise DataError(f"{path}: groups are nested more than 32 deep")
            for name in group:
                if group.get(name, getlink=True).__class__.__name__ == "ExternalLink":
                    continue  # another file's
                item = group.get(name)
                place = None if item is None else h5py.h5o.get_info(item.id).addr
                if isinstance(item, h5py.Group) and place not in seen:
                    seen.add(place)
                    walk(item, f"{prefix}{name}/", depth + 1)
                elif isinstance(item, h5py.Dataset) and item.shape:
                    found.append(_tell(item, prefix + name))

        walk(file["/"], "", 0)
        return {"sets": found, "netcdf": "_NCProperties" in file.attrs}


def _tell(item: Any, name: str) -> dict[str, Any]:
    import h5py

    string = h5py.check_string_dtype(item.dtype)
    text = string is not None and string.length is None  # of varying length; others are as flat as numbers
    details: dict[str, Any] = {
        "name": name,
        "shape": list(map(int, item.shape)),
        "unlimited": bool(item.maxshape) and item.maxshape[0] is None,
        "text": text,
        "attributes": _attributes(item),
        "dims": _dims(item),
        "how": "library",
    }
    if item.dtype.hasobject and not text:  # references, arrays of varying length
        return details | {"how": "unreadable", "dtype": str(item.dtype)}
    plain = np.dtype(item.dtype.str if item.dtype.names is None else item.dtype)
    details["dtype"] = np.lib.format.dtype_to_descr(plain)
    properties = item.id.get_create_plist()
    if text:
        item[: 1 << 20]  # what damage does to texts of varying length shows here, in the child
        return details
    if item.external or item.is_virtual:
        item[:1], item[-1:]
        return details
    filters = [properties.get_filter(at)[:2] for at in range(properties.get_nfilters())]
    if item.chunks is None:
        offset = item.id.get_offset()
        if offset is not None and properties.get_layout() == h5py.h5d.CONTIGUOUS:
            details |= {"how": "flat", "offset": offset}
    elif all(number in _OURS for number, _ in filters):
        chunks: list[list[int]] = []
        item.id.chunk_iter(lambda c: chunks.append([*map(int, c.chunk_offset), c.filter_mask, c.byte_offset, c.size]))
        fill = np.empty((), item.dtype)
        properties.get_fill_value(fill)
        details |= {
            "how": "chunked",
            "filters": [_OURS[number] for number, _ in filters],
            "chunks": chunks,
            "chunk": list(map(int, item.chunks)),
            "fill": fill.tobytes().hex(),
        }
    return details


def _attributes(item: Any) -> dict[str, Any]:
    """Those that say what the numbers mean."""
    kept: dict[str, Any] = {}
    for name in ("_FillValue", "missing_value", "scale_factor", "add_offset", "_Unsigned", "NAME"):
        if name in item.attrs:
            value = item.attrs[name]
            if isinstance(value, (bytes, str)):
                kept[name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            else:
                values = np.asarray(value).reshape(-1)
                if len(values) == 1 and values.dtype.kind in "iuf":
                    kept[name] = [values.dtype.str.replace(">", "<"), values[0].item()]
                elif values.dtype.kind in "SO" and len(values) == 1:
                    kept[name] = str(values[0])
    return kept


def _dims(item: Any) -> list[str | None]:
    names: list[str | None] = []
    for dim in item.dims:
        names.append(dim[0].name.lstrip("/") if len(dim) else None)
    if "CLASS" in item.attrs and item.attrs["CLASS"] == b"DIMENSION_SCALE" and item.ndim == 1:
        names = [item.name.lstrip("/")]
    return names


def dtype_from(described: Any) -> np.dtype:
    """A NumPy type from its description in JSON, where tuples have become lists."""
    dtype: np.dtype
    if isinstance(described, str):
        dtype = np.dtype(described)
    else:  # name, type, and perhaps shape of each field
        dtype = np.dtype([(name, dtype_from(kind), *map(tuple, shape)) for name, kind, *shape in described])
    if dtype.hasobject:
        raise DataError(f"rows of type {dtype} cannot be read")
    return dtype


# ---- by the library -----------------------------------------------------------------------------------------------


class Library:
    """Rows read by h5py, from a file that is opened when this process first reads it."""

    def __init__(self, path: str, name: str, dtype: np.dtype, shape: tuple[int, ...], text: bool) -> None:
        self.path, self.name, self.dtype, self.shape, self.text = path, name, dtype, shape, text
        self._opened: tuple[int, Any] | None = None
        self._inherited: list[Any] = []  # opened before a fork: never closed here

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_inherited": []}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop``."""
        try:
            values = self._dataset()[start:stop]
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(
                f"{self.path}: {self.name}, rows {start} to {stop - 1}: {one_line(error)}"
            ) from None
        if self.text:
            return texts(values)
        return np.ascontiguousarray(values, values.dtype.newbyteorder("="))

    def _dataset(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            import h5py

            if self._opened:
                self._inherited.append(self._opened[1])
            file = h5py.File(self.path, "r", rdcc_nbytes=_CHUNK_CACHE, rdcc_nslots=10007)
            self._opened = os.getpid(), file[self.name]
        return self._opened[1]


def texts(values: np.ndarray) -> np.ndarray:
    """Rows of bytes as texts."""
    out = np.empty(values.size, object)
    for at, value in enumerate(values.reshape(-1)):
        try:
            out[at] = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            out[at] = value.decode("latin-1")  # what old files hold
    return out.reshape(values.shape)


# ---- layouts ------------------------------------------------------------------------------------------------------


class Hdf5Reader(Reader):
    """Data sets of one length as columns."""

    def __init__(self, path: str, sets: Sequence[Set], names: Sequence[str]) -> None:
        self.path = path
        self._sets = dict(zip(names, sets, strict=True))
        self.rows = sets[0].rows
        self.fields = {
            name: Field(np.dtype(object) if s.dtype.kind in "SO" else s.dtype.newbyteorder("="), s.shape)
            for name, s in self._sets.items()
        }

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        block = {name: self._sets[name].column.read(start, stop) for name in names}
        return {name: texts(values) if values.dtype.kind == "S" else values for name, values in block.items()}


class PerClass(Reader):
    """One data set per class: their rows one after the other, each with its class's number."""

    def __init__(self, path: str, sets: Sequence[Set]) -> None:
        self.path, self._sets = path, sorted(sets, key=lambda s: s.name)
        self.label, self.classes = "label", [s.name.rsplit("/", 1)[-1] for s in self._sets]
        self.starts = np.concatenate([[0], np.cumsum([s.rows for s in self._sets], dtype=np.int64)])
        self.rows = int(self.starts[-1])
        self.fields = {
            "data": Field(self._sets[0].dtype.newbyteorder("="), self._sets[0].shape),
            "label": Field(np.dtype(np.int64)),
        }

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        owner = np.searchsorted(self.starts, np.arange(start, stop), "right") - 1
        block: Block = {"label": owner.astype(np.int64)}
        if "data" in names:
            parts = [self._sets[0].column.read(0, 0)]
            for at in np.unique(owner):
                low, high = int(self.starts[at]), int(self.starts[at + 1])
                parts.append(self._sets[at].column.read(max(start, low) - low, min(stop, high) - low))
            block["data"] = np.concatenate(parts)
        return {name: block[name] for name in names}


def open_hdf5(
    path: str,
    described: dict[str, dict[str, Any]],
    columns: Sequence[str] | None = None,
    group: str | None = None,
    layout: str | None = None,
) -> Reader:
    """A file's data sets as columns or, where they differ in length but not in kind, as classes."""
    if layout not in (None, "columns", "classes"):
        raise ValueError(f"layout={layout!r} is neither 'columns' nor 'classes'")
    file = File(path)
    names = choose(path, described, columns, group)
    prefix = f"{group.strip('/')}/" if group else ""
    sets = [Set(described[prefix + name], file) for name in names]
    same_length = len({s.rows for s in sets}) == 1
    same_kind = len({(s.shape, s.dtype) for s in sets}) == 1 and not any(s.dtype.kind in "SO" for s in sets)
    if layout == "classes" or (layout is None and not same_length and same_kind):
        if not same_kind:
            raise DataError(f"{path}: one data set per class needs rows of one kind: {_kinds(sets)}")
        return PerClass(path, sets)
    if not same_length:
        raise DataError(f"{path}: data sets of different lengths ({_kinds(sets)}): choose with columns=[...] or group=")
    return Hdf5Reader(path, sets, names)


def choose(path: str, described: dict[str, dict[str, Any]], columns: Sequence[str] | None,
           group: str | None) -> list[str]:
    """The names, within the group, of the data sets that are wanted: all that can be read unless ``columns`` says."""
    prefix = f"{group.strip('/')}/" if group else ""
    inside = {name[len(prefix) :]: one for name, one in described.items() if name.startswith(prefix)}
    if group and not inside:
        groups = ", ".join(sorted({name.rpartition("/")[0] for name in described} - {""}))
        raise DataError(f"{path}: no group {group!r} with data sets in it; there is {groups or 'no group at all'}")
    for name in columns or ():
        if name not in inside:
            raise DataError(f"{path}: no data set {name}; there is {', '.join(inside) or 'none'}")
        if inside[name]["how"] == "unreadable":
            raise DataError(f"{path}: {name}: rows of type {inside[name]['dtype']} cannot be read")
    names = list(columns) if columns is not None else [n for n, one in inside.items() if one["how"] != "unreadable"]
    if not names:
        raise DataError(f"{path}: no data set with rows in it")
    return names


def _kinds(sets: Sequence[Set]) -> str:
    shown = ", ".join(f"{s.name} {(s.rows, *s.shape)}" for s in sets[:8])
    return shown + (", ..." if len(sets) > 8 else "")
