"""Is it an image, and can it go into a shard? Every image is decoded once when it is packed.

What a training would trip over is put right where that is safe: other formats, CMYK and 16-bit images become plain
JPEGs, images that EXIF says to turn are turned. The rest is unfit, with a reason. Sizes are looked at before anything
is decoded, so that a few bytes cannot claim all memory.
"""

from __future__ import annotations

import io
import warnings
from typing import Any, NamedTuple

import numpy as np

from oars.data.errors import DataError

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError:
    raise DataError("images need Pillow: pip install 'manyoars[data]'") from None

MAX_BYTES = 64 << 20
MAX_PIXELS = 64 << 20  # what is kept as it is; ImageNet's largest image has 61 million
MAX_CONVERTED = 32 << 20  # what is decoded in full and encoded again: up to 8 bytes a pixel for a while
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
_TURNED = 0x0112  # EXIF's orientation


class Unfit(Exception):
    """An image that cannot be used: the kind, as the report counts it, and the reason."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Fit(NamedTuple):
    """A JPEG that can be used, and what was done to make it one."""

    jpeg: bytes
    width: int
    height: int
    changes: tuple[str, ...]
    turned: int  # EXIF's orientation, 1 for upright


def examine(data: bytes) -> Fit:
    """Decode an image once; give it as a JPEG that every tool reads alike, or raise Unfit."""
    if not data:
        raise Unfit("empty", "it has no bytes")
    if len(data) > MAX_BYTES:
        raise Unfit("too large", f"{len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of huge sizes, which are looked at below, and of odd EXIF
            return _examine(Image.open(io.BytesIO(data), formats=FORMATS), data)
    except Unfit:
        raise
    except Image.DecompressionBombError:
        raise Unfit("too large", "far more pixels than can be decoded") from None
    except UnidentifiedImageError:
        raise Unfit("no image", f"it begins with {bytes(data[:8])!r}, like no image") from None
    except Exception as error:  # decoders of damaged files raise almost anything
        text = " ".join(str(error).split()) or type(error).__name__
        kind = "truncated" if "truncated" in text or "unexpected end" in text.lower() else "damaged"
        raise Unfit(kind, text) from None


def _examine(image: Any, data: bytes) -> Fit:
    width, height = image.size
    jpeg = image.format in ("JPEG", "MPO")
    turned = image.getexif().get(_TURNED, 1)
    turned = turned if turned in range(1, 9) else 1
    changes = _changes(image, data, jpeg, turned)
    if width * height > (MAX_CONVERTED if changes else MAX_PIXELS):
        raise Unfit("too large", f"{width} × {height} pixels")
    if not changes:
        # All of the file is read and checked, but only every eighth pixel is made: a third of the time and memory.
        image.draft("RGB", (max(1, width // 8), max(1, height // 8)))
        image.load()
        return Fit(data, width, height, (), 1)
    image.load()
    if image.mode.startswith(("I", "F")):
        image = _eight_bits(image)
    # One step at a time, so that no more than two images are in memory.
    if image.mode != "RGB":
        image = image.convert("RGB")
    if turned != 1:
        image = ImageOps.exif_transpose(image)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=95)
    return Fit(out.getvalue(), image.width, image.height, changes, turned)


def _changes(image: Any, data: bytes, jpeg: bool, turned: int) -> tuple[str, ...]:
    """What has to be changed, by the kinds of the report."""
    deep = image.mode.startswith(("I", "F")) or (image.format == "PNG" and data[24:25] == b"\x10")
    return tuple(kind for kind, found in (
        (f"{image.format} made a JPEG", not jpeg), ("CMYK made RGB", image.mode == "CMYK"),
        ("16 bits made 8", deep), ("turned as EXIF says", turned != 1)) if found)


def _eight_bits(image: Any) -> Any:
    """Sixteen bits (or floats from 0 to 1) as eight."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    values = np.array(image, np.float32)
    values *= 255.0 if image.mode == "F" and values.max() <= 1 else 255 / 65535
    return Image.fromarray(values.clip(0, 255, out=values).astype(np.uint8))
