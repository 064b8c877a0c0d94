"""The child process that computes features which take long: ``python -m oars.label.late DIR WORD CORES``.

WORD is ``ssl``, ``conv`` or ``my.py:embed``. People label meanwhile, so it is gentle. It notes how far it is, ends when
its server does, and the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oars.data import work
from oars.data.errors import DataError
from oars.label import compute, features
from oars.label import folder as folder_
from oars.label.errors import LabelError
from oars.label.folder import Folder, put
from oars.label.simclr import MOST, SIDES, STEPS, Learned, square
from oars.label.source import Source

_BLOCK = 64  # rows
_FLUSH = 8  # blocks
_CONV = 500  # images that tell an untrained network how bright they are

_source: Source | None = None


class Late:
    """One kind of features of all rows of a project."""

    def __init__(self, folder: Folder, word: str, cores: int) -> None:
        self.folder, self.word, self._cores = folder, word, cores
        self._server = os.getppid()
        self.source = Source(folder.source, folder.group, folder.grows)
        self.path = features.place_of(folder, word)

    def say(self, what: str, done: int, total: int) -> None:
        """How far it is; the end, where nobody waits for it any more."""
        if os.getppid() != self._server:
            sys.exit(1)
        put(self.folder.file(folder_.LATER), {"word": self.word, "what": what, "done": done, "total": total})

    def compute(self) -> None:
        """Make the file."""
        if features.kept(self.folder, self.word) is None:
            self._write(*(self._learned() if self.word in features.LEARNED else self._own()))

    # ---- a network of our own ----------------------------------------------------------------------------------------

    def _learned(self) -> tuple[Callable[[int], Iterator[Any]], Callable[[Any], np.ndarray]]:
        import torch

        torch.set_num_threads(self._cores)
        state = self.folder.path / folder_.FEATURES / f"{self.word}.pt"
        order = np.random.default_rng(self.folder.seed).permutation(self.folder.rows)
        some = np.sort(order[:MOST if self.word == "ssl" else _CONV])
        found, images = Learned(self.folder.seed), None
        if not found.again(state):
            images = self._squares(some, self._side())
            found = Learned(self.folder.seed, images)
            found.keep(state)
        if self.word == "ssl" and found.step < STEPS:
            found.learn(self._squares(some, found.side) if images is None else images, state,
                        lambda step: self.say("learning from the images", step, STEPS))
        return lambda begin: self._blocks(np.arange(begin, self.folder.rows), found.side), found.features

    def _side(self) -> int:
        """Squares that show the images without blowing them up much."""
        rows = sorted({int(row) for row in np.linspace(0, self.folder.rows - 1, 20)})
        longest = max((max(image.shape) for row in rows for image in compute.read(self.source, [row])
                       if image is not None), default=SIDES[0])
        return next((side for side in SIDES if side >= longest), SIDES[-1])

    def _squares(self, rows: np.ndarray, side: int) -> np.ndarray:
        found = []
        for block in self._blocks(rows, side):
            found.append(block)
            self.say("reading images to learn from", min(len(rows), _BLOCK * len(found)), len(rows))
        return np.concatenate(found)

    def _blocks(self, rows: np.ndarray, side: int) -> Iterator[np.ndarray]:
        folder = self.folder
        tasks = [(folder.source, folder.group, folder.grows, side, rows[at:at + _BLOCK].tolist())
                 for at in range(0, len(rows), _BLOCK)]
        return work.each(_square, tasks, max(1, min(self._cores, len(tasks))))

    # ---- the user's function -----------------------------------------------------------------------------------------

    def _own(self) -> tuple[Callable[[int], Iterator[Any]], Callable[[Any], np.ndarray]]:
        path, _, function = self.word.rpartition(":")
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        with self._theirs(path):
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        call = getattr(module, function, None)
        if not callable(call):
            raise LabelError(f"--features {self.word}: {path} has no function {function}")

        def features_of(images: list[np.ndarray | None]) -> np.ndarray:
            there = [image for image in images if image is not None]
            alike = len({(image.shape, image.dtype) for image in there}) == 1
            with self._theirs(path):
                values = np.asarray(call(np.stack(there) if alike else there))
                if values.ndim != 2 or len(values) != len(there) or values.dtype.kind not in "fiub":
                    raise ValueError(f"for {len(there)} images a row of numbers each is needed, and it gave "
                                     f"{values.dtype.name} of the shape {values.shape}")
                if not np.isfinite(values).all():
                    raise ValueError("it gave values that are not numbers (NaN or infinite)")
            out = np.zeros((len(images), values.shape[1]), np.float32)
            out[[image is not None for image in images]] = values
            return out

        return self._raw, features_of

    def _raw(self, begin: int) -> Iterator[list[np.ndarray | None]]:
        for at in range(begin, self.folder.rows, _BLOCK):
            yield compute.read(self.source, list(range(at, min(self.folder.rows, at + _BLOCK))))

    @contextlib.contextmanager
    def _theirs(self, path: str) -> Iterator[None]:
        """What goes wrong in the user's program is one line that names the line in it."""
        try:
            yield
        except Exception as error:
            mine = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                    if os.path.abspath(frame.filename) == os.path.abspath(path)]
            where = f" (line {mine[-1]})" if mine else ""
            text = " ".join(str(error).split())[:300]
            raise LabelError(f"--features {self.word}: {type(error).__name__}: {text}{where}") from None

    # ---- the file ----------------------------------------------------------------------------------------------------

    def _write(self, blocks: Callable[[int], Iterator[Any]], features_of: Callable[[Any], np.ndarray]) -> None:
        part = self.path.with_name(self.path.name + ".part")
        rows, begin = self.folder.rows, self._done(part)
        out = np.lib.format.open_memmap(part, "r+") if begin else None
        at = begin
        for number, block in enumerate(blocks(begin)):
            if all(image is None for image in block) and out is None:
                raise LabelError(f"--features {self.word}: none of the first {len(block)} images can be read")
            values = (np.zeros((len(block), out.shape[1]), np.float32) if out is not None
                      and all(image is None for image in block) else features_of(block))
            if out is None:
                out = np.lib.format.open_memmap(part, "w+", np.float32, (rows, values.shape[1]))
            if values.shape[1] != out.shape[1]:
                raise LabelError(f"--features {self.word}: from image {at} on {values.shape[1]} numbers each, before "
                                 f"{out.shape[1]}")
            out[at:at + len(values)] = values
            at += len(values)
            if number % _FLUSH == _FLUSH - 1 or at == rows:
                out.flush()
                self.say("computing features", at, rows)
        os.replace(part, self.path)

    def _done(self, part: Path) -> int:
        """How far an earlier one came."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = json.loads(self.folder.file(folder_.LATER).read_text())
            if (found["word"], found["what"], found["total"]) == (self.word, "computing features", self.folder.rows):
                if len(np.lib.format.open_memmap(part, "r")) == self.folder.rows:
                    return min(int(found["done"]), self.folder.rows - 1) // _BLOCK * _BLOCK
        return 0


def _square(task: tuple[str, str | None, bool, int, list[int]]) -> np.ndarray:
    """In a worker: what cannot be read is dark."""
    global _source
    path, group, grows, side, rows = task
    _source = _source or Source(path, group, grows)
    work.advance(len(rows))
    return np.stack([np.zeros((side, side), np.float16) if image is None else square(image, side)
                     for image in compute.read(_source, rows)])


def main(argv: list[str]) -> int:
    """Compute, gently."""
    os.nice(10)
    folder = Folder(Path(argv[0]), json.loads((Path(argv[0]) / folder_.PROJECT).read_text()))
    with open(folder.file(folder_.COMPUTING), "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # the one of a killed server may be at it still: it ends soon
        try:
            Late(folder, argv[1], int(argv[2])).compute()
        except (LabelError, DataError, OSError, RuntimeError) as error:
            put(folder.file(folder_.LATER), {"error": " ".join(str(error).split())})
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
