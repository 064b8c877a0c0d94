"""Runs of the training scripts of this folder, and what one process makes of them."""

from __future__ import annotations

from pathlib import Path

from running import Run

HERE = Path(__file__).resolve().parent
TRAIN = HERE / "train.py"


def trained(folder: Path, *words: object, deaths: tuple = (), **env: str) -> Run:
    """``oars run`` with these words, whose ranks write down what they learnt from and which weights they end with."""
    return Run(folder, "--quiet", *words, deaths=deaths, OARS_LEDGER="1", OARS_DIGEST="1", **env)


def losses(run: Run) -> list[float]:
    """In evaluation, after each epoch."""
    return [float(line.split()[-1]) for line in run.lines]


def right(run: Run) -> int:
    """Of 240, after the last epoch."""
    return int(run.lines[-1].split()[4])
