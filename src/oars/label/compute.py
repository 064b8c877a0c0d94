"""The child process that reads every image once: features, thumbnails, checksums. ``python -m oars.label.compute DIR``.

It notes how far it has come in a file of the project's folder, from which the server knows, and from which the next one
goes on if this one is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from oars.data import work
from oars.data.errors import DataError
from oars.data.labels import checksum_of
from oars.label import folder as folder_
from oars.label import pixels
from oars.label.folder import Folder, put
from oars.label.source import Source

_BLOCK = 64  # rows of a task
_THUMBS_UP_TO = 250_000  # rows; of more, thumbnails are made when they are looked at
_SEEN = 200  # images that tell which pixels of a detector are dead
NAMES = ("radial", "spots")

_source: tuple[Source, pixels.Geometry] | None = None


def finals_of(folder: Folder) -> dict[Path, str]:
    """The files that are made, and what is in each."""
    finals = {folder.feature(name): name for name in NAMES} | {folder.file(folder_.CHECKSUMS): "check"}
    if folder.base <= _THUMBS_UP_TO:
        finals[folder.file(folder_.THUMBS)] = "thumb"
    return finals


def compute(folder: Folder, workers: int) -> None:
    """Make what is missing."""
    (folder.path / folder_.FEATURES).mkdir(exist_ok=True)
    finals = finals_of(folder)
    source = folder.source, folder.group, folder.grows, folder.base
    sample = _block((*source, 0, 1))
    begin = _done(folder, finals)
    parts = {path: _part(path, folder.base, sample[name], begin) for path, name in finals.items()}
    tasks = [(*source, at, min(folder.base, at + _BLOCK)) for at in range(begin, folder.base, _BLOCK)]
    at, bad = begin, 0
    for found in work.each(_block, tasks, max(1, min(workers, len(tasks)))):
        count = len(found["check"])
        for path, name in finals.items():
            parts[path][at:at + count] = found[name]
        at += count
        bad += int(found["bad"])
        if (at - begin) // _BLOCK % 16 == 0 or at == folder.base:
            for part in parts.values():
                part.flush()
            put(folder.file(folder_.PROGRESS), {"done": at, "total": folder.base, "bad": bad})
    for path in finals:
        os.replace(_name(path), path)


def _name(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _part(path: Path, rows: int, sample: np.ndarray, begin: int) -> np.memmap:
    return np.lib.format.open_memmap(_name(path), "r+" if begin else "w+", sample.dtype, (rows, *sample.shape[1:]))


def _done(folder: Folder, finals: dict[Path, str]) -> int:
    """How far an earlier one came."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads(folder.file(folder_.PROGRESS).read_text())
        if found["total"] == folder.base and all(_name(path).exists() for path in finals):
            return min(int(found["done"]), folder.base - 1) // _BLOCK * _BLOCK
    return 0


def geometry_of(source: Source, rows: int) -> pixels.Geometry:
    """The rings, from images all over the first ``rows`` rows."""
    look = sorted({int(row) for row in np.linspace(0, rows - 1, _SEEN)})
    return pixels.Geometry.seen([image for row in look for image in read(source, [row]) if image is not None]
                                or [np.ones((8, 8))])


def _block(task: tuple[str, str | None, bool, int, int, int]) -> dict[str, Any]:
    """A piece of the source; what cannot be read is zero everywhere, and counted."""
    global _source
    path, group, grows, rows, begin, end = task
    if _source is None:
        source = Source(path, group, grows)
        _source = source, geometry_of(source, rows)
    source, geometry = _source
    images = read(source, list(range(begin, end)))
    work.advance(end - begin)
    return {**features_of(images, geometry),
            "thumb": np.stack([np.full((pixels.THUMB, pixels.THUMB), 128, np.uint8) if i is None
                               else pixels.thumb(i, pixels.THUMB) for i in images]),
            "bad": sum(i is None for i in images)}


def features_of(images: list[np.ndarray | None], geometry: pixels.Geometry) -> dict[str, np.ndarray]:
    """Features and checksums."""
    features: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    for image in images:
        shaped = geometry if image is None else geometry.fits(image)
        empty = np.zeros(geometry.shape, np.float32) if image is None else image
        features["radial"].append(pixels.radial(empty, shaped))
        features["spots"].append(pixels.spots(empty, shaped))
    return {**{name: np.stack(values) for name, values in features.items()},
            "check": np.array([0 if i is None else checksum_of(i) for i in images], np.uint32)}


def read(source: Source, rows: list[int]) -> list[np.ndarray | None]:
    """The images of these rows; None for one that cannot be read."""
    try:
        return list(source.images(rows))
    except DataError:
        return [None] if len(rows) == 1 else [image for row in rows for image in read(source, [row])]


def main(argv: list[str]) -> int:
    """Compute, gently: people are labelling meanwhile."""
    os.nice(5)
    folder = Folder(Path(argv[0]), json.loads((Path(argv[0]) / folder_.PROJECT).read_text()))
    with open(folder.file(folder_.COMPUTING), "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # the one of a killed server may be at it still: then it is waited for
        return _locked(folder, argv)


def _locked(folder: Folder, argv: list[str]) -> int:
    try:
        compute(folder, int(argv[1]))
    except (DataError, OSError) as error:
        put(folder.file(folder_.PROGRESS), {"error": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
