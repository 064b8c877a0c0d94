"""NumPy's files: ``.npy`` is one column, ``.npz`` one a member. Arrays of objects, which are pickles, are refused."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from oars.data import cache
from oars.data.bad import one_line
from oars.data.errors import DataError
from oars.data.reader import File, Flat, FlatReader, Reader
from oars.data.unpack import ALWAYS, MOST_TIMES, bounded

_HEADER = 1 << 16
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_npy(path: str) -> Reader:
    """One array; its first axis is rows."""
    flat, rows = _array(File(path), 0, None, path, "")
    return FlatReader(path, {"data": flat}, rows)


def open_npz(path: str, *, columns: Sequence[str] | None = None) -> Reader:
    """The arrays of an archive as columns; compressed ones are unpacked once, into the cache."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            arrays = [name for name, info in members.items() if info.filename.endswith(".npy")]
            names = list(columns) if columns is not None else arrays
            missing = [name for name in names if name not in arrays]
            if missing or not names:
                raise DataError(f"{path}: no array {', '.join(missing)} in it; there is {', '.join(arrays) or 'none'}")
            found = {name: _member(path, archive, members[name], name) for name in names}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error, OSError) as error:
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.filename is not None):
            raise
        raise DataError(f"{path}: damaged ({one_line(error)})") from None
    lengths = {rows for _, rows in found.values()}
    if len(lengths) > 1:
        shown = ", ".join(f"{name} {rows}" for name, (_, rows) in found.items())
        raise DataError(f"{path}: arrays of different lengths ({shown}): choose with columns=[...]")
    return FlatReader(path, {name: flat for name, (flat, _) in found.items()}, lengths.pop())


def _member(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> tuple[Flat, int]:
    if info.file_size > max(ALWAYS, MOST_TIMES * max(1, info.compress_size)):
        raise DataError(
            f"{path}: {name} grows from {info.compress_size} to {info.file_size} bytes, as a decompression "
            "bomb would; if it is none, save it with numpy.savez"
        )

    def unpack(target: Path) -> None:
        with archive.open(info) as stream:  # compares the checksum at its end
            bounded(stream, target, info.file_size, path)

    def check(target: Path) -> None:
        with archive.open(info) as stream:
            while stream.read(1 << 20):
                pass
        target.touch()

    stored = info.compress_type == zipfile.ZIP_STORED
    kept = cache.entry(path, f"{'checked' if stored else 'unpacked'} {info.filename}", check if stored else unpack)
    if not stored:
        return _array(File(str(kept)), 0, None, path, name)
    file = File(path)
    local = file.read(info.header_offset, 30)
    name_size, more = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
    offset = info.header_offset + 30 + name_size + more
    return _array(file, offset, offset + info.file_size, path, name)


def _array(file: File, offset: int, end: int | None, path: str, name: str) -> tuple[Flat, int]:
    """Where the rows of an array lie, from the header at ``offset``."""
    what = f"{path}: {name}" if name else path
    head = io.BytesIO(file.read(offset, max(0, min(_HEADER, file.size - offset))))
    try:
        version = np.lib.format.read_magic(head)
        if version not in _HEADERS:  # 3: field names that are not ASCII
            raise ValueError(f"version {version[0]} is not read")
        shape, fortran, dtype = _HEADERS[version](head)
    except Exception as error:  # NumPy parses the header as Python, so damage may raise much
        raise DataError(f"{what}, byte {offset}: no header of a NumPy array ({one_line(error)})") from None
    if dtype.hasobject:
        raise DataError(
            f"{what}: an array of Python objects, which only a pickle can hold; save it as numbers or texts"
        )
    if not shape:
        raise DataError(f"{what}: a single value, not rows")
    if fortran and len(shape) > 1 and math.prod(shape) > 0:
        return _turned(file, offset, offset + head.tell(), dtype, shape, path, name)
    flat = Flat(file, offset + head.tell(), dtype, tuple(shape[1:]), shape[0], name=name)
    if end is not None and flat.offset + flat.row_bytes * shape[0] > end:
        raise DataError(f"{what}: {shape[0]} rows of {flat.row_bytes} bytes do not fit into its {end - offset} bytes")
    return flat, shape[0]


def _turned(
    file: File, offset: int, begin: int, dtype: np.dtype, shape: tuple[int, ...], path: str, name: str
) -> tuple[Flat, int]:
    """An array stored column by column has no rows to read: a copy that has them is made once, in the cache."""
    if begin + dtype.itemsize * math.prod(shape) > file.size:
        raise DataError(f"{path}: an array of shape {shape} does not fit into {file.size} bytes")

    def turn(target: Path) -> None:
        with open(file.path, "rb") as source, open(target, "wb") as out:
            source.seek(offset)
            np.save(out, np.ascontiguousarray(np.lib.format.read_array(source, allow_pickle=False)))

    return _array(File(str(cache.entry(file.path, f"rows {offset}", turn))), 0, None, path, name)
