"""Snapshots on disk: one file each, ``<run folder>/snapshots/<step>.snap``, whole or not there.

A file is: 8 bytes of magic, its length, its header's length, a JSON header, the bytes of all arrays, and a BLAKE2b
digest of everything before it. Nothing in it is ever executed: what JSON does not know (tuples, sets, bytes, dtypes) is
tagged, and what has no tag is refused when the snapshot is made. It is written beside its final name, synced, renamed,
and the folder synced; the newest two are kept. A file that is cut short or changed is refused by its length or digest.

``Blob`` is an array's bytes with a dtype's name: the adapters turn their frameworks' tensors into blobs and back.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oars import runfolder
from oars.adapt.replay.tape import Damaged

KEPT = 2
MAGIC = b"OARSNAP1"
_ALIGN = 64
_HEAD = len(MAGIC) + 16
_DIGEST = 32


class Refused(Exception):
    """A value that a snapshot cannot hold; says which, and what to do."""


class Blob(NamedTuple):
    """An array: its framework ("torch", "numpy"), the framework's name of its dtype, its shape and its bytes."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: Any


# ---- values as JSON -------------------------------------------------------------------------------------------------


def encode(value: object, blobs: list[Blob], name: str, convert: Callable[[Any], Any] = lambda value: None) -> Any:
    """``value`` as JSON with tags, arrays in ``blobs``; ``convert`` gives a Blob or a tagged dict for its own kinds."""
    if value is None or isinstance(value, (bool, str)) and type(value) in (bool, str):
        return value
    if type(value) is int or type(value) is float:
        return value
    if type(value) is list:
        return [encode(v, blobs, f"{name}[{i}]", convert) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return _encode_dict(value, blobs, name, convert)
    made = convert(value)
    if isinstance(value, np.ndarray) and value.dtype != object and made is None:
        made = Blob("numpy", value.dtype.str, value.shape, np.ascontiguousarray(value))
    if isinstance(made, Blob):
        blobs.append(made)
        return {"$blob": len(blobs) - 1}
    if made is not None:
        return made
    if isinstance(value, np.generic) and value.dtype != object:
        return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    for kind, tag in ((tuple, "$tuple"), (deque, "$deque"), (set, "$set"), (frozenset, "$frozenset")):
        if type(value) is kind:
            items = [encode(v, blobs, f"{name}[{i}]", convert) for i, v in enumerate(value)]
            return {tag: [value.maxlen, items] if isinstance(value, deque) else items}
    kind_name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise Refused(f"{name} is a {kind_name}, which a snapshot cannot hold: give "
                  "its owner a state_dict() and load_state_dict() made of tensors, numbers, strings, lists and dicts, "
                  "and register it with oars.keep")


def _encode_dict(value: dict, blobs: list[Blob], name: str, convert: Callable[[Any], Any]) -> Any:
    plain = type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value)
    if plain:
        return {k: encode(v, blobs, f"{name}[{k!r}]", convert) for k, v in value.items()}
    tag = "$ordered" if isinstance(value, OrderedDict) else "$dict"
    return {tag: [[encode(k, blobs, f"a key of {name}", convert), encode(v, blobs, f"{name}[{k!r}]", convert)]
                  for k, v in value.items()]}


def decode(value: object, blobs: list[Any], build: Callable[[str, Any], Any] | None = None) -> Any:
    """The value that ``encode`` was given; ``blobs`` are ready-made arrays, ``build`` knows the adapter's tags."""
    if isinstance(value, list):
        return [decode(v, blobs, build) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if not tag.startswith("$"):
        return {k: decode(v, blobs, build) for k, v in value.items()}
    inner = value[tag]
    if tag == "$blob":
        return blobs[inner]
    if tag in ("$dict", "$ordered"):
        pairs = [(decode(k, blobs, build), decode(v, blobs, build)) for k, v in inner]
        return OrderedDict(pairs) if tag == "$ordered" else dict(pairs)
    if tag in ("$tuple", "$set", "$frozenset"):
        return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](decode(v, blobs, build) for v in inner)
    if tag == "$deque":
        return deque((decode(v, blobs, build) for v in inner[1]), inner[0])
    if tag == "$bytes":
        return base64.b64decode(inner)
    if tag == "$complex":
        return complex(*inner)
    if tag == "$scalar":
        return np.frombuffer(base64.b64decode(inner[1]), np.dtype(inner[0]))[0]
    if build is None:
        raise Damaged(f"an unknown tag {tag}")
    return build(tag, inner)


# ---- files ----------------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    """What the snapshot of a step is called."""
    return f"{step:08d}.snap"


