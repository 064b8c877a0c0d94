"""What ``--features`` takes: the kinds there are, which of them come later, and files of the user's own.

Cheap ones are computed when every image is read for the first time (``compute.py``). The others come later, while
people label already, from a child process (``late.py``). No file is loaded that can hold code, with one exception:
``my.py:embed`` of the command line is the user's own program.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from oars.label.errors import LabelError
from oars.label.folder import FEATURES, Folder

CHEAP = ("radial", "spots", "spots+radial")
LEARNED = ("conv", "ssl")
LEAST = 500  # images, from which on ``auto`` learns from them: of fewer little is learnt, and all are soon labelled
_PICKLES = (".pt", ".pth", ".pt2", ".pkl", ".pickle", ".ckpt", ".npz")


def check(word: str, live: bool) -> None:
    """An error for what ``--features`` does not take."""
    path, _, function = word.rpartition(":")
    if path.endswith(".py"):
        if not os.path.isfile(path):
            raise LabelError(f"--features {word}: there is no file {path}")
        if not function.isidentifier():
            raise LabelError(f"--features {word}: {function!r} is no name of a function: {path}:embed")
    elif word.endswith(".py"):
        raise LabelError(f"--features {word}: name a function in it too: {word}:embed")
    elif word.endswith(_PICKLES):
        raise LabelError(f"--features {word}: such a file can hold code that runs when it is loaded, so it is not "
                         "loaded: write the features to a .npy file, or load it in a function of your own: my.py:embed")
    elif not word.endswith(".npy") and word not in ("auto", *CHEAP, *LEARNED):
        raise LabelError(f"--features {word}: one of auto, {', '.join((*CHEAP, *LEARNED))}, a .npy file, or "
                         "my.py:embed")
    if live and word not in ("auto", *CHEAP):
        raise LabelError(f"--live --features {word}: images that are still to come have auto, {', '.join(CHEAP)} only")


def absolute(word: str) -> str:
    """The same from any folder."""
    return os.path.abspath(word) if word.endswith(".npy") or ".py:" in word else word


def later(word: str, rows: int, live: bool) -> str | None:
    """The features that are computed while people label already."""
    if word == "auto":
        return "ssl" if rows >= LEAST and not live else None
    return word if word in LEARNED or ".py:" in word else None


def name_of(word: str) -> str:
    """As the page shows it."""
    return os.path.basename(word)


def place_of(folder: Folder, word: str) -> Path:
    """The file of features that come later; those of another version of the user's program have another one."""
    if word in LEARNED:
        return folder.feature(word)
    path, _, _ = word.rpartition(":")
    text = Path(path).read_bytes() + os.path.abspath(word).encode()
    return folder.path / FEATURES / f"own-{hashlib.sha256(text).hexdigest()[:16]}.npy"


def kept(folder: Folder, word: str) -> np.ndarray | None:
    """Features that came earlier, if they are those of all rows of today."""
    path = place_of(folder, word)
    if not path.exists():
        return None
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    return np.asarray(found, np.float32) if len(found) == folder.rows else None


def read(path: str, rows: int) -> np.ndarray:
    """The user's own features, a row for each image."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise LabelError(f"--features {path}: {error}") from None
    if not isinstance(found, np.ndarray) or found.ndim != 2 or len(found) != rows or found.dtype.kind not in "fiu":
        shape = getattr(found, "shape", None)
        raise LabelError(f"--features {path}: an array of {rows} rows of numbers is needed, this one is {shape}")
    if not np.isfinite(found).all():
        raise LabelError(f"--features {path}: some values are not numbers (NaN or infinite)")
    return np.asarray(found, np.float32)
