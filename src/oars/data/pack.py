"""``oars data pack``: images, wherever they come from, into shards.

The order is decided first, from names and a seed alone: images are sorted by a hash of their names, so that every
shard is a fair mixture, and cut into shards by size. So a shard's content does not depend on who writes it or when: any
number of workers makes the same bytes, and a shard that was interrupted is simply made again.

    1. list the images (sources.py), decide the order, cut it into shards
    2. each worker takes a shard: reads its images (each once), decodes them, converts or rejects, writes the shard
    3. of images with the same bytes all but the first are taken out again; most shards have none, and stay as they are
    4. shards get their places, then index, labels and quarantine, and last the manifest, which means: complete

Until then all is in ``OUT/.work``; a shard there counts once the record beside it is there and states its size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oars.data import boxes, shards, tar, work
from oars.data.errors import DataError
from oars.data.examine import MAX_BYTES, Unfit, examine
from oars.data.sources import ImageSet, find, label_map

_SEEN = np.dtype([("shard", "i4"), ("number", "i8"), ("place", "i8"), ("head", "S16"), ("tail", "S16")])


class Entry(NamedTuple):
    """One image on its way into a shard."""

    number: int  # in the shuffled order: its key
    place: int  # in the source
    name: str
    class_: str
    label: int
    path: str
    offset: int
    size: int
    notes: boxes.Notes | None


def pack(source: Path, out: Path, annotations: Path | None = None, labels: Path | None = None,
         workers: int | None = None, seed: int = 0, shard_bytes: int = 256 << 20) -> int:
    """Pack every set of images in ``source``; 1 if an archive is damaged, so that images may be missing, else 0."""
    if not source.exists():
        raise DataError(f"no such file or folder: {source}")
    if source.resolve() == out.resolve() or source.resolve() in out.resolve().parents and not source.is_file():
        raise DataError(f"{out} lies within {source}: choose an OUT elsewhere")
    with _locked(out):
        sets = find(source, annotations, out / ".work")
        mapping = label_map((c for images in sets for c in images.classes), labels)
        for images in sets:
            Packing(images, out / images.title, mapping, seed, shard_bytes).run(workers or work.cores())
        for images in sets:
            shutil.rmtree(out / images.title / ".work", ignore_errors=True)
    return int(any(images.damaged for images in sets))


class _locked:
    """Holds OUT against a second pack into it.

    Workers share the lock. So when a pack was killed, the next one begins only once its orphans are gone too: they
    notice within a second, or an image.
    """

    def __init__(self, out: Path) -> None:
        self._out = out

    def __enter__(self) -> None:
        try:
            (self._out / ".work").mkdir(parents=True, exist_ok=True)
            self._file = open(self._out / ".work" / "lock", "w")
        except OSError as error:
            raise DataError(f"cannot write to {self._out}: {error.strerror}") from None
        until = time.monotonic() + 5
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > until:
                    raise DataError(f"another pack into {self._out} is running") from None
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if (self._out / ".work").exists() and os.listdir(self._out / ".work") == ["lock"]:  # nothing was begun
            shutil.rmtree(self._out / ".work")
            if not os.listdir(self._out):
                self._out.rmdir()


class Packing:
    """One set on its way into one folder."""

    def __init__(self, images: ImageSet, out: Path, labels: dict[str, int], seed: int, shard_bytes: int) -> None:
        self.images, self.out, self.labels = images, out, labels
        self.work = out / ".work"
        keys = np.fromiter((int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode("utf-8", "surrogateescape"),
                                                           digest_size=8).digest(), "big") for name in images.names),
                           np.uint64, len(images.names))
        self.order = np.argsort(keys, kind="stable")
        sizes = np.frombuffer(images.size, np.int64)[self.order]
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        first = np.searchsorted(begins // shard_bytes, np.arange(int(begins[-1]) // shard_bytes + 1))
        self.cuts = np.unique(np.append(first, len(sizes)))
        self.plan = {"seed": seed, "shard_bytes": shard_bytes, "source": self._fingerprint()}

    def _fingerprint(self) -> str:
        """What the shards are made from, as far as it is known without reading the images."""
        whole = hashlib.sha256(json.dumps(self.labels).encode())
        for i, name in enumerate(self.images.names):
            line = f"{name}|{self.images.size[i]}|{self.images.classes[i]}|{self.images.notes(i)}\n"
            whole.update(line.encode("utf-8", "surrogateescape"))
        return whole.hexdigest()

    @property
    def count(self) -> int:
        """How many shards."""
        return len(self.cuts) - 1

    def run(self, workers: int) -> None:
        """Make what is not there yet, and say what became of every image."""
        if self._complete():
            print(f"{self.out}: already packed")
            return
        self._prepare()
        todo = [k for k in range(self.count) if not _drafted(self.work, self.out, k)]
        total = sum(int(self.cuts[k + 1] - self.cuts[k]) for k in todo)
        bar = work.Bar(f"packing {self.images.title or self.out.name}", total)
        tasks = ((str(self.work), k, list(self._entries(k))) for k in todo)
        for _ in work.each(draft, tasks, min(workers, max(1, len(todo))), bar):
            pass
        self._drop_duplicates()
        self._finish()

    def _complete(self) -> bool:
        if not (self.out / "manifest.json").exists():
            return False
        if shards.read_manifest(self.out)["plan"] != self.plan:
            raise DataError(f"{self.out} holds shards of another source, or packed with other options: remove it, or "
                            "choose another OUT")
        return True

    def _prepare(self) -> None:
        """An empty .work, or one of the same plan with nothing half done in it."""
        self.work.mkdir(parents=True, exist_ok=True)
        plan = {**self.plan, "times": [path.stat().st_mtime_ns for path in self.images.files]}
        note = self.work / "plan.json"
        if not note.exists():
            if any(self.out.glob("*.tar")):
                raise DataError(f"{self.out} already holds tar files: choose another OUT")
            shards.write_whole(note, json.dumps(plan).encode())
        elif json.loads(note.read_bytes()) != plan:
            raise DataError(f"{self.out} holds an unfinished pack of another source, or with other options: remove it, "
                            "or choose another OUT")
        for folder in (self.work, self.out, self.out / "quarantine"):
            for left in folder.glob("*.tmp"):
                left.unlink()

    def _entries(self, k: int) -> Iterator[Entry]:
        images = self.images
        for number in range(int(self.cuts[k]), int(self.cuts[k + 1])):
            i = int(self.order[number])
            yield Entry(number, i, images.names[i], images.classes[i], self.labels[images.classes[i]],
                        str(images.path(i)), images.offset[i], images.size[i], images.notes(i))

    def _drop_duplicates(self) -> None:
        """Of images with the same bytes keep the one that is first in the source."""
        parts = []
        for k in range(self.count):
            parts.append(np.array([(k, e["number"], e["place"], e["digest"][:16], e["digest"][16:])
                                   for e in _record(self.work, k)["samples"]], _SEEN))
        seen = np.sort(np.concatenate(parts), order=["head", "tail", "place"])
        same = (seen["head"][1:] == seen["head"][:-1]) & (seen["tail"][1:] == seen["tail"][:-1])
        drops: dict[int, dict[int, int]] = {}
        first = np.maximum.accumulate(np.where(np.append(False, same), 0, np.arange(len(seen))))  # of those alike
        for j in np.flatnonzero(same) + 1:
            drops.setdefault(int(seen["shard"][j]), {})[int(seen["number"][j])] = int(seen["place"][first[j]])
        for k, firsts in drops.items():
            redraft(self.work, k, {number: (self.images.names[place], self.images.classes[place])
                                   for number, place in firsts.items()})

    def _finish(self) -> None:
        """Put everything in its place; what is there is complete once the manifest is."""
        rows, made, rejected, counts = [np.zeros(0, shards.ROW)], [], [], Counter[str]()
        for k in range(self.count):
            record = _record(self.work, k)
            draft_ = self.work / _name(k)
            if draft_.exists():
                os.replace(draft_, self.out / _name(k))
            made.append({"name": _name(k), "samples": len(record["samples"]), "bytes": record["bytes"],
                         "sha256": record["sha256"]})
            rows.append(np.array([(k, *sample["row"]) for sample in record["samples"]], shards.ROW))
            rejected += record["rejected"]
            counts.update(record["counts"])
        rejected += [{"name": p.name, "kind": p.kind, "reason": p.reason} for p in self.images.problems]
        counts.update(problem.kind for problem in self.images.problems)
        index = np.concatenate(rows)
        labels = json.dumps(self.labels, indent=0, ensure_ascii=False).encode() + b"\n"
        with open(self.work / "index.tmp", "wb") as file:
            np.save(file, index)
            shards.sync_close(file)
        os.replace(self.work / "index.tmp", self.out / "index.npy")
        shards.write_whole(self.out / "labels.json", labels)
        self._quarantine(rejected)
        _sync_folder(self.out)
        facts = {"format": shards.FORMAT, "plan": self.plan, "samples": len(index), "shards": made,
                 "labels": hashlib.sha256(labels).hexdigest(), "index": zlib.crc32(index.tobytes()),
                 "listed": len(self.images.names), "counts": dict(sorted((+counts).items()))}
        shards.write_whole(self.out / "manifest.json", shards.encode_manifest(facts))
        print("\n".join(report(self.out, facts)))

    def _quarantine(self, rejected: list[dict[str, Any]]) -> None:
        """What was left out: a line for each with the reason, and the bytes under the number of the line."""
        folder = self.out / "quarantine"
        folder.mkdir(exist_ok=True)
        lines, part = [], self.work / "files.tmp"
        with open(part, "wb") as out:
            for line, each in enumerate(rejected):
                place = each.pop("place", None)
                lines.append(json.dumps(each, sort_keys=True, ensure_ascii=True))
                if place is not None and each["kind"] != "unreadable" and self.images.size[place] <= MAX_BYTES:
                    data = read(str(self.images.path(place)), self.images.offset[place], self.images.size[place])
                    out.write(tar.header(f"{line + 1:06d}.bin", len(data)) + data + tar.padding(len(data)))
            out.write(tar.END)
            shards.sync_close(out)
        os.replace(part, folder / "files.tar")
        shards.write_whole(folder / "reasons.jsonl", "".join(f"{line}\n" for line in lines).encode())


def _sync_folder(folder: Path) -> None:
    """Have the names of files on disk, not only the files: a manifest must not outlive a shard."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def report(out: Path, facts: dict[str, Any]) -> list[str]:
    """The closing lines: what became of every image."""
    size = sum(shard["bytes"] for shard in facts["shards"])
    lines = [f"{out}: {facts['samples']:,} of {facts['listed']:,} images in {len(facts['shards'])} shards, "
             f"{size / 1e6:,.1f} MB"]
    return lines + [f"  {count:>9,}  {kind}" for kind, count in facts["counts"].items()]


