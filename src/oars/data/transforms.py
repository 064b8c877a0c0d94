"""Images become arrays of one size: decode, resize, crop, flip, normalise.

    data = oars.data.open("photos/")
    train = data.transform(random_resized_crop(224), flip(), normalize())
    test = data.transform(resize(256), center_crop(224), normalize())

Each step is a small object that is called with an image (Pillow's, until ``normalize`` makes it numbers) and a random
generator. The generator is made anew for every sample, from the seed, the epoch and the sample's number. So what happens
to a sample does not depend on which rank or worker loads it. Any function of the image alone is a step, too.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from oars.data.errors import DataError

_MOST_PIXELS = 1 << 28  # a file of some kB can claim more


def decode(data: bytes, what: str, at_least: int | None = None) -> Any:
    """An encoded image as a Pillow image, RGB, upright; JPEGs come smaller where ``at_least`` pixels are enough."""
    from PIL import Image, ImageOps

    try:
        image: Any = Image.open(io.BytesIO(data))
        if image.width * image.height > _MOST_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are too many")
        if at_least and image.format == "JPEG":
            image.draft("RGB", (at_least, at_least))  # decodes at 1/2, 1/4 or 1/8 of the size, never smaller than asked
        image.load()
        if image.mode.startswith(("I", "F")):  # 16 bits and more: the upper eight
            values = np.asarray(image).astype(np.float64)
            image = Image.fromarray(np.clip(values / 257 if values.max(initial=0) > 255 else values, 0, 255).astype(np.uint8))
        image = ImageOps.exif_transpose(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise whatever they meet
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "cannot identify image file" in reason:
            reason = "no image" if data else "empty file"
        raise DataError(f"{what}: cannot be decoded: {reason}") from None


def to_array(image: Any) -> np.ndarray:
    """Height x width x 3, bytes; what is an array already stays one."""
    return image if isinstance(image, np.ndarray) else np.array(image)


class resize:
    """The shorter side becomes ``size``; with a pair, height and width become these."""

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = size
        self.at_least = size if isinstance(size, int) else max(size)

    def __call__(self, image: Any, rng: np.random.Generator) -> Any:
        if not isinstance(self.size, int):
            return _scaled(image, None, self.size[1], self.size[0])
        scale = self.size / min(image.size)
        return _scaled(image, None, max(self.size, round(image.width * scale)), max(self.size, round(image.height * scale)))


class center_crop:
    """The middle, ``size`` x ``size`` (or a pair, height and width)."""

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = (size, size) if isinstance(size, int) else size

    def __call__(self, image: Any, rng: np.random.Generator) -> Any:
        height, width = _fits(image, self.size)
        return _cropped(image, (image.width - width) // 2, (image.height - height) // 2, width, height)


class random_crop(center_crop):
    """Any part of ``size`` x ``size``."""

    random = True

    def __call__(self, image: Any, rng: np.random.Generator) -> Any:
        height, width = _fits(image, self.size)
        left, top = (int(rng.integers(0, room + 1)) for room in (image.width - width, image.height - height))
        return _cropped(image, left, top, width, height)


class random_resized_crop:
    """Any part with ``scale`` of the area and a side ratio within ``ratio``, scaled to ``size`` x ``size``."""

    random = True

    def __init__(self, size: int, scale: tuple[float, float] = (0.08, 1.0),
                 ratio: tuple[float, float] = (3 / 4, 4 / 3)) -> None:
        self.size, self.scale, self.ratio = size, scale, ratio

    def __call__(self, image: Any, rng: np.random.Generator) -> Any:
        for _ in range(10):
            area = image.width * image.height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(*map(math.log, self.ratio)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= image.width and 0 < height <= image.height:
                left, top = (int(rng.integers(0, room + 1)) for room in (image.width - width, image.height - height))
                break
        else:  # a very long image: its middle
            width = height = min(image.size)
            left, top = (image.width - width) // 2, (image.height - height) // 2
        return _scaled(image, (left, top, left + width, top + height), self.size, self.size)


class flip:
    """Left and right change places, with probability ``p``."""

    random = True

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: Any, rng: np.random.Generator) -> Any:
        if rng.random() >= self.p:
            return image
        if isinstance(image, np.ndarray):
            return np.ascontiguousarray(image[:, ::-1])
        from PIL import Image

        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


class normalize:
    """Floats, channels first as PyTorch wants them: from 0 to 1, minus ``mean``, divided by ``std`` (ImageNet's)."""

    def __init__(self, mean: Sequence[float] = (0.485, 0.456, 0.406), std: Sequence[float] = (0.229, 0.224, 0.225)) -> None:
        self._scale = (1 / (255 * np.asarray(std, np.float64))).astype(np.float32).reshape(-1, 1, 1)
        self._shift = (-np.asarray(mean, np.float64) / np.asarray(std, np.float64)).astype(np.float32).reshape(-1, 1, 1)

    def __call__(self, image: Any, rng: np.random.Generator) -> np.ndarray:
        pixels = to_array(image)
        out = np.empty((pixels.shape[2], *pixels.shape[:2]), np.float32)
        np.multiply(pixels.transpose(2, 0, 1), self._scale, out=out)
        out += self._shift
        return out


def _fits(image: Any, size: tuple[int, int]) -> tuple[int, int]:
    height, width = image.shape[:2] if isinstance(image, np.ndarray) else (image.height, image.width)
    if size[0] > height or size[1] > width:
        raise DataError(f"an image of {height} x {width} is smaller than the crop of {size[0]} x {size[1]}: resize first")
    return size


def _cropped(image: Any, left: int, top: int, width: int, height: int) -> Any:
    return image.crop((left, top, left + width, top + height))


def _scaled(image: Any, box: tuple[int, int, int, int] | None, width: int, height: int) -> Any:
    from PIL import Image

    return image.resize((width, height), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
