"""``--simulate``: a labeller who knows the truth, and overlooks a wrong thumbnail in ten, plays through a real server.

An action is a click, a key or a drag: one for each wrong image that is seen, one for each class that these go to, one
for the page. So a user knows what to expect before people are asked, and the bench what the page costs.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from oars.label import features
from oars.label.client import Client
from oars.label.errors import LabelError

PAGE = 60  # thumbnails
OVERLOOKED = 0.1
_COLD = 8  # pages of clusters before the first guess


def read_truth(path: Path, rows: int | None = None) -> dict[int, str]:
    """Row and label, from a CSV file with columns of these names."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            truth = {int(line["row"]): line["label"] for line in csv.DictReader(file)}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise LabelError(f"{path}: a CSV file with the columns row and label is needed ({error})") from None
    if not truth or (rows is not None and sorted(truth) != list(range(rows))):
        raise LabelError(f"{path}: it must have one line for each of the {rows} rows, from 0 on")
    return truth


class Labeller:
    """One simulated person."""

    def __init__(self, client: Client, truth: dict[int, str], seed: int = 0, most: int | None = None) -> None:
        self.client, self.truth = client, truth
        self._rng = np.random.default_rng(seed)
        self.actions, self._most = 0, most

    @property
    def tired(self) -> bool:
        """Whether all actions are spent."""
        return self._most is not None and self.actions >= self._most

    def classes(self) -> None:
        """Make the classes that the server does not have yet."""
        there = {one["name"] for one in self.client.get("/api/state")["classes"]}
        for name in sorted(set(self.truth.values()) - there):
            self.client.post("/api/class", name=name)

    def groups(self, until: int | None = None) -> None:
        """Page after page, until everything (or ``until`` rows) has a label."""
        for page in self.client.get(f"/api/groups?size={PAGE}&n={_COLD}")["groups"]:
            self.page(page)
        while not self.tired:
            state = self.client.settled()
            if state["left"] == 0 or (until is not None and state["labelled"] >= until):
                return
            self.page(self.client.get(f"/api/groups?size={PAGE}&n=1")["groups"][0])

    def page(self, page: dict[str, Any]) -> None:
        """Click out the wrong ones that are seen, label them by class, then label the rest with one key."""
        if self.tired:
            return
        rows = page["rows"]
        truth = [self.truth[row] for row in rows]
        most = max(sorted(set(truth)), key=truth.count)
        name = page["guess"] if page["guess"] is not None and truth.count(page["guess"]) * 2 >= len(rows) else most
        wrong = [row for row in rows if self.truth[row] != name]
        seen = [row for row in wrong if self._rng.random() >= OVERLOOKED]
        for other in sorted({self.truth[row] for row in seen}):
            self._label([row for row in seen if self.truth[row] == other], other, "human")
        self._label(sorted(set(rows) - set(seen)), name, "page")
        self.actions += len(seen) + len({self.truth[row] for row in seen}) + 1

    def boundary(self, count: int) -> None:
        """The most doubtful ones, one key each."""
        rows = [one["row"] for one in self.client.get(f"/api/boundary?n={count}")["rows"]]
        for name in sorted({self.truth[row] for row in rows}):
            self._label([row for row in rows if self.truth[row] == name], name, "human")
        self.actions += len(rows)

    def exam(self) -> None:
        """The exam, one key each."""
        while not self.tired and (row := self.client.get("/api/exam")["row"]) is not None:
            self._label([row], self.truth[row], "exam")
            self.actions += 1

    def audit(self, name: str) -> dict[str, Any]:
        """Look at what would be accepted as a class; what is wrong is overlooked as on any page."""
        drawn = self.client.get(f"/api/audit?class={name}")
        if drawn["refused"]:
            return {"passed": False, "refused": drawn["refused"]}
        wrong = [row for row in drawn["rows"] if self.truth[row] != name and self._rng.random() >= OVERLOOKED]
        self.actions += len(wrong) + 1
        return self.client.post("/api/audit", **{"class": name, "rows": drawn["rows"], "wrong": wrong})

    def _label(self, rows: Iterable[int], name: str, how: str) -> None:
        if rows := list(rows):
            seen = 1 << 40  # alone: nobody disagrees
            self.client.post("/api/label", rows=rows, how=how, seen=seen, **{"class": name})

    def right(self) -> tuple[int, float]:
        """How many rows have a label besides the exam's, and which share of these is right."""
        lines = list(csv.DictReader(self.client.ask("GET", "/api/labels.csv")[2].decode().splitlines()))
        mine = [line for line in lines if line["how"] != "exam" and line["label"]]
        right = sum(self.truth[int(line["row"])] == line["label"].removeprefix("'") for line in mine)
        return len(mine), right / max(1, len(mine))


class Served:
    """A server of its own, in a folder of its own; ``port`` and ``token`` open it."""

    def __init__(self, folder: Path, source: str, *options: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([sys.executable, "-m", "oars", "label", os.path.abspath(source), *options],
                                        cwd=folder, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                                        env={**os.environ, "DISPLAY": "", "WAYLAND_DISPLAY": ""})
        assert self.process.stdout is not None
        address = ""
        for line in self.process.stdout:
            if line.startswith("label at "):
                address = line.split()[2]
                break
        if not address:
            self.process.wait()
            self._errors.seek(0)
            raise LabelError(self._errors.read().strip().removeprefix("oars: ") or "the server did not start")
        self.port, self.token = int(address.split(":")[2].partition("/")[0]), address.partition("#")[2]

    def client(self) -> Client:
        """One person more."""
        return Client(self.port, self.token)

    def end(self) -> None:
        """End the server as Ctrl-C does."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()


def simulate(source: str, truth: Path, most: int, wanted: str, options: list[str], seed: int) -> int:
    """Play, and say what came out. The project is thrown away."""
    known = read_truth(truth)
    options = ["--features", features.absolute(wanted), *options]
    with tempfile.TemporaryDirectory(prefix="oars-label-") as folder:
        served = Served(Path(folder), source, *options)
        try:
            client = served.client()
            state = client.settled(whole=True)
            if wanted != "auto" and features.name_of(wanted) not in [one["name"] for one in state["features"]]:
                raise LabelError(state["note"])
            read_truth(truth, state["rows"])
            labeller = Labeller(client, known, seed, most)
            labeller.classes()
            labeller.groups()
            done, right = labeller.right()
            print(f"groups: {labeller.actions} actions, {done:,} of {state['rows'] - state['exam']['total']:,} images "
                  f"labelled, {100 * right:.2f} % of them right")
            before = labeller.actions
            labeller.exam()
            exam = client.settled()["exam"]
            if exam["accuracy"] is not None:
                right, low, high, even = (100 * exam[key] for key in ("accuracy", "low", "high", "balanced"))
                print(f"exam: {labeller.actions - before} actions, the model is right on {right:.1f} % ({low:.1f} to "
                      f"{high:.1f} %), balanced {even:.1f} %")
            client.close()
        finally:
            served.end()
    return 0
