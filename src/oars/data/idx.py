"""MNIST's files: IDX (arrays with a short header) and the pickle of three pairs that many courses use.

A pickle can run code. This one is read by an unpickler that knows how NumPy stores arrays and nothing else.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from oars.data.bad import one_line
from oars.data.errors import DataError
from oars.data.reader import Block, Field, File, Flat, FlatReader, Reader

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_PICKLED = 4 << 30


def idx_shape(file: File) -> tuple[np.dtype, tuple[int, ...]] | None:
    """The type and shape an IDX header tells, or None if this is none."""
    head = file.read(0, min(4, file.size))
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or not 1 <= head[3] <= 8:
        return None
    if file.size < 4 + 4 * head[3]:
        return None
    return np.dtype(TYPES[head[2]]), tuple(np.frombuffer(file.read(4, 4 * head[3]), ">u4").tolist())


def open_idx(path: str, shown: str) -> Reader:
    """One array; its first axis is rows."""
    file = File(path)
    found = idx_shape(file)
    if found is None:
        raise DataError(f"{shown}, byte 0: no header of an IDX file")
    dtype, shape = found
    offset, size = 4 + 4 * len(shape), dtype.itemsize * math.prod(shape)
    if offset + size != file.size:
        raise DataError(
            f"{shown}: an array of {shape} should end at byte {offset + size}, but the file ends at {file.size}"
        )
    return FlatReader(shown, {"data": Flat(file, offset, dtype, shape[1:], shape[0])}, shape[0])


class _Arrays(pickle.Unpickler):
    """Knows arrays only."""

    _known = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
        ("__builtin__", "bytes"),
        ("builtins", "bytes"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, and only arrays are read")
        if name == "ndarray":
            return _Array
        if name == "dtype":
            return _Type
        if name == "encode":
            return _encode
        if name == "bytes":  # how old protocols write empty ones
            return lambda: b""
        return _reconstruct if name == "_reconstruct" else _scalar

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


class _Type:
    """A number's type: NumPy would let a pickle change its own; this takes the byte order and nothing else."""

    def __init__(self, text: Any, *rest: Any) -> None:
        self.dtype = np.dtype(text.decode("latin-1") if isinstance(text, bytes) else str(text))
        if self.dtype.kind not in "biufSU" or self.dtype.itemsize > 1 << 20:
            raise pickle.UnpicklingError(f"an array of {self.dtype}")

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"a byte order {order!r}")
        self.dtype = self.dtype.newbyteorder(order)  # type: ignore[arg-type]


def _encode(text: str, how: str = "latin1") -> bytes:
    if how not in ("latin1", "latin-1", "bytes"):
        raise pickle.UnpicklingError(f"text encoded as {how!r}")
    return text.encode("latin-1")


class _Array:
    """An array in the making: it takes its contents only if they are its size and no objects."""

    held = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if isinstance(raw, str):
            raw = raw.encode("latin-1")
        shape = tuple(int(size) for size in shape)
        if (
            not isinstance(kind, _Type)
            or not isinstance(raw, bytes)
            or min(shape, default=0) < 0
            or (math.prod(shape) * kind.dtype.itemsize != len(raw))
        ):
            raise pickle.UnpicklingError("an array whose contents do not fit its shape")
        order = "F" if fortran else "C"
        self.held = np.frombuffer(raw, kind.dtype).reshape(shape, order=order)  # type: ignore[call-overload]


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    return _Array()


def _scalar(kind: _Type, raw: Any) -> Any:
    raw = raw.encode("latin-1") if isinstance(raw, str) else raw
    if not isinstance(kind, _Type) or len(raw) != kind.dtype.itemsize:
        raise pickle.UnpicklingError("a number that does not fit its type")
    return np.frombuffer(raw, kind.dtype)[0]


class Pickled(Reader):
    """Arrays from a pickle, in memory: MNIST's training, validation and test pairs, or a dict of arrays."""

    def __init__(self, path: str, arrays: dict[str, np.ndarray]) -> None:
        self.path, self._arrays = path, arrays
        self.rows = len(next(iter(arrays.values())))
        self.fields = {name: Field(array.dtype, array.shape[1:]) for name, array in arrays.items()}

    def span(self, start: int, stop: int, names: Sequence[str]) -> Block:
        return {name: self._arrays[name][start:stop].copy() for name in names}

    def take(self, rows: np.ndarray, names: Sequence[str]) -> Block:
        return {name: self._arrays[name][rows] for name in names}


def open_pickle(path: str, shown: str, *, group: str | None = None) -> Reader:
    """``group``: ``train``, ``valid`` or ``test`` of MNIST's three pairs (default: all, one after the other)."""
    file = File(path)
    if file.size > _MOST_PICKLED:
        raise DataError(f"{shown}: a pickle of {file.size} bytes; only small ones (MNIST's) are read")
    try:
        found = _Arrays(io.BytesIO(file.read(0, file.size)), encoding="latin1").load()
    except MemoryError:
        raise DataError(f"{shown}: damaged (it asks for more memory than there is)") from None
    except Exception as error:  # damage may raise anything
        raise DataError(
            f"{shown}: not a pickle of arrays ({one_line(error)})"
        ) from None
    return Pickled(shown, _columns(found, shown, group))


def _columns(found: Any, shown: str, group: str | None) -> dict[str, np.ndarray]:
    if isinstance(found, (tuple, list)) and 1 <= len(found) <= 3 and all(map(_is_pair, found)):
        names = ("train", "valid", "test") if len(found) == 3 else ("train", "test")
        if group is not None and group not in names[: len(found)]:
            raise DataError(f"{shown}: no group {group!r}; there is {', '.join(names[: len(found)])}")
        pairs = [pair for name, pair in zip(names, found, strict=False) if group in (None, name)]
        arrays = {"data": [pair[0] for pair in pairs], "label": [pair[1] for pair in pairs]}
        try:
            return {name: np.concatenate([_plain(part) for part in parts]) for name, parts in arrays.items()}
        except ValueError as error:
            raise DataError(f"{shown}: its parts do not fit together ({error})") from None
    if (
        isinstance(found, dict)
        and found
        and all(isinstance(array, _Array) and array.held.ndim for array in found.values())
    ):
        if len({len(array.held) for array in found.values()}) == 1:
            return {str(name): _plain(array) for name, array in found.items()}
    raise DataError(
        f"{shown}: a pickle of {type(found).__name__}, but (data, labels) pairs or a dict of arrays of one "
        "length is wanted"
    )


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(a, _Array) and a.held.ndim for a in pair)
        and len(pair[0].held) == len(pair[1].held)
    )


def _plain(array: _Array) -> np.ndarray:
    return np.ascontiguousarray(array.held, array.held.dtype.newbyteorder("="))
