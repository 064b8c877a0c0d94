"""The same rows in every kind of file that is read: row i is ``[i, i / 4, -i]``, its label ``i % 3``.

``KINDS[name](folder, rows)`` writes them and returns the path and the options that open it.
"""

from __future__ import annotations

import bz2
import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from oars.data import tfrecord

Made = tuple[str, dict[str, Any]]
KINDS: dict[str, Any] = {}


def x_of(rows: int) -> np.ndarray:
    i = np.arange(rows)
    return np.stack([i, i / 4, -i], axis=1).astype(np.float32).reshape(rows, 3)


def y_of(rows: int) -> np.ndarray:
    return np.arange(rows) % 3


def kind(make: Any) -> Any:
    KINDS[make.__name__] = make
    return make


# ---- text -----------------------------------------------------------------------------------------------------------


def text(rows: int, delimiter: str = ",", start: int = 0) -> str:
    lines = [delimiter.join(["a", "b", "c", "class"])]
    lines += [delimiter.join(map(str, [i, i / 4, -i, i % 3])) for i in range(start, rows)]
    return "\n".join(lines) + "\n"


CSV: dict[str, Any] = {"label": "class", "dtype": "float32"}


@kind
def csv(folder: Path, rows: int) -> Made:
    (folder / "a.csv").write_text(text(rows))
    return str(folder / "a.csv"), CSV


@kind
def tsv(folder: Path, rows: int) -> Made:
    (folder / "a.tsv").write_text(text(rows, "\t").replace("\n", "\r\n").rstrip("\r\n"))
    return str(folder / "a.tsv"), CSV


@kind
def csv_quoted(folder: Path, rows: int) -> Made:
    lines = ['a,b,c,class,"the ""note"""'] + [f'"{i}",{i / 4},-{i},{i % 3},"x,\n""{i}""\r\n"' for i in range(rows)]
    (folder / "q.csv").write_text("\n".join(lines), newline="")
    return str(folder / "q.csv"), {**CSV, "columns": ["a", "b", "c"]}


@kind
def csv_headless_gz(folder: Path, rows: int) -> Made:
    (folder / "a.csv.gz").write_bytes(gzip.compress(text(rows).split("\n", 1)[1].encode()))
    return str(folder / "a.csv.gz"), {"label": -1, "dtype": "float32"}


@kind
def csv_bz2(folder: Path, rows: int) -> Made:
    (folder / "a.bin").write_bytes(bz2.compress(text(rows).encode()))  # told by content, not by name
    return str(folder / "a.bin"), CSV


@kind
def csv_zstd(folder: Path, rows: int) -> Made:
    (folder / "a.csv.zst").write_bytes(pa.compress(text(rows).encode(), "zstd", asbytes=True))
    return str(folder / "a.csv.zst"), CSV


@kind
def csv_folder(folder: Path, rows: int) -> Made:
    (folder / "many").mkdir()
    cuts = [0, rows // 3, rows // 2, rows]
    for part, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
        (folder / "many" / f"{part}.csv").write_text(text(stop, start=start))
    return str(folder / "many"), CSV


# ---- HDF5 and NetCDF ------------------------------------------------------------------------------------------------


@kind
def hdf5_flat(folder: Path, rows: int) -> Made:
    with h5py.File(folder / "a.h5", "w", userblock_size=512) as file:
        file["x"], file["y"] = x_of(rows), y_of(rows)
    return str(folder / "a.h5"), {"label": "y"}


@kind
def hdf5_chunked(folder: Path, rows: int) -> Made:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("deep/x", data=x_of(rows).astype(">f4"), chunks=(7, 2), compression="gzip", shuffle=True,
                            fletcher32=True, maxshape=(None, 3))
        file.create_dataset("deep/y", data=y_of(rows), chunks=(5,), maxshape=(None,))
    return str(folder / "a.h5"), {"label": "y", "group": "deep"}


@kind
def hdf5_library(folder: Path, rows: int) -> Made:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=x_of(rows), chunks=(4, 3), compression="lzf", maxshape=(None, 3))
        file["y"] = np.array(["abc"[label] for label in y_of(rows)], h5py.string_dtype())
    return str(folder / "a.h5"), {"label": "y"}


@kind
def hdf5_per_class(folder: Path, rows: int) -> Made:
    with h5py.File(folder / "a.h5", "w") as file:
        for label in range(3):
            file[f"train/{label}"] = x_of(rows)[y_of(rows) == label]
    return str(folder / "a.h5"), {"layout": "classes"}


