"""``oars data export``: shards as TFRecords, as one HDF5 file, or as a folder of JPEGs per class."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from oars.data import shards, tfrecord, work
from oars.data.decode import centre
from oars.data.errors import DataError

_PER_FILE = 1250  # ImageNet's 1.28 million over the scripts' 1024 files


def export(folder: Path, target: Path, to: str, side: int, workers: int | None) -> int:
    """Write all samples of a packed folder to ``target``, which must not exist; it is there only when complete."""
    reader = shards.Reader(folder)
    if target.exists():
        raise DataError(f"{target} is there already: choose another name")
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.unlink(missing_ok=True) if part.is_file() else None
    workers = workers or work.cores()
    bar = work.Bar(f"exporting {folder.name}", len(reader))
    if to == "hdf5":
        _hdf5(reader, folder, part, side, workers, bar)
    else:
        part.mkdir(parents=True)
        count = max(1, -(-len(reader) // _PER_FILE))
        cuts = [len(reader) * k // count for k in range(count + 1)]
        task = _tfrecord if to == "tfrecord" else _folder
        tasks = [(str(folder), str(part), k, count, cuts[k], cuts[k + 1]) for k in range(count)]
        for _ in work.each(task, tasks, min(workers, count), bar):
            pass
    os.replace(part, target)
    print(f"{target}: {len(reader):,} images")
    return 0


def _tfrecord(task: tuple[str, str, int, int, int, int]) -> None:
    folder, part, k, count, begin, end = task
    reader = shards.Reader(folder)
    with open(Path(part) / f"{Path(folder).name}-{k:05d}-of-{count:05d}", "wb") as file:
        for i in range(begin, end):
            file.write(tfrecord.record(tfrecord.encode(tfrecord.image_example(reader.sample(i)))))
            work.advance(1, int(reader.index["image_size"][i]))


def _folder(task: tuple[str, str, int, int, int, int]) -> None:
    """A folder per label, named by class; anything but plain letters in a class's name becomes an underscore."""
    folder, part, _, _, begin, end = task
    reader = shards.Reader(folder)
    for i in range(begin, end):
        sample = reader.sample(i)
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in sample["class"]).lstrip(".")
        place = Path(part) / (name or "_")
        place.mkdir(exist_ok=True)
        (place / f"{i:08d}.jpg").write_bytes(sample["image"])
        work.advance(1, len(sample["image"]))


def _hdf5(reader: shards.Reader, folder: Path, part: Path, side: int, workers: int, bar: work.Bar) -> None:
    """``images`` (n, side, side, 3), the middle of each, ``labels`` and ``classes``."""
    try:
        import h5py
    except ImportError:
        raise DataError("--to hdf5 needs h5py: pip install 'manyoars[data]'") from None
    tasks = [(str(folder), begin, min(begin + 64, len(reader)), side) for begin in range(0, len(reader), 64)]
    part.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(part, "w") as file:
        images = file.create_dataset("images", (len(reader), side, side, 3), np.uint8, chunks=(1, side, side, 3))
        file["labels"] = np.asarray(reader.labels, np.int64)
        file["classes"] = np.array([name.encode() for name in reader.classes])
        for (_, begin, end, _), pixels in zip(tasks, work.each(_pixels, tasks, workers, bar), strict=True):
            images[begin:end] = pixels


def _pixels(task: tuple[str, int, int, int]) -> np.ndarray:
    folder, begin, end, side = task
    reader = shards.Reader(folder)
    out = np.empty((end - begin, side, side, 3), np.uint8)
    for i in range(begin, end):
        out[i - begin] = centre(reader.image(i)[0], side)
        work.advance(1)
    return out
