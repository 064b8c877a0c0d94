"""``oars show RUN --samples``: which samples are hard, and which were never left out (``--samples thin``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oars import runfolder
from oars.watch import terminal
from oars.watch.runs import WatchError

MOST = 20  # lines


def show(folder: Path) -> None:
    """Print the hardest samples, and put their pictures beside the run's files where there are some."""
    path = folder / runfolder.SAMPLES
    if not path.exists():
        raise WatchError(f"{folder} knows nothing of samples: run it with --samples thin to its end")
    with np.load(path) as held:
        losses, left_out, passes = held["losses"], held["left_out"], int(held["passes"])
        hardest, pictures = held["hardest"], held["pictures"]
    known = ~np.isnan(losses)
    shares = left_out.sum() / max(1, passes * len(losses))
    print(f"{len(losses):,} samples, {passes} passes: {shares:.1%} were left out, {(left_out == 0).sum():,} samples "
          f"never; the mean loss is {losses[known].mean():.4g}")
    order = np.argsort(-np.where(known, losses, -np.inf), kind="stable")[:MOST]
    print("the hardest:")
    print(terminal.table(["sample", "last loss", "left out"],
                         [[f"{i}", f"{losses[i]:.4g}", f"{left_out[i]} times"] for i in order]))
    never = np.flatnonzero(known & (left_out == 0))
    shown = ", ".join(map(str, never[:MOST])) + (f" and {len(never) - MOST:,} more" if len(never) > MOST else "")
    print(f"never left out: {shown or 'none'}" + (f" (left_out == 0 in {path})" if len(never) > MOST else ""))
    if len(pictures):
        print(_sheet(pictures, hardest, folder))


def _sheet(pictures: np.ndarray, numbers: np.ndarray, folder: Path) -> str:
    """One picture of them all, four in a line."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return "their pictures need Pillow: pip install 'manyoars[data]'"
    high, wide = pictures.shape[1:3]
    scale = max(1, 96 // max(high, wide))
    cell = (wide * scale + 4, high * scale + 16)
    sheet = Image.new("RGB", (4 * cell[0], -(-len(pictures) // 4) * cell[1]), "white")
    for place, (number, picture) in enumerate(zip(numbers, pictures, strict=True)):
        image = Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).convert("RGB")
        left, top = place % 4 * cell[0], place // 4 * cell[1]
        sheet.paste(image.resize((wide * scale, high * scale)), (left, top))
        ImageDraw.Draw(sheet).text((left, top + high * scale), f"#{number}", fill="black")
    sheet.save(folder / runfolder.SAMPLES_PICTURE)
    return str(folder / runfolder.SAMPLES_PICTURE)