@kind
def hdf5_files(folder: Path, rows: int) -> Made:
    for part, (start, stop) in enumerate([(0, rows // 3), (rows // 3, rows)]):
        with h5py.File(folder / f"part{part}.h5", "w") as file:
            file["x"], file["y"] = x_of(rows)[start:stop], y_of(rows)[start:stop]
    return str(folder / "part*.h5"), {"label": "y"}


def netcdf(folder: Path, rows: int, form: str) -> Made:
    with netCDF4.Dataset(folder / "a.nc", "w", format=form) as file:
        file.createDimension("time", None)
        file.createDimension("k", 3)
        file.createVariable("x", "f4", ("time", "k"))[:] = x_of(rows)
        file.createVariable("y", "i2", ("time",))[:] = y_of(rows)
        file.createVariable("static", "f4", ("k",))[:] = 1
    return str(folder / "a.nc"), {"label": "y"}


for form in ("NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA", "NETCDF4"):
    KINDS[form.lower()] = lambda folder, rows, form=form: netcdf(folder, rows, form)


# ---- arrays ---------------------------------------------------------------------------------------------------------


@kind
def npy(folder: Path, rows: int) -> Made:
    np.save(folder / "a.npy", x_of(rows))
    return str(folder / "a.npy"), {}


@kind
def npy_fortran(folder: Path, rows: int) -> Made:
    np.save(folder / "a.npy", np.asfortranarray(x_of(rows)))
    return str(folder / "a.npy"), {}


@kind
def npz(folder: Path, rows: int) -> Made:
    np.savez(folder / "a.npz", x=x_of(rows), y=y_of(rows))
    return str(folder / "a.npz"), {"label": "y"}


@kind
def npz_compressed(folder: Path, rows: int) -> Made:
    np.savez_compressed(folder / "a.npz", x=x_of(rows), y=y_of(rows))
    return str(folder / "a.npz"), {"label": "y"}


def table(rows: int) -> pa.Table:
    x = x_of(rows)
    return pa.table({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "class": y_of(rows)})


@kind
def parquet(folder: Path, rows: int) -> Made:
    pq.write_table(table(rows), folder / "a.parquet", row_group_size=5, write_page_checksum=True)
    return str(folder / "a.parquet"), {"label": "class"}


@kind
def arrow(folder: Path, rows: int) -> Made:
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table(0).schema) as writer:
        writer.write_table(table(rows), max_chunksize=7)
    return str(folder / "a.arrow"), {"label": "class"}


def idx_bytes(array: np.ndarray) -> bytes:
    code = {"u1": 8, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[array.dtype.str[1:]]
    shape = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, code, array.ndim]) + shape + array.astype(array.dtype.newbyteorder(">")).tobytes()


@kind
def idx(folder: Path, rows: int) -> Made:
    (folder / "images-idx2-float").write_bytes(idx_bytes(x_of(rows)))
    return str(folder / "images-idx2-float"), {}


@kind
def idx_gz(folder: Path, rows: int) -> Made:
    (folder / "images.gz").write_bytes(gzip.compress(idx_bytes(x_of(rows))))
    return str(folder / "images.gz"), {}


@kind
def mnist_pickle(folder: Path, rows: int) -> Made:
    x, y, cuts = x_of(rows), y_of(rows), [0, rows // 2, rows - rows // 4, rows]
    parts = tuple((x[a:b], y[a:b]) for a, b in zip(cuts, cuts[1:], strict=False))
    (folder / "mnist.pkl.gz").write_bytes(gzip.compress(pickle.dumps(parts, protocol=2)))
    return str(folder / "mnist.pkl.gz"), {"label": "label"}


# ---- images: pixel (0, 0) of row i is (i % 256, i // 256, label) ----------------------------------------------------


def image_bytes(i: int, form: str = "PNG") -> bytes:
    pixels = np.full((4 + i % 3, 5, 3), (i % 256, i // 256, i % 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def images(folder: Path, rows: int) -> Made:
    for i in range(rows):
        target = folder / "pictures" / f"class{i % 3}" / f"{i:05}.JPEG"  # and are PNG
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(image_bytes(i))
    return str(folder / "pictures"), {}


def tar_shards(folder: Path, rows: int) -> Made:
    (folder / "shards").mkdir()
    for part in range(2):
        with tarfile.open(folder / "shards" / f"{part}.tar", "w") as tar:
            for i in range(part * (rows // 2), rows if part else rows // 2):
                for name, data in ((f"{i:05}.png", image_bytes(i)), (f"{i:05}.cls", b"%d" % (i % 3))):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return str(folder / "shards"), {}


def tfrecords(folder: Path, rows: int) -> Made:
    examples = [{"image/encoded": [image_bytes(i)], "image/class/label": [i % 3 + 1]} for i in range(rows)]
    (folder / "train-00000-of-00001").write_bytes(b"".join(tfrecord.record(tfrecord.encode(e)) for e in examples))
    return str(folder / "train-00000-of-00001"), {}


IMAGES: dict[str, Any] = {"images": images, "tar_shards": tar_shards, "tfrecords": tfrecords}