def write(folder: Path, step: int, header: dict[str, Any], blobs: list[Blob], sync: int | None = None) -> Path:
    """Write the snapshot of ``step`` into the run folder; on any OSError nothing of it is left and the others stay.

    ``sync`` is a file descriptor that must be on disk before the snapshot may count: the log it refers to.
    """
    place = folder / runfolder.SNAPSHOTS
    os.makedirs(place, exist_ok=True)
    path, part = place / name_of(step), place / f".{step:08d}.{os.getpid()}.part"
    offset, placed = 0, []
    for blob in blobs:
        size = _size(blob.data)
        placed.append({"kind": blob.kind, "dtype": blob.dtype, "shape": list(blob.shape), "at": offset, "bytes": size})
        offset += -(-size // _ALIGN) * _ALIGN
    text = json.dumps({**header, "step": step, "blobs": placed}).encode()
    text += b" " * (-(_HEAD + len(text)) % _ALIGN)
    total = _HEAD + len(text) + offset + _DIGEST
    digest = hashlib.blake2b(digest_size=_DIGEST)
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            def put(data: bytes | memoryview) -> None:
                digest.update(data)
                _write_all(fd, data)

            put(MAGIC + total.to_bytes(8, "little") + len(text).to_bytes(8, "little") + text)
            for blob in blobs:
                data = _bytes(blob.data)
                put(data)
                put(b"\0" * (-len(data) % _ALIGN))
            _write_all(fd, digest.digest())
            os.fsync(fd)
        finally:
            os.close(fd)
        if sync is not None:
            os.fsync(sync)
        os.rename(part, path)
    except OSError:
        try:
            os.unlink(part)
        except OSError:
            pass
        raise
    _sync_folder(place)
    _prune(place)
    return path


def _bytes(array: np.ndarray) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat) if flat.size else memoryview(b"")


def _size(array: np.ndarray) -> int:
    return int(array.nbytes)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[: 1 << 26]):]


def _sync_folder(place: Path) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(fd)


def _prune(place: Path) -> None:
    """Keep the newest; remove what writers that were killed have left."""
    names = found(place)
    for name in [*names[KEPT:], *(n for n in os.listdir(place) if n.endswith(".part"))]:
        try:
            os.unlink(place / name)
        except OSError:
            pass


def found(place: Path) -> list[str]:
    """The names of the snapshots in a folder, the newest first."""
    try:
        names = os.listdir(place)
    except OSError:
        return []
    return sorted((n for n in names if re.fullmatch(r"\d{8,}\.snap", n)), key=lambda n: -int(n[:-5]))


def read(path: Path) -> tuple[dict[str, Any], list[Blob]]:
    """Header and blobs (views of one buffer); raises Damaged for anything but a whole snapshot."""
    try:
        with open(path, "rb") as file:
            data = memoryview(file.read())
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from None
    if len(data) < _HEAD + _DIGEST:
        raise Damaged(f"cut short, {len(data)} bytes")
    if data[:8] != MAGIC:
        raise Damaged("its first bytes are not those of a snapshot")
    total, length = (int.from_bytes(data[at : at + 8], "little") for at in (8, 16))
    if total != len(data):
        raise Damaged(f"cut short, {len(data)} of {total} bytes" if len(data) < total else "longer than it should be")
    if hashlib.blake2b(data[:-_DIGEST], digest_size=_DIGEST).digest() != data[-_DIGEST:]:
        raise Damaged("changed since it was written: its checksum is wrong")
    try:
        header = json.loads(bytes(data[_HEAD : _HEAD + length]))
        first = _HEAD + length
        blobs = []
        for b in header["blobs"]:
            start = first + int(b["at"])
            part = data[start : start + int(b["bytes"])]
            if len(part) != b["bytes"] or start + len(part) > total - _DIGEST:
                raise Damaged("an array lies outside of it")
            if b["kind"] == "numpy" and math.prod(b["shape"]) * np.dtype(b["dtype"]).itemsize != len(part):
                raise Damaged("an array has another size than its shape")
            blobs.append(Blob(b["kind"], b["dtype"], tuple(b["shape"]), np.frombuffer(part, np.uint8)))
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"its header makes no sense ({error})") from None
    return header, blobs


def newest(folder: Path, check: Callable[[dict[str, Any]], None]) -> tuple[Path | None, list[str]]:
    """The newest good snapshot of a run folder (None: there is none), and one line for each that is not good.

    ``check`` may raise Damaged for a snapshot whose log is not good.
    """
    place = folder / runfolder.SNAPSHOTS
    refused: list[str] = []
    for name in found(place):
        try:
            check(read(place / name)[0])
            return place / name, refused
        except Damaged as why:
            refused.append(f"the snapshot of step {int(name[:-5])} is refused: {why}")
    return None, refused