# ---- one shard ----------------------------------------------------------------------------------------------------

def _name(k: int) -> str:
    return f"shard-{k:06d}.tar"


def _record(folder: Path, k: int) -> dict[str, Any]:
    return json.loads((folder / f"{_name(k)}.json").read_bytes())


def _drafted(folder: Path, out: Path, k: int) -> bool:
    """Whether a shard is done: one whose size is not what its record says is no part of it."""
    try:
        size = _record(folder, k)["bytes"]
    except FileNotFoundError:
        return False
    return any(path.exists() and path.stat().st_size == size for path in (folder / _name(k), out / _name(k)))


def draft(task: tuple[str, int, list[Entry]]) -> None:
    """A worker's task: read, examine and write the images of one shard, then the record of what was done."""
    folder, k, entries = Path(task[0]), task[1], task[2]
    writer = shards.Writer(folder / _name(k))
    samples: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    counts = Counter[str]()
    for entry in entries:
        try:
            data = read(entry.path, entry.offset, min(entry.size, MAX_BYTES + 1))
            fit = examine(data)
        except Unfit as error:
            counts[error.kind] += 1
            rejected.append({"name": entry.name, "kind": error.kind, "reason": error.reason, "place": entry.place})
        else:
            meta, trouble = _meta(entry, fit)
            counts.update(fit.changes)
            for kind, reason in trouble:
                counts[kind] += 1
                rejected.append({"name": entry.name, "kind": kind, "reason": reason})
            counts["boxes"] += len(meta["boxes"])
            writer.add(f"{entry.number:08d}", fit.jpeg, entry.label, meta)
            samples.append({"number": entry.number, "place": entry.place, "row": writer.rows[-1],
                            "digest": hashlib.blake2b(data, digest_size=16).hexdigest()})
        work.advance(1, entry.size)
    _put(folder, k, writer, samples, rejected, counts)


