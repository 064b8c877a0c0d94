"""What kind of file this is, by its first bytes; the name only decides between kinds of text."""

from __future__ import annotations

import os
from typing import Any

from oars.data import unpack
from oars.data.errors import DataError
from oars.data.images import ImageReader, is_image
from oars.data.reader import Joined, Reader

HDF5 = b"\x89HDF\r\n\x1a\n"
_HEAD = 1 << 12
# kind: the options of oars.data.open that mean something to it
OPTIONS = {
    "csv": ("delimiter", "header", "types"),
    "hdf5": ("group", "layout", "along"),
    "netcdf": ("along",),
    "npy": (),
    "npz": (),
    "parquet": (),
    "arrow": (),
    "idx": (),
    "pickle": ("group",),
    "tfrecord": (),
    "tar": (),
    "images": (),
    "shards": (),
}


def kind_of(path: str) -> tuple[str, str | None]:
    """The kind of a file, and how it is compressed."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD)
        if not head:
            raise DataError(f"{path}: the file is empty")
        at = 512
        hdf5 = head.startswith(HDF5)
        while not hdf5 and at + 8 <= size and at <= 1 << 20:  # a block of the user's may stand before it
            hdf5, at = os.pread(file.fileno(), 8, at) == HDF5, at * 2
    if hdf5:
        return "hdf5", None
    how = unpack.method(head)
    if how:
        return _inside(path, unpack.peek(path, how, _HEAD), how)
    return _kind(path, head), None


def _inside(path: str, head: bytes, how: str) -> tuple[str, str]:
    kind = _kind(path, head) if head else "csv"
    if kind not in ("csv", "idx", "pickle", "npy"):
        raise DataError(f"{path}: {how} around a {kind} file; unpack it first")
    return kind, how


def _kind(path: str, head: bytes) -> str:
    for magic, kind in (
        (b"CDF\x01", "netcdf"),
        (b"CDF\x02", "netcdf"),
        (b"CDF\x05", "netcdf"),
        (b"\x93NUMPY", "npy"),
        (b"PK\x03\x04", "npz"),
        (b"PK\x05\x06", "npz"),
        (b"PAR1", "parquet"),
        (b"ARROW1", "arrow"),
    ):
        if head.startswith(magic):
            return kind
    if head[257:262] == b"ustar":
        return "tar"
    if head[:2] == b"\0\0" and len(head) > 4 and head[2] in range(8, 15) and 1 <= head[3] <= 8:
        return "idx"
    if head[:1] == b"\x80" and 2 <= head[1] <= 5:
        return "pickle"
    if head[:4] == b"(((c" or (head[:1] == b"(" and b"numpy" in head[:200]):  # a pickle of 1990's form
        return "pickle"
    if is_image(head):
        raise DataError(f"{path}: a single image; open its folder")
    if (
        path.lower()
        .removesuffix(".gz")
        .removesuffix(".bz2")
        .removesuffix(".zst")
        .endswith((".csv", ".tsv", ".tab", ".txt"))
    ):
        return "csv"
    if b"\0" not in head:
        return "csv"
    if _is_tfrecord(head):
        return "tfrecord"
    raise DataError(f"{path}: none of the kinds of file that are read here (its first bytes are {head[:8]!r})")


def _is_tfrecord(head: bytes) -> bool:
    from oars.data import tfrecord

    return len(head) >= 12 and head[8:12] == tfrecord.masked(head[:8])


def kind_of_folder(path: str) -> tuple[str, list[str]]:
    """What a folder holds: shards, images, or files of one kind, which are listed."""
    entries = sorted((entry for entry in os.scandir(path) if not entry.name.startswith(".")), key=lambda e: e.name)
    files = [e.path for e in entries if e.is_file() and not e.name.endswith(".bad.jsonl")]
    if any(os.path.basename(f) == "manifest.json" for f in files) or any(f.endswith(".tar") for f in files):
        return "shards", []
    if any(e.is_dir() for e in entries):
        return "images", []
    if not files:
        raise DataError(f"{path}: the folder is empty")
    with open(files[0], "rb") as file:
        if is_image(file.read(16)):
            return "images", []
    return "files", files


def reader_of(path: str, columns: list[str] | None, given: dict[str, Any]) -> Reader:
    """The reader of one file or folder."""
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    if os.path.isdir(path):
        kind, files = kind_of_folder(path)
        if kind == "files":
            return joined(path, files, columns, given)
        how = None
    else:
        kind, how = kind_of(path)
    for option in given:
        if option not in OPTIONS[kind]:
            raise ValueError(
                f"{option}= means nothing for {path}, which is {kind}"
                + (f"; its options: {', '.join(OPTIONS[kind])}" if OPTIONS[kind] else "")
            )
    plain = unpack.unpacked(path, how) if how else path
    return _reader(kind, plain, path, columns, given)


def joined(path: str, files: list[str], columns: list[str] | None, given: dict[str, Any]) -> Reader:
    """Several files as one, in this order."""
    readers = [reader_of(file, columns, given) for file in files]
    return readers[0] if len(readers) == 1 else Joined(path, readers)


def _reader(kind: str, plain: str, path: str, columns: list[str] | None, given: dict[str, Any]) -> Reader:
    """``plain`` is the file to read, ``path`` what the user called it. Only what this kind needs is imported."""
    match kind:
        case "csv":
            from oars.data.csv import CsvReader

            return CsvReader(plain, shown=path, **given)
        case "hdf5":
            from oars.data import hdf5, netcdf

            described, is_netcdf = hdf5.describe(path)
            if is_netcdf or "along" in given:
                return netcdf.open_netcdf4(path, described, columns, given.get("along"), given.get("group"))
            return hdf5.open_hdf5(path, described, columns, given.get("group"), given.get("layout"))
        case "netcdf":
            from oars.data.netcdf import ClassicReader

            return ClassicReader(path, columns, given.get("along"))
        case "npy" | "npz":
            from oars.data import numpy_files

            return numpy_files.open_npy(plain) if kind == "npy" else numpy_files.open_npz(path, columns=columns)
        case "parquet" | "arrow":
            from oars.data.arrow import ArrowReader

            return ArrowReader(path, parquet=kind == "parquet", columns=columns)
        case "idx" | "pickle":
            from oars.data import idx

            return idx.open_pickle(plain, path, **given) if kind == "pickle" else idx.open_idx(plain, path)
        case "images":
            return ImageReader(path)
        case _:
            from oars.data import samples

            return samples.open_tfrecord(path) if kind == "tfrecord" else samples.open_shards(path)
