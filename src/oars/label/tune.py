"""A network that is fine-tuned on the labels by ``oars run``, at each doubling of labels from 100 on.

The run is a child in a folder of the project; how far it is, and whether it came to its end, is read from its run
folder. What it has learnt is used only if the exam is better with it; the page shows both numbers. Its features are not
compared with the others by cross-validation: the network has seen all labels.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oars import runfolder
from oars.label import export
from oars.label import folder as folder_
from oars.label.desk import Desk
from oars.label.folder import put
from oars.label.head import Head, scale, standard
from oars.label.learner import TUNED

FIRST = 100  # labels
EXAM = 50  # images of it that have their answer; with fewer, nobody can say what is better
STEPS = 150
_SCRIPT = Path(__file__).with_name("fine_tune.py")
_LOOK = 1.0  # seconds


class Tuning:
    """Watches the labels in the thread that calls ``watch``, until it is ``ended``."""

    def __init__(self, desk: Desk, keys: export.Keys, cores: int, ended: threading.Event,
                 progress: Callable[[int, int], None]) -> None:
        self._desk, self._folder, self._keys, self._cores = desk, desk.folder, keys, cores
        self._ended, self._progress = ended, progress
        self._place = desk.folder.file(folder_.TUNE)
        self._child: subprocess.Popen[bytes] | None = None
        self.note: str | None = None
        self._known: dict[str, Any] = {"labels": 0}
        with contextlib.suppress(OSError, ValueError):
            self._known = json.loads(desk.folder.file(folder_.TUNED).read_text())
        kept = desk.folder.feature(TUNED)
        values = np.load(kept, allow_pickle=False) if kept.exists() else np.zeros(0)
        if self._known["labels"]:
            desk.ready().tune(self._known, values if len(values) == desk.folder.rows else None)

    def watch(self) -> None:
        """A run at each doubling of the labels."""
        while not self._ended.wait(_LOOK):
            with self._desk.lock:
                state = self._desk.state
                rows = state.trains()
                labels = state.labels()[rows]
                exam = int((state.labels()[state.exam] >= 0).sum())
            if len(rows) >= max(FIRST, 2 * self._known["labels"]) and exam >= EXAM and len(np.unique(labels)) > 1:
                self._run(len(rows))

    def close(self) -> None:
        """End the run: it does as at Ctrl-C."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()

    def _run(self, count: int) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        export.write(self._desk, self._keys, self._place / "labels.csv")
        name = f"{count}-labels"
        weights = self._folder.path / folder_.FEATURES / "ssl.pt"
        group = ["--group", self._folder.group] if self._folder.group else []
        with open(self._place / "output.txt", "wb") as out:
            self._child = subprocess.Popen(
                ["nice", "-n", "10", sys.executable, "-m", "oars", "run", "-n", str(self._cores), "--name", name,
                 "--quiet", str(_SCRIPT), self._folder.source, "labels.csv", "--column", self._folder.about["column"],
                 "--weights", str(weights.absolute()), "--steps", str(STEPS), *group],
                cwd=self._place, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"})
        run = self._place / runfolder.RUNS / name
        while self._child.poll() is None and not self._ended.wait(_LOOK):
            with contextlib.suppress(OSError):
                self._progress((run / runfolder.METRICS).read_bytes().count(b"\n"), STEPS)
        self._progress(STEPS, STEPS)
        if self._ended.is_set():
            self.close()
            return
        self._known = {"labels": count}  # not again with the same labels, whatever came of it
        try:
            if (code := json.loads((run / runfolder.END).read_text())["code"]) != 0:
                raise ValueError(f"exit code {code}")
            values = np.load(self._place / "features.npy", allow_pickle=False)
            if values.shape[0] != self._folder.rows:
                raise ValueError(f"{values.shape[0]} rows of {self._folder.rows}")
        except (OSError, ValueError, KeyError) as error:
            self.note = f"the network could not be fine-tuned ({error}): {self._place / 'output.txt'} says why"
            return
        self._judge(count, np.asarray(values, np.float32))

    def _judge(self, count: int, values: np.ndarray) -> None:
        """Keep it if the exam is better with it, by the same labels."""
        learner = self._desk.ready()
        with self._desk.lock:
            state, labels = self._desk.state, self._desk.state.labels()
            rows = state.trains()
            exam = state.exam[labels[state.exam] >= 0]
        new = standard(values, scale(values))
        found = {}
        for name, features in (("before", learner.features), ("exam", new)):
            head = Head(features[rows], labels[rows])
            found[name] = float((head.classes[head.chances(features[exam]).argmax(1)] == labels[exam]).mean())
        self._known = {"labels": count, **found}
        better = found["exam"] > found["before"]
        if better:
            np.save(self._folder.feature(TUNED), values)
        put(self._folder.file(folder_.TUNED), self._known)
        learner.tune(self._known, values if better else None)
