"""Writes one small snapshot: for the tests, and for a child process of theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oars.adapt.replay.snapshot_file import Blob, encode, write


def a_snapshot(folder: Path, step: int) -> Path:
    blobs: list[Blob] = []
    state = encode({"w": np.arange(300.0), "lr": 0.1, "empty": np.zeros((0, 3))}, blobs, "state")
    return write(folder, step, {"state": state, "tape": {}}, blobs)
