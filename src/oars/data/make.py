"""``oars data make``: stand-ins for known data sets, in the layout of the real files, the same for the same seed.

The real ones go through the same code; nothing here is downloaded. Images are in make_images.py, events in
make_physics.py, diffraction in make_shots.py, digits here.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from oars.data import work
from oars.data.errors import DataError
from oars.data.work import zipped

# Strokes of the ten digits, as points (x, y) from 0 to 1.
_STROKES: list[list[list[tuple[float, float]]]] = [
    [[(.5, .05), (.2, .25), (.2, .75), (.5, .95), (.8, .75), (.8, .25), (.5, .05)]],
    [[(.3, .25), (.55, .05), (.55, .95)]],
    [[(.2, .25), (.45, .05), (.8, .2), (.7, .5), (.2, .95), (.85, .95)]],
    [[(.2, .1), (.6, .05), (.8, .25), (.5, .45), (.85, .7), (.6, .95), (.2, .9)]],
    [[(.65, .95), (.65, .05), (.15, .65), (.9, .65)]],
    [[(.8, .05), (.25, .05), (.22, .45), (.6, .4), (.85, .65), (.6, .95), (.2, .9)]],
    [[(.7, .05), (.3, .35), (.2, .7), (.5, .95), (.8, .7), (.55, .5), (.25, .65)]],
    [[(.15, .05), (.85, .05), (.4, .95)]],
    [[(.5, .05), (.2, .25), (.8, .7), (.5, .95), (.2, .7), (.8, .25), (.5, .05)]],
    [[(.75, .35), (.45, .5), (.2, .3), (.45, .05), (.75, .2), (.75, .35), (.6, .95)]],
]


def make(kind: str, out: Path, size: int, classes: int, side: int, damage: str, seed: int, workers: int | None,
         hard: bool = False, rate: float | None = None, drift: bool = False) -> int:
    """Make one of the stand-ins in the folder ``out``."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is there already and not empty: choose another folder")
    if damage and kind != "imagenet-like":
        raise DataError(f"--damage is for imagenet-like; {kind} has none")
    if (hard or rate or drift) and kind != "water-ice":
        raise DataError(f"--hard, --stream and --drift are for water-ice; {kind} has none")
    if drift and not rate:
        raise DataError("--drift is for --stream")
    workers = workers or work.cores()
    if kind == "imagenet-like":
        from oars.data.make_images import imagenet_like

        imagenet_like(out, size, classes, side, damage, seed, workers)
    elif kind == "digits":
        digits(out, size, seed, workers)
    elif kind == "higgs-like":
        from oars.data.make_physics import higgs_like

        higgs_like(out, size, seed, workers)
    else:
        from oars.data import make_shots

        if rate:
            make_shots.stream(out, size, seed, workers, hard, rate, drift)
        else:
            make_shots.water_ice(out, size, seed, workers, hard)
    return 0


def digits(out: Path, size: int, seed: int, workers: int) -> None:
    """MNIST's four files: ``size`` images to train with and a sixth of that to test."""
    out.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", size), ("t10k", max(1, size // 6))):
        tasks = [(seed, part == "t10k", begin, min(1000, count - begin)) for begin in range(0, count, 1000)]
        parts = list(work.each(_digits, tasks, min(workers, len(tasks)), work.Bar(f"drawing {part}", count)))
        images, labels = (b"".join(each) for each in zip(*parts, strict=True))
        for name, head, data in (("images-idx3", struct.pack(">4I", 2051, count, 28, 28), images),
                                 ("labels-idx1", struct.pack(">2I", 2049, count), labels)):
            (out / f"{part}-{name}-ubyte.gz").write_bytes(zipped(head + data))
    print(f"{out}: {size:,} digits and {max(1, size // 6):,} to test")


def _digits(task: tuple[int, bool, int, int]) -> tuple[bytes, bytes]:
    from PIL import Image, ImageDraw

    seed, test, begin, count = task
    rng = np.random.default_rng([seed, test, begin])
    labels = rng.integers(0, 10, count, np.uint8)
    images = np.empty((count, 28, 28), np.uint8)
    for i, label in enumerate(labels):
        angle, slant = rng.normal(0, .12), rng.normal(0, .15)
        turn = np.array([[np.cos(angle), slant - np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        scale, shift = rng.uniform((60, 70), (80, 90)), 56 + rng.uniform(-8, 8, 2)
        canvas = Image.new("L", (112, 112))
        pen = ImageDraw.Draw(canvas)
        for stroke in _STROKES[label]:
            points = (np.array(stroke) - .5 + rng.normal(0, .025, (len(stroke), 2))) @ turn.T * scale + shift
            pen.line([(float(x), float(y)) for x, y in points], 255, int(rng.integers(8, 14)), "curve")
        small = np.asarray(canvas.resize((28, 28), Image.Resampling.BOX), np.float32)
        images[i] = np.clip(small + rng.normal(0, 6, small.shape) * (small > 0), 0, 255)
        work.advance(1)
    return images.tobytes(), labels.tobytes()
