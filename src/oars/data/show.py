"""``oars data show``: a contact sheet, to look at what a network will see."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from oars.data import shards
from oars.data.decode import decode
from oars.data.errors import DataError

_CELL, _TEXT = 200, 18


def show(folder: Path, count: int, target: Path, seed: int) -> int:
    """Write a PNG with ``count`` samples, their labels and boxes."""
    if not (folder / "manifest.json").exists() and (sets := sorted(folder.glob("*/manifest.json"))):
        raise DataError(f"{folder} holds {', '.join(path.parent.name for path in sets)}: name one of them, like "
                        f"{sets[0].parent}")
    if target.suffix.lower() != ".png":
        raise DataError(f"--to {target}: the sheet is a PNG file, so let its name end in .png")
    reader = shards.Reader(folder)
    if not len(reader):
        raise DataError(f"{folder} holds no images")
    chosen = np.sort(np.random.default_rng(seed).permutation(len(reader))[:count])
    across = math.ceil(math.sqrt(len(chosen)))
    down = math.ceil(len(chosen) / across)
    sheet = Image.new("RGB", (across * _CELL, down * (_CELL + _TEXT)), "white")
    for place, i in enumerate(chosen):
        cell = _cell(reader.sample(int(i)), int(i))
        sheet.paste(cell, (place % across * _CELL, place // across * (_CELL + _TEXT)))
    sheet.save(target)
    print(f"{target}: {len(chosen)} of {len(reader):,} images")
    return 0


def _cell(sample: dict, number: int) -> Image.Image:
    """One image, with its boxes on it and its label below."""
    cell = Image.new("RGB", (_CELL, _CELL + _TEXT), "white")
    image = Image.fromarray(decode(sample["image"], _CELL))
    image.thumbnail((_CELL - 4, _CELL - 4))
    left, top = (_CELL - image.width) // 2, (_CELL - image.height) // 2
    cell.paste(image, (left, top))
    pen = ImageDraw.Draw(cell)
    for x0, y0, x1, y1 in sample["boxes"]:
        pen.rectangle([left + x0 * image.width, top + y0 * image.height, left + x1 * image.width - 1,
                       top + y1 * image.height - 1], outline=(255, 230, 0), width=2)
    text = f"#{number}  {sample['label']} {sample.get('class', '')}"
    pen.text((4, _CELL + 2), text.encode("ascii", "replace").decode()[:32], "black", ImageFont.load_default())
    return cell
