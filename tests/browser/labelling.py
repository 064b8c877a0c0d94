"""``oars label`` for the tests of its page: started, killed, started again; and what its log says was done."""

from __future__ import annotations

import collections
import csv
import re
import signal
import socket
import subprocess
from pathlib import Path

import h5py
import numpy as np
from driving import Chromium, Tab, wait_for
from running import OARS, environment


def images(path: Path, rows: int, side: int = 32) -> np.ndarray:
    """Two kinds of images, rings and spots, that a model tells apart at once; their kinds."""
    rng = np.random.default_rng(3)
    kinds = rng.integers(0, 2, rows)
    y, x = np.mgrid[0:side, 0:side] - (side - 1) / 2
    ring = 40 * np.exp(-((np.hypot(y, x) - side / 4) / 2) ** 2) + 8
    found = rng.poisson(np.where(kinds[:, None, None] == 0, ring, 12.0)).astype(np.uint16)
    for row in np.flatnonzero(kinds):
        at = rng.integers(2, side - 2, (5, 2))
        found[row, at[:, 0], at[:, 1]] += 400
    with h5py.File(path, "w") as file:
        file["images"] = found
    return kinds


class Labelling:
    """A server on ``folder/run.h5``; always at the same port, so that a page finds it again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self) -> Labelling:
        said = self.folder / "said.txt"
        with open(said, "wb") as out:
            self.process = subprocess.Popen([*OARS, "label", "run.h5", "--port", str(self.port), *self.options],
                                            cwd=self.folder, env=environment(), stdout=out, stderr=subprocess.STDOUT)
        process = self.process
        wait_for(lambda: b"ssh -L" in said.read_bytes() or process.poll() is not None, "oars label does not start", 120)
        assert process.poll() is None, said.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+/#\S+", said.read_text())
        assert found
        self.address = found[0]
        return self

    def kill(self) -> None:
        """As a machine that goes down does it."""
        assert self.process
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Labelling:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def page(self, browser: Chromium, **how: object) -> Tab:
        tab = browser.open(self.address, **how)  # type: ignore[arg-type]
        tab.until("document.body.dataset.ready === 'yes'", 60)
        return tab


def labels(tab: Tab) -> dict[int, tuple[str, str]]:
    """Row → (class, how), as the server would export it now."""
    text = tab.js("fetch('/api/labels.csv').then((answer) => answer.text())")
    lines = list(csv.DictReader(text.splitlines()))
    doubled = [row for row, times in collections.Counter(line["row"] for line in lines).items() if times > 1]
    assert not doubled, doubled
    return {int(line["row"]): (line["label"], line["how"]) for line in lines if line["label"]}


def labelled(tab: Tab) -> int:
    """How many images have a label, once the page has said all it has to say."""
    return tab.js("fetch('/api/state').then((answer) => answer.json()).then(({ labelled }) => labelled)")


def go(tab: Tab, screen: str) -> None:
    """Presses the key of a screen."""
    tab.press(screen[0])
    tab.until(f"document.body.dataset.screen === '{screen}'")