def _meta(entry: Entry, fit: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A sample's JSON, and what was wrong with its boxes."""
    found, trouble = boxes.relative(entry.notes, fit.width, fit.height, fit.turned) if entry.notes else ([], [])
    meta = {"name": entry.name, "class": entry.class_, "label": entry.label, "width": fit.width, "height": fit.height,
            "boxes": found}
    if fit.changes:
        meta["changes"] = list(fit.changes)
    return meta, trouble


def _put(folder: Path, k: int, writer: shards.Writer, samples: list[dict[str, Any]], rejected: list[dict[str, Any]],
         counts: Counter[str]) -> None:
    """Shard first, then its record: without it, or with another size in it, the shard does not count."""
    size, digest = writer.close()
    shards.write_whole(folder / f"{_name(k)}.json", json.dumps({
        "samples": samples, "rejected": rejected, "counts": counts, "bytes": size, "sha256": digest}).encode())


def redraft(folder: Path, k: int, drops: dict[int, tuple[str, str]]) -> None:
    """Write a shard anew, from itself, without the samples that are like others: number -> name and class of those."""
    record = _record(folder, k)
    rejected, counts, samples = record["rejected"], Counter[str](record["counts"]), []
    with open(folder / _name(k), "rb") as old:
        writer = shards.Writer(folder / _name(k))
        for sample in record["samples"]:
            row = shards.Row(*sample["row"])
            old.seek(row.meta)
            meta = json.loads(old.read(row.meta_size))
            if sample["number"] in drops:
                counts.subtract({"boxes": len(meta["boxes"]), **dict.fromkeys(meta.get("changes", ()), 1)})
                name, class_ = drops[sample["number"]]
                kind = "duplicate" if class_ == meta["class"] else "duplicate of another class"
                counts[kind] += 1
                rejected.append({"name": meta["name"], "kind": kind, "reason": f"the same bytes as {name}"})
                continue
            old.seek(row.image)
            writer.add(f"{sample['number']:08d}", old.read(row.image_size), row.label, meta)
            samples.append({**sample, "row": writer.rows[-1]})
    _put(folder, k, writer, samples, rejected, +counts)


def read(path: str, offset: int, size: int) -> bytes:
    """Some bytes of a file; what cannot be read is unfit."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError as error:
        raise Unfit("unreadable", error.strerror or str(error)) from None
