"""How numbers travel: what ``--wire`` names. Knows arrays, not ranks.

A code makes bytes of a float32 array, and an array of the bytes again. All but ``fp32`` lose something: who uses them
keeps what was lost and adds it the next time (error feedback, ``compressed.py``). What is not finite stays so: a
GradScaler must see it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

_BLOCK = 256  # values that share a scale
_LARGEST = np.float32(65504)  # of float16


class Code(Protocol):
    """Makes bytes of numbers, as many for as many."""

    def encode(self, values: np.ndarray) -> np.ndarray:
        """The bytes (uint8) of a float32 array."""

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        """``count`` float32 values from their bytes."""


class Half:
    """``fp16``: 2 bytes a value; what is too large becomes the largest there is."""

    def encode(self, values: np.ndarray) -> np.ndarray:
        finite = np.isfinite(values)
        return np.where(finite, values.clip(-_LARGEST, _LARGEST), values).astype(np.float16).view(np.uint8)

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        return data.view(np.float16).astype(np.float32)


class Brain:
    """``bf16``: the upper half of a float32, rounded to nearest even."""

    def encode(self, values: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(values).view(np.uint32)
        upper = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        np.copyto(upper, np.uint16(0x7FC0), where=np.isnan(values))  # rounding could carry its mark away
        return upper.view(np.uint8)

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class Int8:
    """``int8``: a byte a value, and for every 256 of them the scale, a float32."""

    def encode(self, values: np.ndarray) -> np.ndarray:
        blocks = np.resize(values, (-(-len(values) // _BLOCK), _BLOCK))
        blocks.reshape(-1)[len(values):] = 0
        scales = np.abs(blocks).max(1, initial=0) / np.float32(127)
        good = np.isfinite(scales) & (scales > 0)
        codes = np.zeros(blocks.shape, np.int8)
        codes[good] = np.rint(blocks[good] / scales[good, None]).astype(np.int8)
        scales[~np.isfinite(scales)] = np.nan  # the block is lost, and its reader sees that
        kept = codes.reshape(-1)[: len(values)]
        return np.concatenate([scales.astype(np.float32).view(np.uint8), kept.view(np.uint8)])

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        blocks = -(-count // _BLOCK)
        scales, codes = data[: 4 * blocks].view(np.float32), data[4 * blocks :].view(np.int8)
        return codes.astype(np.float32) * np.repeat(scales, _BLOCK)[:count]


class TopK:
    """``topk:F``: the fraction F of the values that are largest, 8 bytes each: where, and what."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def encode(self, values: np.ndarray) -> np.ndarray:
        keep = self._kept(len(values))
        where = np.sort(np.argpartition(np.abs(values), len(values) - keep)[len(values) - keep :]).astype(np.uint32)
        return np.concatenate([where.view(np.uint8), values[where].astype(np.float32).view(np.uint8)])

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        keep = self._kept(count)
        out = np.zeros(count, np.float32)
        out[data[: 4 * keep].view(np.uint32)] = data[4 * keep :].view(np.float32)
        return out

    def _kept(self, count: int) -> int:
        return min(count, max(1, round(count * self.fraction)))


def code_of(wire: str) -> Code:
    """The code that a checked ``--wire`` names."""
    kind, _, value = wire.partition(":")
    codes: dict[str, Code] = {"fp16": Half(), "bf16": Brain(), "int8": Int8()}
    return TopK(float(value)) if kind == "topk" else codes[kind]
