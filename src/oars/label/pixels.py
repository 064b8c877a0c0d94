"""What is computed from the pixels of one image: thumbnails, radial profiles, spots. NumPy only.

Everything is on the square root of the counts, which makes photon noise equally large everywhere. Thumbnails take the
largest pixel of each block, not the mean: a Bragg spot of one pixel must stay visible.
"""

from __future__ import annotations

import zlib

import numpy as np

THUMB = 64  # pixels on a side of the thumbnails that are kept
_LARGEST = 384  # longer sides are pooled before features are computed
_RINGS = range(4, 32)  # of 64 in half a side: inside is the beam stop, outside only corners
_EXCESS = (1.5, 2.0, 2.5, 3.0, 4.0)  # standard deviations of photon noise, twice
RADIAL, SPOTS = 3 * len(_RINGS), len(_EXCESS) + 3  # numbers of each image


def grey(image: np.ndarray) -> np.ndarray:
    """Two dimensions: colours are averaged, a line becomes an image of one row."""
    if image.ndim == 3 and image.shape[-1] in (1, 3, 4):
        return image[..., :3].mean(-1).astype(image.dtype)
    if image.ndim == 3 and image.shape[0] in (1, 3):
        return image.mean(0).astype(image.dtype)
    if image.ndim == 1:
        return image[None]
    if image.ndim > 2:
        return image.reshape(-1, image.shape[-1])
    return image


def root(image: np.ndarray) -> np.ndarray:
    """The square root of the counts; what is not a number, or below 0, counts as 0."""
    values = image.astype(np.float32)
    if image.dtype.kind == "f":
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    return np.sqrt(np.maximum(values, 0))


def pooled(values: np.ndarray, side: int, how: str) -> np.ndarray:
    """Blocks become one value, so that no side is longer than ``side``; ``how`` is ``max`` or ``mean``."""
    height, width = values.shape[:2]
    block = -(-max(height, width) // side)
    if block <= 1:
        return values
    rest = (-height % block, -width % block)
    if any(rest):
        values = np.pad(values, ((0, rest[0]), (0, rest[1])), "edge")
    blocks = values.reshape(values.shape[0] // block, block, values.shape[1] // block, block)
    return blocks.max((1, 3)) if how == "max" else blocks.mean((1, 3))


def thumb(image: np.ndarray, side: int) -> np.ndarray:
    """A square of 8 bits, brightest 0.3 % white, darkest 1 % black; shorter sides have a dark margin."""
    small = pooled(root(grey(image)), side, "max")
    height, width = small.shape
    if max(height, width) * 2 <= side:
        times = side // max(height, width)
        small = small.repeat(times, 0).repeat(times, 1)
        height, width = small.shape
    low, high = np.percentile(small, (1, 99.7))
    scaled = np.clip((small - low) * (255 / max(high - low, 1e-6)), 0, 255).astype(np.uint8)
    out = np.zeros((side, side), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    out[top:top + height, left:left + width] = scaled
    return out


class Geometry:
    """Which pixels form which ring. ``lit`` says which pixels ever had light: gaps between panels do not."""

    def __init__(self, lit: np.ndarray) -> None:
        height, width = lit.shape
        y, x = np.mgrid[0:height, 0:width].astype(np.float32)
        radius = np.hypot(y - (height - 1) / 2, x - (width - 1) / 2)
        half = max(2.0, min(height, width) / 2)
        self.shape = lit.shape
        self.rings = [np.flatnonzero((np.floor(radius * 32 / half) == ring) & lit) for ring in _RINGS]
        fine = np.floor(radius * 64 / half).astype(np.int64)
        chosen = np.flatnonzero(((radius > half * 20 / 128) & (radius < half * 127 / 128) & lit).ravel())
        order = np.argsort(fine.ravel()[chosen], kind="stable")
        self.pixels = chosen[order]
        ring = fine.ravel()[self.pixels]
        self.starts = np.flatnonzero(np.r_[True, ring[1:] != ring[:-1]]) if len(ring) else np.zeros(0, np.int64)
        self.counts = np.diff(np.r_[self.starts, len(ring)])

    @classmethod
    def seen(cls, images: list[np.ndarray]) -> Geometry:
        """From some images of the source."""
        lit = np.zeros(_mean(images[0]).shape, bool)
        for image in images:
            small = _mean(image)
            if small.shape == lit.shape:
                lit |= small > 0
        return cls(lit if lit.any() else np.ones_like(lit))

    def fits(self, image: np.ndarray) -> Geometry:
        """This one, or one for an image of another size."""
        shape = _mean(image).shape
        return self if shape == self.shape else Geometry(np.ones(shape, bool))


def _mean(image: np.ndarray) -> np.ndarray:
    return pooled(grey(image).astype(np.float32), _LARGEST, "mean")


def radial(image: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Mean, spread and 98th percentile of each ring: the profile that a physicist looks at."""
    values = root(pooled(grey(image).astype(np.float32), _LARGEST, "mean")).ravel()
    out = np.zeros((len(geometry.rings), 3), np.float32)
    for at, ring in enumerate(geometry.rings):
        if len(ring):
            part = values[ring]
            high = int(len(part) * 0.98)
            out[at] = part.mean(), part.std(), np.partition(part, high)[high]
    return out.ravel()


def spots(image: np.ndarray, geometry: Geometry) -> np.ndarray:
    """How many pixels stand out from their ring, and by how much. A pixel without a bright neighbour is a zinger."""
    values = pooled(root(grey(image)), _LARGEST, "max")
    near = values.copy()
    near[1:] = values[:-1]
    near[:-1] = np.maximum(near[:-1], values[1:])
    near[:, 1:] = np.maximum(near[:, 1:], values[:, :-1])
    near[:, :-1] = np.maximum(near[:, :-1], values[:, 1:])
    found = np.zeros(SPOTS, np.float32)
    if len(geometry.pixels) < 20:
        return found
    kept = np.minimum(values, near).ravel()[geometry.pixels]
    excess = kept - np.repeat(np.add.reduceat(kept, geometry.starts) / geometry.counts, geometry.counts)
    top = np.partition(excess, (-20, -5))
    found[:] = [*((excess > limit).sum() for limit in _EXCESS), top[-20], top[-5], excess.std()]
    return np.log1p(np.maximum(found, 0))


def profile(image: np.ndarray) -> list[float]:
    """The mean count of each ring, from the middle outwards: 64 of them."""
    small = np.nan_to_num(_mean(image))
    height, width = small.shape
    y, x = np.mgrid[0:height, 0:width]
    ring = (np.hypot(y - (height - 1) / 2, x - (width - 1) / 2) * 64 / max(1.0, min(height, width) / 2)).astype(int)
    inside = ring < 64
    total = np.bincount(ring[inside], small[inside], 64)
    return [round(float(v), 3) for v in total / np.maximum(1, np.bincount(ring[inside], minlength=64))]


def png(tiles: np.ndarray) -> bytes:
    """Squares of 8 bits beside each other, as a PNG."""
    count, side, _ = tiles.shape
    lines = np.zeros((side, 1 + count * side), np.uint8)
    lines[:, 1:] = tiles.transpose(1, 0, 2).reshape(side, count * side)
    head = (count * side).to_bytes(4, "big") + side.to_bytes(4, "big") + b"\x08\0\0\0\0"
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(len(data).to_bytes(4, "big") + kind + data
                                          + zlib.crc32(kind + data).to_bytes(4, "big") for kind, data in parts)
