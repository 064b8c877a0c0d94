"""``oars data check`` and ``oars data stats``: is all of it there and sound, and what does it look like in numbers."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from oars.data import shards, tar, work
from oars.data.decode import decode
from oars.data.errors import DataError
from oars.data.examine import Unfit, examine

_SHOWN = 10  # problems of one shard that are reported one by one


def check(folder: Path, workers: int | None) -> int:
    """Verify a packed folder; 0 if nothing is wrong with it."""
    folders = _sets(folder)
    return max(_check(each, workers or work.cores()) for each in folders)


def _sets(folder: Path) -> list[Path]:
    """The folder itself, or the sets in it (train, val)."""
    if (folder / "manifest.json").exists():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/manifest.json"))
    if not found:
        raise DataError(f"{folder} holds no packed images: there is no manifest.json in it; make one with `oars data "
                        "pack`")
    return found


def _check(folder: Path, workers: int) -> int:
    facts = shards.read_manifest(folder)
    reader = shards.Reader(folder)
    tasks = [(str(folder), k, shard) for k, shard in enumerate(facts["shards"])]
    bar = work.Bar(f"checking {folder.name}", len(reader))
    problems = [problem for found in work.each(check_shard, tasks, min(workers, max(1, len(tasks))), bar)
                for problem in found]
    stated = sum(shard["samples"] for shard in facts["shards"])
    if stated != len(reader):
        problems.append(f"the shards hold {stated} samples, the index {len(reader)}")
    counts = np.bincount(reader.labels, minlength=len(reader.classes)) if len(reader) else np.zeros(1, int)
    if len(counts) > len(reader.classes) and len(reader):
        problems.append(f"labels go up to {len(counts) - 1}, but there are {len(reader.classes)} classes")
    print(f"{folder}: {len(reader):,} images in {len(tasks)} shards, {len(reader.classes)} classes of "
          f"{counts.min():,} to {counts.max():,} images")
    for line in problems:
        print(f"  wrong: {line}")
    for line in _advice(reader, counts):
        print(f"  note: {line}")
    print(f"  {len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "  all is well")
    return int(bool(problems))


def _advice(reader: shards.Reader, counts: np.ndarray) -> list[str]:
    """What is not wrong, but would make a training worse."""
    lines = []
    empty = [name for name, count in zip(reader.classes, counts, strict=False) if not count]
    if empty:
        lines.append(f"{len(empty)} classes have no image, {empty[0]} among them: pack them too, or train with fewer")
    if counts.min() and counts.max() > 5 * counts.min():
        lines.append(f"the largest class has {counts.max() / counts.min():.0f} times the images of the smallest: weigh "
                     "the loss or draw classes evenly")
    labels = np.asarray(reader.labels)
    if len(labels) > 1:
        chance = float(((counts / counts.sum()) ** 2).sum())
        same = float((labels[1:] == labels[:-1]).mean())
        if same > 2 * chance + 3 * (chance / len(labels)) ** 0.5:
            lines.append(f"neighbours are of one class in {same:.0%} of cases, {chance:.0%} would be chance: the order "
                         "is sorted by class; shuffle when you read, or pack again")
    return lines


def check_shard(task: tuple[str, int, dict[str, Any]]) -> list[str]:
    """A worker's task: all that can be wrong with one shard."""
    folder, k, stated = Path(task[0]), task[1], task[2]
    path = folder / stated["name"]
    problems: list[str] = []
    if not path.exists():
        return [f"{path.name} is missing"]
    if path.stat().st_size != stated["bytes"]:
        problems.append(f"{path.name} has {path.stat().st_size} bytes, not {stated['bytes']}")
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != stated["sha256"]:
            problems.append(f"{path.name} is not what was packed (SHA-256 differs)")
        problems += _headers(file, path, stated["samples"])
    reader = shards.Reader(folder)
    bad = []
    for i in np.flatnonzero(reader.index["shard"] == k):
        try:
            sample = reader.sample(int(i))
            fit = examine(sample["image"])
            if (fit.width, fit.height) != (sample["width"], sample["height"]) or fit.changes:
                bad.append(f"{path.name}: sample {i} is not the image that its JSON describes")
            if sample["class"] != reader.classes[sample["label"]]:
                bad.append(f"{path.name}: sample {i} is of {sample['class']}, but its label {sample['label']} means "
                           f"{reader.classes[sample['label']]}")
        except (DataError, Unfit) as error:
            bad.append(str(error))
        work.advance(1, int(reader.index["image_size"][i]))
    if len(bad) > _SHOWN:
        bad[_SHOWN:] = [f"{path.name}: {len(bad) - _SHOWN} more samples"]
    return problems + bad


def _headers(file: Any, path: Path, samples: int) -> list[str]:
    """What other tools, which read the tar from its beginning, would find."""
    kinds = Counter[str]()
    try:
        for member in tar.members(tar.Window(file, 0, os.fstat(file.fileno()).st_size)):
            kinds[member.name.partition(".")[2]] += 1
    except DataError as error:
        return [f"{path.name}: {error}"]
    if kinds != Counter({"jpg": samples, "cls": samples, "json": samples}):
        return [f"{path.name} holds {dict(kinds)}, not {samples} of each"]
    return []


def stats(folder: Path, count: int, workers: int | None) -> int:
    """Print each channel's mean and standard deviation, over pixels from 0 to 1, as transforms want them."""
    for each in _sets(folder):
        reader = shards.Reader(each)
        if not len(reader):
            raise DataError(f"{each} holds no images")
        chosen = np.unique(np.linspace(0, len(reader) - 1, min(count, len(reader))).astype(int))
        tasks = [(str(each), part) for part in np.array_split(chosen, -(-len(chosen) // 200))]
        bar = work.Bar(f"measuring {each.name}", len(chosen))
        sums = np.sum(list(work.each(_sums, tasks, workers or work.cores(), bar)), axis=0)
        mean = sums[1] / sums[0]
        std = np.sqrt(sums[2] / sums[0] - mean ** 2)
        print(f"{each}: {len(chosen):,} of {len(reader):,} images\n  mean {_three(mean)}\n  std  {_three(std)}")
    return 0


def _three(values: np.ndarray) -> str:
    return ", ".join(f"{v:.4f}" for v in values)


def _sums(task: tuple[str, np.ndarray]) -> np.ndarray:
    """Pixels, their sum and the sum of their squares; every image weighs the same, whatever its size."""
    reader = shards.Reader(task[0])
    out = np.zeros((3, 3))
    for i in task[1]:
        pixels = decode(reader.image(int(i))[0]).reshape(-1, 3)
        # By how often each of the 256 values occurs: exact, and without floats for every pixel.
        often = np.stack([np.bincount(pixels[:, c], minlength=256) for c in range(3)]) / len(pixels)
        values = np.arange(256) / 255
        out += np.stack([often.sum(1), often @ values, often @ values ** 2])
        work.advance(1)
    return out
