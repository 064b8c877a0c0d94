"""Rows per second from HDF5, CSV and NetCDF: ``oars.data`` next to h5py, pandas and netCDF4, the same rows in order.

    python bench/data_rows.py            about two minutes
    python bench/data_rows.py --quick    a small file, a few seconds

Both sides read batches of 1024 rows and get the same arrays (that is checked). They take turns, in one process, from a
file that lies in the page cache; the best of five is shown. Opening is shown apart, and so is the first open of the CSV
file, which builds its index. On a machine with other work the ratio in CPU time is the one to trust.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pandas

import oars.data

BATCH = 1024
Batches = Callable[[Path], Iterator[Any]]  # None once the file is open, then pairs of arrays


def make(folder: Path, rows: int, width: int) -> dict[str, Path]:
    """The same table in every format."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, width)).astype(np.float32), rng.integers(0, 10, rows).astype(np.int32)
    paths = {name: folder / name for name in ("flat.h5", "gzip.h5", "a.csv", "classic.nc", "netcdf4.nc")}
    for name, how in (("flat.h5", {}), ("gzip.h5", {"chunks": (256, width), "compression": "gzip", "shuffle": True})):
        with h5py.File(paths[name], "w") as file:
            file.create_dataset("x", data=x, **how)
            file["y"] = y
    pandas.DataFrame(x, columns=[f"c{at}" for at in range(width)]).assign(y=y).to_csv(paths["a.csv"], index=False)
    for name, form in (("classic.nc", "NETCDF3_64BIT_OFFSET"), ("netcdf4.nc", "NETCDF4")):
        with netCDF4.Dataset(paths[name], "w", format=form) as file:
            file.createDimension("row", None)
            file.createDimension("k", width)
            more = {"chunksizes": (256, width)} if form == "NETCDF4" else {}
            file.createVariable("x", "f4", ("row", "k"), **more)[:] = x
            file.createVariable("y", "i4", ("row",))[:] = y
    return paths


def by_h5py(path: Path) -> Iterator[Any]:
    with h5py.File(path) as file:
        x, y = file["x"], file["y"]
        yield None
        for at in range(0, len(y), BATCH):
            yield x[at : at + BATCH], y[at : at + BATCH]


def by_pandas(path: Path) -> Iterator[Any]:
    with pandas.read_csv(path, chunksize=BATCH) as frames:
        yield None
        for frame in frames:
            yield frame.drop(columns="y").to_numpy(), frame["y"].to_numpy()


def by_pandas_at_once(path: Path) -> Iterator[Any]:
    yield None
    frame = pandas.read_csv(path)
    yield frame.drop(columns="y").to_numpy(), frame["y"].to_numpy()


def by_netcdf4(path: Path) -> Iterator[Any]:
    with netCDF4.Dataset(path) as file:
        x, y = file["x"], file["y"]
        yield None
        for at in range(0, len(y), BATCH):
            yield x[at : at + BATCH], y[at : at + BATCH]


def by_oars(path: Path) -> Iterator[Any]:
    data = oars.data.open(path, label="y")
    yield None
    for at in range(0, len(data), BATCH):
        yield data[at : at + BATCH].numpy()


def by_oars_at_once(path: Path) -> Iterator[Any]:
    data = oars.data.open(path, label="y")
    yield None
    yield data.numpy()


def seconds(read: Batches, path: Path) -> tuple[float, float, float]:
    """How long it takes to open the file, and then to read all rows: by the clock, and in CPU time."""
    began = time.perf_counter()
    batches = read(path)
    next(batches)
    opened, worked = time.perf_counter(), time.process_time()
    for _ in batches:
        pass
    return opened - began, time.perf_counter() - opened, time.process_time() - worked


def check(one: Batches, other: Batches, path: Path) -> int:
    """Both sides read the same; the number of rows."""
    rows = 0
    for ours, theirs in zip(one(path), other(path), strict=True):
        if ours is not None:
            np.testing.assert_allclose(ours[0], np.asarray(theirs[0]), rtol=1e-12)
            np.testing.assert_array_equal(ours[1], np.asarray(theirs[1]))
            rows += len(ours[1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small file")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    args = parser.parse_args()
    rows, repeats = (20_000, 3) if args.quick else (200_000, 5)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["OARS_CACHE"] = f"{name}/cache"
        paths = make(Path(name), rows, 32)
        first, _, _ = seconds(by_oars, paths["a.csv"])
        print(f"{rows} rows of 32 numbers and a label; the first open of the CSV file, with its index: {first:.2f} s")
        print(f"{'':18}{'rows/s, oars':>14}{'rows/s, other':>15}   ratio   in CPU time   open, ms: oars, other")
        sides: list[tuple[str, str, Batches, Batches]] = [
            ("HDF5", "flat.h5", by_oars, by_h5py), ("HDF5, gzip", "gzip.h5", by_oars, by_h5py),
            ("CSV, batches", "a.csv", by_oars, by_pandas),
            ("CSV, at once", "a.csv", by_oars_at_once, by_pandas_at_once),
            ("NetCDF classic", "classic.nc", by_oars, by_netcdf4), ("NetCDF-4", "netcdf4.nc", by_oars, by_netcdf4)]
        for what, file, ours, theirs in sides:
            assert check(ours, theirs, paths[file]) == rows
            times = [(*seconds(ours, paths[file]), *seconds(theirs, paths[file])) for _ in range(repeats)]
            open_1, read_1, cpu_1, open_2, read_2, cpu_2 = map(min, zip(*times, strict=True))
            ratio, cpu_ratio = read_2 / read_1, cpu_2 / cpu_1
            found.append({"what": what, "oars": rows / read_1, "other": rows / read_2, "ratio": ratio,
                          "cpu_ratio": cpu_ratio, "open_oars": open_1, "open_other": open_2})
            print(f"{what:18}{rows / read_1:14,.0f}{rows / read_2:15,.0f}   {ratio:5.2f}   {cpu_ratio:11.2f}   "
                  f"{open_1 * 1000:8.1f} {open_2 * 1000:8.1f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "first_csv_seconds": first, "kinds": found}, indent=1))


if __name__ == "__main__":
    main()
