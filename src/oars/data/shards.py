"""Tar shards: a folder of plain tar files that any WebDataset tool reads, with an index that finds sample i at once.

    OUT/shard-000000.tar ...   members 00000042.jpg, 00000042.cls (the label), 00000042.json (name, class, size, boxes)
    OUT/index.npy              per sample: shard, label, and where its image and its JSON lie, with a CRC-32 of each
    OUT/labels.json            class name -> label: 0, 1, ... in the order of the sorted names
    OUT/quarantine/            what was left out: reasons.jsonl says why, files.tar has the bytes, by number of the line
    OUT/manifest.json          the shards with their SHA-256, counts, and a checksum of itself; written last

The manifest is the last thing written, so a folder that has one is complete. ``Reader`` maps the shards into memory and
takes no notice of their tar headers; every image is compared with its CRC-32 as it is read, so damage is an error that
names the shard and the sample, never a wrong picture. Folders and tar files of other WebDataset tools have no index:
theirs is made from the headers when they are opened.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import re
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oars.data import tar
from oars.data.errors import DataError

FORMAT = "oars shards 1"
ROW = np.dtype([("shard", "<u4"), ("label", "<i4"), ("image", "<u8"), ("image_size", "<u4"), ("image_crc", "<u4"),
                ("meta", "<u8"), ("meta_size", "<u4"), ("meta_crc", "<u4")])
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
_MAPPED = 512  # shards mapped at a time: each holds a file descriptor, and 1024 is a usual limit


class Row(NamedTuple):
    """Where a sample lies in its shard: a line of the index, without the shard's number."""

    label: int
    image: int
    image_size: int
    image_crc: int
    meta: int
    meta_size: int
    meta_crc: int


class Writer:
    """Writes one shard, into a file that gets its name only when it is whole and on disk."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[Row]()
        self._part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._file = open(self._part, "wb")
        self._sum, self._at = hashlib.sha256(), 0

    def add(self, key: str, image: bytes | memoryview, label: int, meta: dict[str, Any]) -> None:
        """Append a sample."""
        text = json.dumps(meta, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        where = [self._member(f"{key}.jpg", image), self._member(f"{key}.cls", b"%d" % label),
                 self._member(f"{key}.json", text)]
        self.rows.append(Row(label, where[0], len(image), zlib.crc32(image), where[2], len(text), zlib.crc32(text)))

    def _member(self, name: str, data: bytes | memoryview) -> int:
        begins = self._at + tar.BLOCK
        for piece in (tar.header(name, len(data)), data, tar.padding(len(data))):
            self._put(piece)
        return begins

    def _put(self, piece: bytes | memoryview) -> None:
        self._file.write(piece)
        self._sum.update(piece)
        self._at += len(piece)

    def close(self) -> tuple[int, str]:
        """End the archive and give it its name; its size and SHA-256."""
        self._put(tar.END)
        sync_close(self._file)
        os.replace(self._part, self.path)
        return self._at, self._sum.hexdigest()


def sync_close(file: Any) -> None:
    """Have what was written on disk before anything is said about it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is either there and whole, or not there."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def encode_manifest(facts: dict[str, Any]) -> bytes:
    """The manifest's text; it carries a checksum of itself."""
    body = json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()
    return json.dumps({**facts, "sha256": hashlib.sha256(body).hexdigest()}, sort_keys=True, indent=1,
                      ensure_ascii=False).encode() + b"\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a packed folder."""
    path = folder / "manifest.json"
    try:
        facts = json.loads(path.read_bytes())
        stated = facts.pop("sha256")
        body = json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()
        whole = hashlib.sha256(body).hexdigest() == stated
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise DataError(f"{path} is damaged: restore it, or pack again")
    if facts.get("format") != FORMAT:
        raise DataError(f"{path} is of format {facts.get('format')!r}, this version reads {FORMAT!r}")
    # The checksum is against accidents. Somebody may have written the file on purpose: it must not name other files.
    try:
        good = all(re.fullmatch(r"shard-\d+\.tar", shard["name"]) and isinstance(shard["samples"], int)
                   and isinstance(shard["bytes"], int) for shard in facts["shards"])
        good = good and all(isinstance(facts[key], int) for key in ("samples", "index")) and facts["samples"] >= 0
    except (KeyError, TypeError):
        good = False
    if not good:
        raise DataError(f"{path} does not describe shards: pack again")
    return facts


