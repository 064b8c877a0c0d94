"""Diffraction images as an X-ray laser makes them: water, ice, and with ``--hard`` empty shots and streaks of the jet.

The hard set is unbalanced, 65, 20, 10 and 5 %, and its ice has one to eight faint spots. An experiment is a file that
grows: ``stream`` appends images at a rate, with a drift of the shares on request.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from oars.data import work
from oars.data.errors import DataError

SIDE = 256
EASY, HARD = ("water", "ice"), ("water", "ice", "empty", "streak")
_SHARES = {EASY: (0.5, 0.5), HARD: (0.65, 0.2, 0.1, 0.05)}


def water_ice(out: Path, size: int, seed: int, workers: int, hard: bool) -> None:
    """water-ice.h5: ``images`` (n, 256, 256, uint16, photon counts) and ``labels`` (0 water, 1 ice, and with ``hard`` 2
    empty, 3 streak); truth.csv: the same labels by name, for ``oars label --simulate``."""
    out.mkdir(parents=True, exist_ok=True)
    kinds = HARD if hard else EASY
    tasks = _tasks(size, seed, hard, False)
    with _file(out / "water-ice.h5", "w") as file, open(out / "truth.csv", "w") as truth:
        images = file.create_dataset("images", (size, SIDE, SIDE), np.uint16, chunks=(1, SIDE, SIDE))
        labels = file.create_dataset("labels", (size,), np.uint8)
        truth.write("row,label\n")
        shots = work.each(_shots, tasks, min(workers, len(tasks)), work.Bar("exposing", size))
        for (_, begin, count, _, _), (pixels, found) in zip(tasks, shots, strict=True):
            images[begin:begin + count], labels[begin:begin + count] = pixels, found
            truth.writelines(f"{begin + at},{kinds[kind]}\n" for at, kind in enumerate(found))
    print(f"{out}/water-ice.h5: {size:,} images")


def stream(out: Path, size: int, seed: int, workers: int, hard: bool, rate: float, drift: bool) -> None:
    """The same file as it grows while an experiment runs: HDF5's SWMR, readable at any moment. With ``drift`` the last
    class becomes three times as frequent beside the others after half of the images. All are made first, so that to
    append them costs little."""
    out.mkdir(parents=True, exist_ok=True)
    tasks = _tasks(size, seed, hard, drift)
    with tempfile.TemporaryDirectory(dir=out, prefix=".") as place:
        made: np.ndarray = np.lib.format.open_memmap(f"{place}/images.npy", "w+", np.uint16, (size, SIDE, SIDE))
        kinds = np.empty(size, np.uint8)
        shots = work.each(_shots, tasks, min(workers, len(tasks)), work.Bar("exposing", size))
        for (_, begin, count, _, _), (pixels, found) in zip(tasks, shots, strict=True):
            made[begin:begin + count], kinds[begin:begin + count] = pixels, found
        _append(out / "water-ice.h5", made, kinds, rate)


def _append(path: Path, made: np.ndarray, kinds: np.ndarray, rate: float) -> None:
    size = len(made)
    with _file(path, "w", libver="latest") as file:
        images = file.create_dataset("images", (0, SIDE, SIDE), np.uint16, chunks=(1, SIDE, SIDE),
                                     maxshape=(None, SIDE, SIDE))
        labels = file.create_dataset("labels", (0,), np.uint8, chunks=(1024,), maxshape=(None,))
        file.swmr_mode = True
        print(f"{path}: grows by {rate:g} images a second", flush=True)
        begun, done = time.monotonic(), 0
        piece = max(1, round(rate / 5))
        while done < size:
            count = min(piece, size - done)
            time.sleep(max(0.0, begun + done / rate - time.monotonic()))
            for data, values in ((images, made[done:done + count]), (labels, kinds[done:done + count])):
                data.resize(done + count, 0)
                data[done:] = values
                data.flush()
            done += count
    print(f"{path}: {size:,} images in {time.monotonic() - begun:.0f} s")


def _file(path: Path, mode: str, **more: Any) -> Any:
    try:
        import h5py
    except ImportError:
        raise DataError("water-ice is written with h5py: pip install 'manyoars[data]'") from None
    return h5py.File(path, mode, **more)


def _tasks(size: int, seed: int, hard: bool, drift: bool) -> list[tuple[int, int, int, bool, bool]]:
    return [(seed, begin, min(25, size - begin), hard, drift and begin >= size // 2) for begin in range(0, size, 25)]


def _shots(task: tuple[int, int, int, bool, bool]) -> tuple[np.ndarray, np.ndarray]:
    seed, begin, count, hard, drifted = task
    rng = np.random.default_rng([seed, begin])
    if hard or drifted:
        shares = np.array(_SHARES[HARD if hard else EASY])
        shares[-1] *= 3 if drifted else 1
        kinds = rng.choice(len(shares), count, p=shares / shares.sum()).astype(np.uint8)
    else:
        kinds = rng.integers(0, 2, count, np.uint8)
    shots = np.stack([shot(rng, HARD[kind], hard) for kind in kinds])
    work.advance(count)
    return shots, kinds


def shot(rng: np.random.Generator, kind: str, hard: bool) -> np.ndarray:
    """One exposure: rings of water, with the sharp spots of crystals where there is ice, on a detector of 4 × 2 panels
    with gaps, behind a beam stop; photon noise, readout noise and zingers."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] - (SIDE - 1) / 2 + rng.normal(0, 3, 2)[:, None, None]
    r = np.hypot(x, y)
    power = rng.lognormal(0, 0.4)
    # Water: a broad ring near 1.9 and a fainter one near 2.9 per ångström, over a falling background.
    light = 30 * np.exp(-r / 60)
    ring = 18 * np.exp(-((r - 75) / 13) ** 2)
    if kind == "empty":  # the jet was missed, or hardly hit
        light = light * rng.uniform(0.5, 1) + rng.uniform(0, 0.25) * ring
    else:
        light = light + ring + 6 * np.exp(-((r - 112) / 16) ** 2)
    if kind == "ice":
        light = _faint(rng, light, x, y) if hard else _ice(rng, light, x, y)
    if kind == "streak":
        angle = rng.normal(np.pi / 2, 0.3)
        away = np.abs(x * np.sin(angle) - y * np.cos(angle))
        light = light + rng.lognormal(4, 0.7) * np.exp(-(away / rng.uniform(1, 2.5)) ** 2) * np.exp(-r / 35)
    light[r < 14] *= 0.01  # the beam stop, and its arm
    light[(np.abs(y) < 3) & (x > 0)] *= 0.05
    counts = rng.poisson(light * power) + rng.normal(4, 1.2, light.shape)
    zingers = rng.random(light.shape) < 5e-5
    counts[zingers] += rng.uniform(200, 2000, int(zingers.sum()))
    out = np.clip(np.rint(counts), 0, 65535).astype(np.uint16)
    for edge in (62, 126, 190):  # gaps between panels
        out[edge:edge + 4] = 0
    out[:, 125:131] = 0
    return out


def _ice(rng: np.random.Generator, light: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    light *= rng.uniform(0.4, 0.9)  # some of the water is still liquid
    for ring in (64, 68, 73, 96, 121):  # hexagonal ice: three lines close together, two further out
        for _ in range(rng.poisson(4)):
            light += _spot(rng, x, y, ring, 4)
    return light


def _faint(rng: np.random.Generator, light: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    light *= rng.uniform(0.7, 1)
    for ring in rng.choice((64, 68, 73, 96, 121), min(8, 1 + rng.poisson(3.5))):
        light += _spot(rng, x, y, ring, 3.4)
    return light


def _spot(rng: np.random.Generator, x: np.ndarray, y: np.ndarray, ring: float, bright: float) -> np.ndarray:
    angle, width = rng.uniform(-np.pi, np.pi), rng.uniform(0.8, 1.8)
    away = (x - ring * np.cos(angle)) ** 2 + (y - ring * np.sin(angle)) ** 2
    return rng.lognormal(bright, 0.8) * np.exp(-away / (2 * width ** 2))
