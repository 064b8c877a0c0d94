"""From bytes to pixels, fast.

Two things cost: decoding and resizing. JPEGs are decoded by libjpeg-turbo (simplejpeg, which brings it along) straight
into an array, at half, a quarter or an eighth of their size where that is still larger than what is asked for; the
transform itself then skips the rest. PyTorch resizes 8-bit images with vector instructions, and only the part that is
kept. Without simplejpeg or without PyTorch, Pillow does the same work in about twice the time. Measured against others:
bench/data_images.py; beside a GPU: bench/feed.py.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from oars.data.errors import DataError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None


def decode(data: bytes | memoryview, at_least: int = 0) -> np.ndarray:
    """The image as RGB (height, width, 3); with ``at_least``, perhaps smaller, but no side shorter than that."""
    if simplejpeg is not None and data[:2] == b"\xff\xd8":
        try:
            if not at_least:
                return simplejpeg.decode_jpeg(data, "RGB")
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            scale = _scale(min(height, width), at_least)
            # Colour is stored at half the resolution. Where the image is about to be made smaller, interpolating that
            # first is work for nothing: a tenth of the time.
            quick = min(height, width) >= scale * at_least * 4 / 3
            return simplejpeg.decode_jpeg(data, "RGB", fastdct=quick, fastupsample=quick,
                                          min_height=-(-height // scale), min_width=-(-width // scale))
        except ValueError:
            pass  # CMYK, or damaged: Pillow knows the one and says more of the other
    return _with_pillow(data, at_least)


def _scale(shorter: int, at_least: int) -> int:
    """By how much a JPEG may be shrunk as it is decoded. Only halves are fast: the others have no vector code."""
    return next((scale for scale in (8, 4, 2) if shorter // scale >= at_least), 1)


def _with_pillow(data: bytes | memoryview, at_least: int) -> np.ndarray:
    from PIL import Image

    try:
        image: Any = Image.open(io.BytesIO(data))
        if at_least and image.format == "JPEG":
            scale = _scale(min(image.size), at_least)
            image.draft("RGB", (image.width // scale, image.height // scale))
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception as error:  # decoders of damaged files raise almost anything
        raise DataError(f"an image of {len(data)} bytes cannot be decoded: {' '.join(str(error).split())}") from None


def resize(pixels: np.ndarray, box: tuple[int, int, int, int], size: tuple[int, int]) -> np.ndarray:
    """The part ``box`` (left, top, right, bottom) of an image at ``size`` (height, width): bilinear, antialiased."""
    left, top, right, bottom = box
    part = pixels[top:bottom, left:right]
    if part.shape[:2] == size:
        return part
    try:
        import torch
    except ImportError:
        from PIL import Image

        return np.asarray(Image.fromarray(part).resize(size[::-1], Image.Resampling.BILINEAR))
    part = part if part.flags.writeable else part.copy()  # Pillow's pixels are not, and PyTorch warns of it
    # The batch's dimension comes first, then the permutation: only so does PyTorch see colours last, and keep them so.
    planes = torch.from_numpy(part)[None].permute(0, 3, 1, 2)
    small = torch.nn.functional.interpolate(planes, size, mode="bilinear", antialias=True, align_corners=False)
    return small[0].permute(1, 2, 0).numpy()


def mirror(pixels: np.ndarray) -> np.ndarray:
    """Left and right change places. NumPy copies three bytes at a time, PyTorch a vector."""
    if pixels.dtype == np.uint8:
        try:
            import torch
        except ImportError:
            pass
        else:
            pixels = np.ascontiguousarray(pixels)
            return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).flip(1).numpy()
    return np.ascontiguousarray(pixels[:, ::-1])


def middle(pixels: np.ndarray, size: int, keep: float) -> np.ndarray:
    """The square middle of an image, ``keep`` of its shorter side, at ``size`` × ``size``."""
    height, width = pixels.shape[:2]
    side = max(1, round(min(height, width) * keep))
    left, top = (width - side) // 2, (height - side) // 2
    return resize(pixels, (left, top, left + side, top + side), (size, size))


def centre(data: bytes | memoryview, size: int, keep: float = 0.875) -> np.ndarray:
    """The middle of an encoded image, of which no more is decoded than that needs."""
    return middle(decode(data, round(size / keep)), size, keep)
