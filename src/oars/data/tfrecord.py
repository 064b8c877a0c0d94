"""TFRecord files of images, as TensorFlow's Inception scripts wrote them, read and written without TensorFlow.

A record is a length, a checksum of the length, the bytes, and a checksum of these (``oars.records``). The bytes are a
``tf.train.Example``: a map from names to lists of bytes, floats or integers, in protocol buffers' wire format. Labels
of the Inception scripts count from 1, since 0 is their background class; ``Reader`` gives labels from 0 on, like the
rest of this room.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oars import records
from oars.data.errors import DataError
from oars.records import field, varint

Value = list[bytes] | list[int] | list[float]


# ---- CRC-32C --------------------------------------------------------------------------------------------------------
# A CRC is linear: that of a whole is the exclusive or of those of its parts, each moved on over the bytes behind it. So
# NumPy works on lanes of 256 bytes at once, two bytes of each at a step, and then joins neighbours, again and again.

_LANE = 256


def _tables() -> tuple[np.ndarray, list[np.ndarray]]:
    byte = np.array(records.TABLE, np.uint32)
    low = byte[np.arange(65536) & 255]
    pair = byte[(low ^ (np.arange(65536, dtype=np.uint32) >> 8)) & 255] ^ (low >> 8)
    # moves[k][j][b]: what byte j (of value b) of a CRC becomes when 2 ** k bytes follow
    move = np.stack([byte if j == 0 else np.arange(256, dtype=np.uint32) << np.uint32(8 * (j - 1)) for j in range(4)])
    moves = [move]
    for _ in range(40):
        moves.append(_moved(moves[-1], moves[-1]))
    return pair, moves


def _moved(move: np.ndarray, crc: np.ndarray) -> np.ndarray:
    """Each CRC after as many zero bytes as the table ``move`` stands for."""
    parts = np.ascontiguousarray(crc).view(np.uint8).reshape(*crc.shape, 4)
    return move[0][parts[..., 0]] ^ move[1][parts[..., 1]] ^ move[2][parts[..., 2]] ^ move[3][parts[..., 3]]


_PAIR, _MOVES = _tables()


def crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C (Castagnoli) of some bytes."""
    size = len(data)
    if size <= 64:
        return records.crc32c(data)
    # Zeros in front do not change a CRC that starts from 0; what the usual start, all ones, adds is known apart.
    lanes = 1 << (-(-size // _LANE) - 1).bit_length()
    used = -(-size // _LANE)
    padded = np.zeros(used * _LANE, np.uint8)
    padded[used * _LANE - size:] = np.frombuffer(data, np.uint8)
    crc: np.ndarray = np.zeros(lanes, np.uint32)
    own = crc[lanes - used:]
    for pairs in np.ascontiguousarray(padded.view("<u2").reshape(used, -1).T):
        own[:] = _PAIR[(own & 0xFFFF) ^ pairs] ^ (own >> 16)
    k = _LANE.bit_length() - 1
    while len(crc) > 1:
        crc = _moved(_MOVES[k], crc[::2]) ^ crc[1::2]
        k += 1
    start: np.ndarray = np.full(1, 0xFFFFFFFF, np.uint32)
    for bit in range(size.bit_length()):
        if size >> bit & 1:
            start = _moved(_MOVES[bit], start)
    return int((crc ^ start)[0]) ^ 0xFFFFFFFF


def masked(data: bytes | memoryview) -> bytes:
    """The checksum as it stands in the file."""
    return records.masked(crc32c(data))


# ---- records --------------------------------------------------------------------------------------------------------

def record(data: bytes) -> bytes:
    """A record as it stands in the file."""
    return records.record(data, crc32c)


def offsets(path: str | os.PathLike[str]) -> np.ndarray:
    """Where each record's bytes begin, and how many there are, from the lengths alone: (n, 2)."""
    found: list[tuple[int, int]] = []
    with _open(path) as file:
        end, at = os.fstat(file.fileno()).st_size, 0
        while at < end:
            file.seek(at)
            head = file.read(12)
            if len(head) < 12:
                raise DataError(f"{path}: cut off at byte {at}, within the head of record {len(found)}")
            if head[8:] != masked(head[:8]):
                raise DataError(f"{path}: record {len(found)} at byte {at}: its length is damaged (CRC-32C differs)")
            size = struct.unpack("<Q", head[:8])[0]
            if at + 16 + size > end:
                raise DataError(f"{path}: cut off within record {len(found)}, which begins at byte {at}")
            found.append((at + 12, size))
            at += 16 + size
    return np.array(found, np.int64).reshape(-1, 2)


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Value]]:
    """The examples of one file, in order: feature name -> list of bytes, integers or floats."""
    where = offsets(path)
    with _open(path) as file:
        for number, (begin, size) in enumerate(where):
            yield _example_at(file, path, number, int(begin), int(size))


def _open(path: str | os.PathLike[str]) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _example_at(file: Any, path: str | os.PathLike[str], number: int, begin: int, size: int) -> dict[str, Value]:
    file.seek(begin)
    data = file.read(size + 4)
    where = f"{path}: record {number} at byte {begin - 12}"
    if len(data) < size + 4 or data[size:] != masked(memoryview(data)[:size]):
        raise DataError(f"{where}: its bytes are damaged (CRC-32C differs)")
    try:
        return decode(data[:size])
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


# ---- tf.train.Example -----------------------------------------------------------------------------------------------

def encode(example: dict[str, Value]) -> bytes:
    """An Example's bytes, its features sorted by name so that equal examples are equal bytes."""
    features = b"".join(field(1, field(1, name.encode()) + field(2, _feature(example[name])))
                        for name in sorted(example))
    return field(1, features)


def decode(data: bytes) -> dict[str, Value]:
    """The features of an Example."""
    example: dict[str, Value] = {}
    for features in _fields(data, 1):
        for entry in _fields(features, 1):
            names, values = list(_fields(entry, 1)), list(_fields(entry, 2))
            try:
                name = bytes(names[-1]).decode() if names else ""
            except UnicodeDecodeError:
                raise DataError("no tf.train.Example: a feature's name is not UTF-8") from None
            example[name] = _values(values[-1]) if values else []
    return example


def _feature(values: Value) -> bytes:
    """A Feature: field 1 holds bytes, 2 floats, 3 integers."""
    if values and isinstance(values[0], bytes):
        return field(1, b"".join(field(1, value) for value in values))  # type: ignore[arg-type]
    if values and isinstance(values[0], int):
        packed = b"".join(varint(int(value) & 0xFFFFFFFFFFFFFFFF) for value in values)
        return field(3, field(1, packed))
    return field(2, field(1, struct.pack(f"<{len(values)}f", *values)) if values else b"")


def _values(feature: memoryview) -> Value:
    for number, kind, content in _parse(feature):
        if kind != 2 or not isinstance(content, memoryview):
            continue
        if number == 1:
            return [bytes(value) for value in _fields(content, 1)]
        if number == 2:
            return [x for _, k, v in _parse(content) for x in _floats(k, v)]
        if number == 3:
            return [x for _, k, v in _parse(content) for x in _integers(k, v)]
    return []


def _floats(kind: int, value: memoryview | int) -> list[float]:
    if kind == 5:
        return [struct.unpack("<f", struct.pack("<I", value))[0]]
    if kind != 2 or not isinstance(value, memoryview) or len(value) % 4:
        raise DataError("no tf.train.Example: a list of floats is damaged")
    return list(struct.unpack(f"<{len(value) // 4}f", value))


def _integers(kind: int, value: memoryview | int) -> list[int]:
    if isinstance(value, int):
        return [value - (value >> 63 << 64)]
    out, at = [], 0
    while at < len(value):
        number, at = _read_varint(value, at)
        out.append(number - (number >> 63 << 64))
    return out


def _fields(data: bytes | memoryview, number: int) -> Iterator[memoryview]:
    """The contents of all fields of this number that hold bytes."""
    for found, kind, content in _parse(data):
        if found == number and kind == 2 and isinstance(content, memoryview):
            yield content


def _parse(data: bytes | memoryview) -> Iterator[tuple[int, int, memoryview | int]]:
    """The fields of a message: number, wire type, content."""
    view, at = memoryview(data), 0
    while at < len(view):
        tag, at = _read_varint(view, at)
        kind = tag & 7
        if kind == 0:
            value, at = _read_varint(view, at)
            yield tag >> 3, kind, value
            continue
        size, at = _read_varint(view, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if size < 0 or at + size > len(view):
            raise DataError(f"no tf.train.Example: a field at byte {at} is damaged")
        content = view[at:at + size]
        at += size
        yield tag >> 3, kind, content if kind == 2 else int.from_bytes(content, "little")


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            break
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise DataError(f"no tf.train.Example: a number at byte {at} is damaged")


# ---- images ---------------------------------------------------------------------------------------------------------

def image_example(sample: dict[str, Any]) -> dict[str, Value]:
    """A sample of ``shards.Reader`` under the Inception scripts' feature names."""
    boxes = sample["boxes"]
    return {
        "image/encoded": [bytes(sample["image"])], "image/format": [b"JPEG"], "image/colorspace": [b"RGB"],
        "image/channels": [3], "image/height": [int(sample["height"])], "image/width": [int(sample["width"])],
        "image/filename": [os.path.basename(sample["name"]).encode()],
        "image/class/label": [sample["label"] + 1], "image/class/synset": [sample["class"].encode()],
        "image/class/text": [sample["class"].encode()],
        **{f"image/object/bbox/{side}": [float(v) for v in boxes[:, k]]
           for k, side in enumerate(("xmin", "ymin", "xmax", "ymax"))},
        "image/object/bbox/label": [sample["label"] + 1] * len(boxes),
    }


class Reader:
    """Samples of one TFRecord file, or of all in a folder, by number, with the same items as those of shards."""

    def __init__(self, path: str | os.PathLike[str], first_label: int = 1) -> None:
        self.path, self._first = Path(path), first_label
        self.files = [self.path]
        if self.path.is_dir():
            self.files = sorted(p for p in self.path.iterdir()
                                if p.suffix in (".tfrecord", ".tfrecords") or "-of-" in p.name)
            if not self.files:
                raise DataError(f"{path} holds no TFRecord files (*.tfrecord, train-00000-of-00016)")
        self._where = [offsets(file) for file in self.files]
        self._ends = np.cumsum([len(w) for w in self._where])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def example(self, i: int) -> dict[str, Value]:
        """The features of record ``i``."""
        if not 0 <= i < len(self):
            raise IndexError(f"record {i} of {len(self)}")
        file = int(np.searchsorted(self._ends, i, side="right"))
        number = int(i - (self._ends[file - 1] if file else 0))
        begin, size = self._where[file][number]
        with _open(self.files[file]) as stream:
            return _example_at(stream, self.files[file], number, int(begin), int(size))

    def sample(self, i: int) -> dict[str, Any]:
        """An image with its label (from 0 on), class, name, size and boxes."""
        example = self.example(i)

        def one(name: str, kind: type, default: Any) -> Any:
            values = example.get(name) or [default]
            if not isinstance(values[0], kind):
                raise DataError(f"{self.path}: record {i}: {name} is no {kind.__name__}")
            return values[0]

        if not example.get("image/encoded"):
            raise DataError(f"{self.path}: record {i} has no image/encoded: it holds {', '.join(sorted(example))}")
        sides = [example.get(f"image/object/bbox/{side}", []) for side in ("xmin", "ymin", "xmax", "ymax")]
        if len({len(side) for side in sides}) > 1 or any(isinstance(v, bytes) for side in sides for v in side):
            raise DataError(f"{self.path}: record {i}: its bounding boxes are incomplete")
        return {
            "key": f"{i:08d}", "image": one("image/encoded", bytes, b""),
            "label": one("image/class/label", int, self._first - 1) - self._first,
            "class": one("image/class/synset", bytes, b"").decode("utf-8", "replace"),
            "name": one("image/filename", bytes, b"").decode("utf-8", "replace"),
            "width": one("image/width", int, 0), "height": one("image/height", int, 0),
            "boxes": np.array(sides, np.float32).T.reshape(-1, 4),
        }


assert sys.byteorder == "little", "the checksums are computed on little-endian views"
