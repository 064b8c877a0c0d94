"""Files damaged at random bytes: an error of one line that names the file, or what another reader makes of it.

Every format is damaged 200 times, seeded: bytes changed, runs of zeros, pieces cut out, ends cut off. It is
opened and read in a child process with little memory, so that a crash, a hang or a claim of absurd size is seen. A byte
changed in numbers without a checksum changes that number for every reader. So what is read without an error is compared
with what another reader (NumPy, h5py, netCDF4, Python's csv) finds in the same damaged file.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from made import IMAGES, KINDS, x_of

import oars.data

ROWS, SECONDS = 23, 120
CHILDREN = 2  # at once, each with every other seed
# Several kinds of one format share its 200 seeds.
FORMATS = {name: name.split("_")[0] for name in [*KINDS, *IMAGES]}
TIMES = {name: 200 // list(FORMATS.values()).count(form) for name, form in FORMATS.items()}


def damage(raw: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(raw)
    at = int(rng.integers(0, len(data)))
    way = rng.integers(0, 6)
    if way < 3:
        for _ in range(int(rng.integers(1, 5))):
            data[int(rng.integers(0, len(data)))] ^= int(rng.integers(1, 256))
    elif way == 3:
        return bytes(data[:at])
    elif way == 4:
        data[at : at + int(rng.integers(1, 64))] = bytes(int(rng.integers(1, 64)))
    else:
        del data[at : at + int(rng.integers(1, 16))]
    return bytes(data)


# ---- other readers: x of a damaged file, or None where they find none -----------------------------------------------


def by_numpy(path: str):
    return np.load(path)


def by_npz(path: str):
    return np.load(path)["x"]


def by_bytes(path: str):
    raw = Path(path).read_bytes()
    shape = np.frombuffer(raw[4 : 4 + 4 * raw[3]], ">u4")
    kind = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}[raw[2]]
    return np.frombuffer(raw[4 + 4 * raw[3] :], kind).reshape(shape)


def by_h5py(group: str):
    def read(path: str):
        import h5py

        with h5py.File(path) as file:
            return file[group][()]

    return read


def by_netcdf4(path: str):
    import netCDF4

    with netCDF4.Dataset(path) as file:
        return np.ma.filled(file["x"][:], np.nan)


OTHERS = {
    "npy": by_numpy, "npz": by_npz, "npz_compressed": by_npz, "idx": by_bytes, "hdf5_flat": by_h5py("x"),
    "hdf5_chunked": by_h5py("deep/x"), "netcdf3_classic": by_netcdf4, "netcdf3_64bit_offset": by_netcdf4,
    "netcdf3_64bit_data": by_netcdf4, "netcdf4": by_netcdf4,
}


# ---- in the child ---------------------------------------------------------------------------------------------------


def hurt(name: str, path: str, raw: bytes, options: dict, seed: int) -> str:
    """Damage, open, read: "error", "read", or what went wrong."""
    # Where one file is many (images, parts), the others stay whole.
    Path(path).write_bytes(damage(raw, np.random.default_rng(seed)))
    opened = options.pop("opened", path)
    began = time.monotonic()
    try:
        data = oars.data.open(opened, **options)
        samples = list(data)
    except (oars.data.DataError, ValueError) as error:
        text = str(error)
        if "\n" in text or os.path.dirname(opened) not in text or len(text) > 1000:
            return f"not one line that names the file: {type(error).__name__}: {text!r}"
        return "error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if time.monotonic() - began > 10:
        return "took more than 10 s"
    if name == "csv":
        return as_csv_reads(path, samples)
    if name not in OTHERS:
        return "read"
    ours = np.array([sample[0] if isinstance(sample, tuple) else sample for sample in samples])
    right = x_of(ROWS)
    try:
        theirs = OTHERS[name](path)
    except Exception:  # for something else that is in the file
        theirs = right
        if ours.shape == right.shape and (ours != right).sum() <= 20:
            return "read"
    alike = ours.shape == theirs.shape and np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
    alike = alike or np.array_equal(ours, right) or (not ours.size and not theirs.size)
    return "read" if alike else f"read {ours!r}, the other reader {theirs!r}"


def as_csv_reads(path: str, samples: list) -> str:
    """Every value is what Python's csv module finds in its place."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row][1:]
    if len(rows) != len(samples):
        return f"{len(samples)} rows, not {len(rows)}"
    for row, (x, _) in zip(rows, samples, strict=True):
        for text, value in zip(row, x.values() if isinstance(x, dict) else x, strict=False):
            if isinstance(value, str):
                same = value == text
            else:
                number = np.float32(text) if text and text.lower() != "nan" else np.nan
                same = value == number or (value != value and number != number)
            if not same:
                return f"{value!r} for {text!r}"
    return "read"


def child(name: str, path: str, options: dict, report: str, seeds: range) -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    raw = Path(path).read_bytes()
    with open(report, "w") as out:
        for seed in seeds:
            print(json.dumps([seed, hurt(name, path, raw, dict(options), seed)]), file=out, flush=True)
            if seed % 50 < seeds.step:
                shutil.rmtree(os.environ["OARS_CACHE"], ignore_errors=True)


def begin_child(*args) -> int:
    """Its number. It has a cache of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ["OARS_CACHE"] += f"/{os.getpid()}"
            child(*args)
        finally:
            os._exit(0)
    return pid


def ended(pid: int) -> int:
    """The exit status; 124 if it had to be ended."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 124


@pytest.mark.parametrize("name", [*KINDS, *IMAGES])
def test_damage_is_an_error_or_read_as_others_read_it(name, tmp_path):
    begun = []
    for part in range(CHILDREN):
        (folder := tmp_path / str(part)).mkdir()
        path, options = {**KINDS, **IMAGES}[name](folder, ROWS)
        victim = path
        if not Path(path).is_file():
            options = {**options, "opened": path}
            pool = Path(path) if Path(path).is_dir() else folder
            victim = str(sorted(p for p in pool.rglob("*") if p.is_file())[1])
        seeds = range(part, TIMES[name], CHILDREN)
        begun.append(begin_child(name, victim, options, str(tmp_path / f"report-{part}"), seeds))
    found = []
    for part, status in enumerate([ended(pid) for pid in begun]):
        lines = (tmp_path / f"report-{part}").read_text().splitlines()
        assert status == 0, f"ended with {status} at seed {part + CHILDREN * len(lines)}"
        found += map(json.loads, lines)
    wrong = [(seed, said) for seed, said in found if said not in ("error", "read")]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[:3]}"
    assert len(found) == TIMES[name] and any(said == "error" for _, said in found)


def test_a_gzip_file_of_zeros_is_no_way_to_fill_the_disk(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr("oars.data.unpack.ALWAYS", 1 << 20)
    (tmp_path / "bomb.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * (1 << 20), 9))
    with pytest.raises(oars.data.DataError, match="bomb.csv.gz: grows to more than .* as a decompression bomb would"):
        oars.data.open(tmp_path / "bomb.csv.gz")
    assert sum(f.stat().st_size for f in own_cache.iterdir()) == 0