class Reader:
    """Samples by number: ``len(r)``, ``r.sample(i)``, ``r.image(i)``. May be pickled, and used after a fork.

    >>> r = Reader("shards/train")
    >>> jpeg, label = r.image(0)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir() and (self.path / "manifest.json").exists():
            facts = read_manifest(self.path)
            self.classes = _labels(self.path, facts["labels"])
            self._files = [self.path / shard["name"] for shard in facts["shards"]]
            self.index, self._has_crc = _index(self.path, facts), True
        else:
            self._files = sorted(self.path.glob("*.tar")) if self.path.is_dir() else [self.path]
            if not self._files:
                raise DataError(f"{self.path} holds neither a manifest.json nor tar files: pack images with "
                                "`oars data pack`")
            self.index, self._has_crc = _scan(self._files), False
            self.classes = []
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    def __len__(self) -> int:
        return len(self.index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}

    @property
    def labels(self) -> np.ndarray:
        """The label of every sample."""
        return self.index["label"]

    def image(self, i: int) -> tuple[memoryview, int]:
        """The encoded image and the label of sample ``i``; nothing is copied."""
        row = self._row(i)
        return self._bytes(i, row, "image"), int(row["label"])

    def sample(self, i: int) -> dict[str, Any]:
        """All of sample ``i``: key, image (encoded), label, class, name, width, height, boxes (n × 4, from 0 to 1:
        xmin, ymin, xmax, ymax), and whatever else its JSON holds."""
        row = self._row(i)
        image, meta, boxes = bytes(self._bytes(i, row, "image")), {}, np.zeros((0, 4), np.float32)
        if row["meta_size"]:
            text = bytes(self._bytes(i, row, "meta"))
            try:
                meta = json.loads(text)
                boxes = np.asarray(meta.pop("boxes", []), np.float32).reshape(-1, 4)
            except (ValueError, TypeError, AttributeError, RecursionError):
                raise DataError(f"{self._place(i, row)}: its JSON is not that of a sample") from None
        return {"key": f"{int(i):08d}", **meta, "image": image, "label": int(row["label"]), "boxes": boxes}

    def _row(self, i: int) -> Any:
        if not -len(self.index) <= i < len(self.index):
            raise IndexError(f"sample {i} of {len(self.index)}")
        return self.index[i]

    def _bytes(self, i: int, row: Any, what: str) -> memoryview:
        begin, size = int(row[what]), int(row[f"{what}_size"])
        data = memoryview(self._map(int(row["shard"])))[begin:begin + size]
        if len(data) < size:
            raise DataError(f"{self._place(i, row)}: the shard is cut off there")
        if self._has_crc and zlib.crc32(data) != row[f"{what}_crc"]:
            raise DataError(f"{self._place(i, row)}: its bytes have changed since it was packed (CRC-32 differs)")
        return data

    def _map(self, shard: int) -> mmap.mmap:
        if shard in self._maps:
            self._maps.move_to_end(shard)
            return self._maps[shard]
        if shard >= len(self._files):
            raise DataError(f"{self.path / 'index.npy'} names shard {shard} of {len(self._files)}: pack again")
        path = self._files[shard]
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise DataError(f"{path} is empty: it should be a shard") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        self._maps[shard] = mapped
        if len(self._maps) > _MAPPED:
            self._maps.popitem(last=False)  # unmapped once nobody holds a part of it
        return mapped

    def _place(self, i: int, row: Any) -> str:
        return f"{self._files[int(row['shard'])]}: sample {i} at byte {int(row['image'])}"


def _labels(folder: Path, stated: str) -> list[str]:
    """The class names in the order of their labels."""
    path = folder / "labels.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != stated:
        raise DataError(f"{path} is not the file that was packed (SHA-256 differs): restore it, or pack again")
    labels = json.loads(data)
    if not isinstance(labels, dict) or list(labels.values()) != list(range(len(labels))):
        raise DataError(f"{path} is no label map: pack again")
    return list(labels)


def _index(folder: Path, facts: dict[str, Any]) -> np.ndarray:
    """The index, mapped into memory, after its checksum was compared."""
    path = folder / "index.npy"
    head = _npy_head(facts["samples"])
    try:
        with open(path, "rb") as file:
            good = file.read(len(head)) == head and os.fstat(file.fileno()).st_size == (
                len(head) + facts["samples"] * ROW.itemsize)
        rows = np.zeros(0, ROW)
        if good and facts["samples"]:  # an empty file cannot be mapped
            rows = np.asarray(np.memmap(path, ROW, "r", len(head), (facts["samples"],)))  # a plain array is read faster
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; pack again, or restore it") from None
    if not good or zlib.crc32(rows.tobytes()) != facts["index"]:
        raise DataError(f"{path} is damaged: restore it, or pack again")
    return rows


def _npy_head(samples: int) -> bytes:
    """What a .npy file of so many rows begins with; compared, not parsed, so a damaged one is never acted upon."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": ROW.descr, "fortran_order": False, "shape": (samples,)})
    return out.getvalue()


def _scan(files: list[Path]) -> np.ndarray:
    """The index of shards that came without one: members of one key are neighbours, as WebDataset has them."""
    rows = []
    for number, path in enumerate(files):
        current, row = "", None
        try:
            with open(path, "rb") as file:
                for member in tar.members(tar.Window(file, 0, os.fstat(file.fileno()).st_size)):
                    folder, _, base = member.name.rpartition("/")
                    key, _, kind = base.partition(".")
                    if member.refused or not kind:
                        continue
                    if row is None or f"{folder}/{key}" != current:
                        current, row = f"{folder}/{key}", np.zeros((), ROW)
                        row["shard"], row["label"] = number, -1
                        rows.append(row)
                    _note(row, member, f".{kind.lower()}", file, path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
    rows = [row for row in rows if row["image_size"]]
    return np.array(rows, ROW) if rows else np.zeros(0, ROW)


def _note(row: Any, member: tar.Member, kind: str, file: Any, path: Path) -> None:
    """Put one member of a foreign shard into its sample's row."""
    if kind in IMAGES:
        row["image"], row["image_size"] = member.offset, member.size
    elif kind == ".json":
        row["meta"], row["meta_size"] = member.offset, member.size
    elif kind == ".cls":
        file.seek(member.offset)
        text = file.read(min(member.size, 20)).strip()
        if not text.isdigit() or int(text) >= 1 << 31:
            raise DataError(f"{member.name} holds {text!r}, not a label: a number from 0 on")
        row["label"] = int(text)
