"""Images become arrays of one size: resize, crop, flip, normalise::

    data = oars.data.open("photos/")
    train = data.transform(random_resized_crop(224), flip(), normalize())
    test = data.transform(resize(256), center_crop(224), normalize())

Each step is a small object that is called with the pixels (height, width, 3) and a random generator; the first one
may get the encoded image and decode no more of it than it needs. The generator is made anew for every sample, from the
seed, the epoch and the sample's number, so what happens to a sample does not depend on which rank or worker loads it.
Any function of the pixels alone is a step, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from oars.data import decode as decode_
from oars.data.errors import DataError

_MOST_PIXELS = 1 << 28  # a file of some kB can claim more


def decode(image: Any, at_least: int = 0) -> np.ndarray:
    """The pixels of an encoded image, fewer of them where ``at_least`` for the shorter side are enough."""
    if isinstance(image, np.ndarray):
        return image
    if not len(image):
        raise DataError("an empty file, no image")
    if decode_.simplejpeg is not None and image[:2] == b"\xff\xd8":
        try:
            height, width, _, _ = decode_.simplejpeg.decode_jpeg_header(image)
        except ValueError:
            height = width = 0  # Pillow will say what is wrong
        if height * width > _MOST_PIXELS:
            raise DataError(f"an image of {height} x {width} pixels is too large")
    return decode_.decode(image, at_least)


class resize:
    """The shorter side becomes ``size``; with a pair, height and width become these."""

    takes_encoded = True

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Any, rng: np.random.Generator | None) -> np.ndarray:
        pixels = decode(image, self.size if isinstance(self.size, int) else max(self.size))
        height, width = pixels.shape[:2]
        if isinstance(self.size, int):
            scale = self.size / min(height, width)
            target = max(self.size, round(height * scale)), max(self.size, round(width * scale))
        else:
            target = self.size
        return decode_.resize(pixels, (0, 0, width, height), target)


class center_crop:
    """The middle, ``size`` x ``size`` (or a pair, height and width)."""

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = (size, size) if isinstance(size, int) else size

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        tall, wide = self._room(pixels)
        return self._part(pixels, tall // 2, wide // 2)

    def _room(self, pixels: np.ndarray) -> tuple[int, int]:
        tall, wide = pixels.shape[0] - self.size[0], pixels.shape[1] - self.size[1]
        if tall < 0 or wide < 0:
            raise DataError(
                f"an image of {pixels.shape[0]} x {pixels.shape[1]} is smaller than the crop of "
                f"{self.size[0]} x {self.size[1]}: resize first"
            )
        return tall, wide

    def _part(self, pixels: np.ndarray, top: int, left: int) -> np.ndarray:
        return np.ascontiguousarray(pixels[top : top + self.size[0], left : left + self.size[1]])


class random_crop(center_crop):
    """Any part of ``size`` x ``size``."""

    random = True

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        assert rng is not None
        tall, wide = self._room(pixels)
        return self._part(pixels, int(rng.integers(0, tall + 1)), int(rng.integers(0, wide + 1)))


class random_resized_crop:
    """Any part with a share of the area within ``area`` and sides of 3:4 to 4:3, brought to ``size`` x ``size``."""

    random = takes_encoded = True

    def __init__(self, size: int, area: tuple[float, float] = (0.08, 1.0)) -> None:
        self.size, self.area = size, area

    def __call__(self, image: Any, rng: np.random.Generator | None) -> np.ndarray:
        assert rng is not None
        share, aspect = rng.uniform(*self.area), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        where = rng.random(2)
        pixels = decode(image, round(self.size / math.sqrt(share)))  # a small part wants all pixels there are
        height, width = pixels.shape[:2]
        wide = min(width, max(1, round(math.sqrt(share * height * width * aspect))))
        tall = min(height, max(1, round(math.sqrt(share * height * width / aspect))))
        left, top = int(where[0] * (width - wide + 1)), int(where[1] * (height - tall + 1))
        return decode_.resize(pixels, (left, top, left + wide, top + tall), (self.size, self.size))


class resized_center_crop:
    """The square middle, ``keep`` of the shorter side, brought to ``size`` x ``size``: resize and center_crop at once,
    without resizing what is cut off."""

    takes_encoded = True

    def __init__(self, size: int, keep: float = 0.875) -> None:
        self.size, self.keep = size, keep

    def __call__(self, image: Any, rng: np.random.Generator | None) -> np.ndarray:
        return decode_.middle(decode(image, round(self.size / self.keep)), self.size, self.keep)


class flip:
    """Left and right change places, with probability ``p``."""

    random = True

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        assert rng is not None
        return decode_.mirror(pixels) if rng.random() < self.p else pixels


class normalize:
    """Floats, channels first as PyTorch wants them: from 0 to 1, minus ``mean``, divided by ``std`` (ImageNet's)."""

    def __init__(
        self, mean: Sequence[float] = (0.485, 0.456, 0.406), std: Sequence[float] = (0.229, 0.224, 0.225)
    ) -> None:
        middle, width = np.asarray(mean, np.float64), np.asarray(std, np.float64)
        self._scale = (1 / (255 * width)).astype(np.float32).reshape(-1, 1, 1)
        self._shift = (-middle / width).astype(np.float32).reshape(-1, 1, 1)

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        out = np.empty((pixels.shape[2], *pixels.shape[:2]), np.float32)
        np.multiply(pixels.transpose(2, 0, 1), self._scale, out=out)
        out += self._shift
        return out
