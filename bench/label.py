"""What labelling costs: held-out accuracy by labels, actions by the simulated labeller, and the speed of the server.

    python bench/label.py                                        # ten seeds (hours on two cores)
    python bench/label.py --quick                                # one seed, fewer images
    python bench/label.py --only water-ice,groups --seeds 3-5    # in pieces

Prints a table, and of each goal whether it is reached. Held-out images are in no pool, and nothing is learnt from them.
Random choice stands beside. Each seed chooses other labels, another exam, and learns other features from the images.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from oars.data import make_shots, work
from oars.label import choose, layout, pixels
from oars.label.head import Head, standard
from oars.label.log import Log, filesystem, journal_for
from oars.label.simclr import MOST, Learned, square
from oars.label.simulate import Labeller, Served, read_truth

LABELS = (20, 50, 100, 200, 400)
PARTS = "water-ice,hard,groups,groups-hard,audit,live,speed"
_TABLE: list[tuple[str, str, str]] = []


def row(what: str, found: str, goal: str = "", reached: bool | None = None) -> None:
    """A line of the table, as soon as it is known."""
    verdict = "" if reached is None else "reached" if reached else "NOT REACHED"
    _TABLE.append((what, goal, verdict))
    print(f"{what:<48} {found:<40} {goal:<32} {verdict}", flush=True)


def summed(values: list[float], unit: str, digits: int = 2) -> str:
    """The mean, and the least of several seeds."""
    least = f" (least {min(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f} {unit}{least}"


class Fixed:
    """A learner on given features, as ``choose`` takes one, without a server."""

    def __init__(self, features: np.ndarray, seed: int) -> None:
        self.features, self.seed = features, seed
        self.guess: Fixed | None = None

    def fit(self, rows: list[int], labels: np.ndarray) -> None:
        """To these labels."""
        if len(np.unique(labels)) < 2:
            return
        self.head = Head(self.features[rows], labels)
        found = self.head.chances(self.features)
        chances = np.sort(found, 1)
        self.best = self.head.classes[found.argmax(1)]
        self.margin = chances[:, -1] - chances[:, -2]
        self.guess = self


def learn(features: np.ndarray, truth: np.ndarray, pool: int, how: str, seed: int, most: int) -> dict[int, tuple]:
    """Accuracy and balanced accuracy on what is not in the pool, by number of labels."""
    learner, rng = Fixed(features, seed), np.random.default_rng(seed)
    rows: list[int] = []
    found = {}
    budgets = [n for n in LABELS if n <= most] if how == "margin" else [*[n for n in LABELS if n <= most], most]
    for budget in dict.fromkeys(budgets):
        while len(rows) < budget:
            step = min(budget - len(rows), 10 if len(rows) < 100 else 50)
            still = np.setdiff1d(np.arange(pool), rows)
            if how == "random":
                new = rng.permutation(still)[:budget - len(rows)]
            else:
                new = choose.boundary(learner, still, np.array(rows, np.int64), step)  # type: ignore[arg-type]
            rows += [int(one) for one in new]
            if how == "margin":
                learner.fit(rows, truth[rows])
        learner.fit(rows, truth[rows])
        guess = getattr(learner, "best", np.full(len(truth), truth[rows[0]]))[pool:]
        right = guess == truth[pool:]
        found[budget] = (right.mean(), np.mean([right[truth[pool:] == one].mean() for one in np.unique(truth)]))
    return found


class Images:
    """A generated set: its labels, its features by seed."""

    def __init__(self, folder: Path, size: int, pool: int, hard: bool) -> None:
        import h5py

        make_shots.water_ice(folder, size, 0, work.cores(), hard)
        with h5py.File(folder / "water-ice.h5") as file:
            shots, self.labels = file["images"], file["labels"][:].astype(np.int64)
            shape = pixels.Geometry.seen([shots[at] for at in range(0, size, max(1, size // 200))])
            found = [(pixels.radial(shot, shape), pixels.spots(shot, shape), square(shot, 128))
                     for shot in map(shots.__getitem__, range(size))]
        radial, spots, self._squares = (np.stack(part) for part in zip(*found, strict=True))
        self._pool = pool
        self._fixed = {"radial": standard(radial), "spots+radial": standard(np.concatenate([spots, radial], 1))}

    def features(self, name: str, seed: int, folder: Path) -> np.ndarray:
        """``ssl`` is learnt from the pool, anew with each seed."""
        if name != "ssl":
            return self._fixed[name]
        some = np.random.default_rng(seed).permutation(self._pool)[:MOST]
        learned = Learned(seed, self._squares[some])
        torch.set_num_threads(work.cores())
        learned.learn(self._squares[some], folder / f"ssl-{seed}.pt", lambda step: None)
        found = learned.features(self._squares)
        torch.set_num_threads(1)
        return standard(found)


def accuracy(name: str, kind: str, images: Images, pool: int, seeds: range, folder: Path) -> dict[tuple, float]:
    """The rows of one set; the means, by way and number of labels."""
    most = int(0.7 * pool)
    runs: dict[str, list[dict[int, tuple]]] = {"margin": [], "random": []}
    for seed in seeds:
        features = images.features(kind, seed, folder)
        for how, done in runs.items():
            done.append(learn(features, images.labels, pool, how, seed, most))
    means: dict[tuple, float] = {}
    for how, done in runs.items():
        for budget in done[0]:
            all_, balanced = ([100 * float(run[budget][at]) for run in done] for at in (0, 1))
            means[how, budget], means[how, budget, "balanced"] = statistics.mean(all_), statistics.mean(balanced)
            row(f"{name}, {kind}, {how}, {budget} labels", f"{summed(all_, '%')}, balanced "
                f"{statistics.mean(balanced):.1f}")
    means["all",] = means["random", most]
    return means


def groups(folder: Path, features: str, seeds: range, name: str, most: int, purity: float) -> None:
    """The simulated labeller on a real server."""
    truth = read_truth(folder / "truth.csv")
    actions, right, exams = [], [], []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as place:
            served = Served(Path(place), str(folder / "water-ice.h5"), "--features", features, "--seed", str(seed))
            labeller = Labeller(served.client(), truth, seed)
            labeller.client.settled(whole=True)
            labeller.classes()
            labeller.groups()
            actions.append(labeller.actions)
            right.append(100 * labeller.right()[1])
            labeller.exam()
            exams.append(labeller.actions)
            served.end()
    row(f"{name}, {features}, in groups, 1 in 10 overlooked", f"{statistics.mean(actions):.0f} actions, "
        f"{summed(right, '%')}", f"<= {most} actions, >= {purity} %",
        statistics.mean(actions) <= most and statistics.mean(right) >= purity)
    row(f"{name}, {features}, with the exam", f"{statistics.mean(exams):.0f} actions",
        "<= 350 actions" if most < 200 else "", statistics.mean(exams) <= 350 if most < 200 else None)


def audit(folder: Path, seeds: range) -> None:
    """What audits say of the hard set when 800 have labels; and what share of the guesses is wrong indeed."""
    truth = read_truth(folder / "truth.csv")
    passed: list[str] = []
    asked = 0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as place:
            served = Served(Path(place), str(folder / "water-ice.h5"), "--features", "spots+radial", "--seed",
                            str(seed))
            labeller = Labeller(served.client(), truth, seed)
            labeller.client.settled()
            labeller.classes()
            while (state := labeller.client.settled())["labelled"] < min(800, len(truth) // 4):
                labeller.boundary(min(50, state["left"]))
            for name in sorted(set(truth.values())):
                asked += 1
                if labeller.audit(name)["passed"]:
                    before = labeller.right()
                    labeller.client.post("/api/accept", **{"class": name})
                    after = labeller.right()
                    wrong = 1 - (after[0] * after[1] - before[0] * before[1]) / max(1, after[0] - before[0])
                    passed.append(f"{name} ({100 * wrong:.1f} % wrong)")
            served.end()
    row("hard, audits that pass at 800 labels", f"{len(passed)} of {asked}: {', '.join(passed) or 'none'}", "none",
        not passed)


def used(process: int) -> float:
    """Seconds of CPU of a process and of all that it has started."""
    known = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            known[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    tree = {process}
    while more := {one for one, (parent, _) in known.items() if parent in tree} - tree:
        tree |= more
    return sum(known[one][1] for one in tree if one in known) / os.sysconf("SC_CLK_TCK")


def live(seconds: float, rate: int = 100) -> None:
    """What it takes to follow an experiment, with a model and nobody who looks."""
    import h5py

    size = int((seconds + 40) * rate)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "now" / "water-ice.h5"
        stream = subprocess.Popen([sys.executable, "-m", "oars", "data", "make", "water-ice", str(path.parent),
                                   "--size", str(size), "--stream", str(rate)])
        while not path.exists():
            time.sleep(0.2)
        served = Served(Path(place), str(path), "--live")
        client = served.client()
        client.settled()
        rows = [one["row"] for one in client.get("/api/boundary?n=500")["rows"]][:60]
        with h5py.File(path, "r", swmr=True) as file:
            labels = file["labels"][:]
        names = sorted({str(labels[at]) for at in rows})
        for name in names:
            client.post("/api/class", name=name)
            client.post("/api/label", rows=[at for at in rows if str(labels[at]) == name], how="human", seen=1 << 40,
                        **{"class": name})
        client.settled()
        while client.get("/api/live")["processed"] < 2 * rate:
            time.sleep(0.2)
        begun, spent, done = time.monotonic(), used(served.process.pid), client.get("/api/live")["processed"]
        time.sleep(seconds)
        took, found = time.monotonic() - begun, client.get("/api/live")
        cores, pace = (used(served.process.pid) - spent) / took, (found["processed"] - done) / took
        stream.kill()
        stream.wait()
        served.end()
    row(f"live, {rate} images/s", f"{cores:.2f} cores at {pace:.0f} images/s, {found['behind']} behind",
        "<= 0.5 core, none behind", cores <= 0.5 and found["behind"] == 0 and pace > 0.9 * rate)


def timed(function: Callable[[], object], times: int = 5) -> float:
    """The median, in milliseconds."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        function()
        took.append(1000 * (time.perf_counter() - begun))
    return statistics.median(took)


def speed(rows: int, mapped: int) -> None:
    """Similar ones, the map, an action to disk."""
    features = np.random.default_rng(0).normal(size=(rows, 92)).astype(np.float32)
    norms = np.einsum("ij,ij->i", features, features)
    took = timed(lambda: choose.near(features, norms, 7, 24))
    row(f"similar ones among {rows:,}", f"{took:.0f} ms", "<= 100 ms", took <= 100)
    took = timed(lambda: layout.layout(features[:mapped], 0, lambda done, total: None), 1) / 1000
    row(f"a map of {mapped:,}", f"{took:.1f} s", "<= 30 s", took <= 30)
    with tempfile.TemporaryDirectory() as place:
        log = Log(Path(place) / "log.sqlite", journal_for(filesystem(Path(place))))
        took = timed(lambda: log.add("bench", "label", {"rows": list(range(100)), "class": 1}), 50)
        log.close()
    row("an action of 100 rows, to disk", f"{took:.1f} ms", "<= 20 ms", took <= 20)


def accuracies(parts: list[str], place: Path, pool: int, test: int, seeds: range) -> None:
    """Held-out accuracy on both sets."""
    if "water-ice" in parts:
        images = Images(place / "easy", pool + test, pool, False)
        accuracy("water-ice", "radial", images, pool, seeds, place)
        found = accuracy("water-ice", "ssl", images, pool, seeds, place)
        row("water-ice, 50 labels", f"{found['margin', 50]:.2f} %", ">= 97 %", found["margin", 50] >= 97)
        row("water-ice, 100 labels", f"{found['margin', 100]:.2f} %", ">= 98.5 %", found["margin", 100] >= 98.5)
    if "hard" in parts:
        images = Images(place / "hard", pool + test, pool, True)
        found = accuracy("hard", "spots+radial", images, pool, seeds, place)
        row("hard, margin of 200 beside random of 70 %", f"{found['margin', 200]:.2f} / {found['all',]:.2f} %",
            "as good", found["margin", 200] >= found["all",])
        row("hard, 400 labels", f"{found['margin', 400]:.2f} % (balanced {found['margin', 400, 'balanced']:.1f})",
            ">= 96 %, balanced >= 87", found["margin", 400] >= 96 and found["margin", 400, "balanced"] >= 87)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one seed, 1,000 images in the pool")
    parser.add_argument("--only", default=PARTS, help=f"which parts, with commas between: {PARTS}")
    parser.add_argument("--seeds", help="which seeds, as in 0-9")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pool, test = (1000, 500) if args.quick else (4000, 2000)
    first, _, last = (args.seeds or ("0-0" if args.quick else "0-9")).partition("-")
    seeds = range(int(first), int(last or first) + 1)
    parts = args.only.split(",")
    with tempfile.TemporaryDirectory() as place:
        accuracies(parts, Path(place), pool, test, seeds)
        for part, hard in (("groups", False), ("groups-hard", True), ("audit", True)):
            folder = Path(place) / ("hard-pool" if hard else "easy-pool")
            if part in parts and not folder.exists():
                make_shots.water_ice(folder, pool, 1, work.cores(), hard)
            if part in parts:
                if part == "audit":
                    audit(folder, seeds)
                else:
                    groups(folder, "spots+radial" if hard else "ssl", seeds, "hard" if hard else "water-ice",
                           400 if hard else 150, 99.3 if hard else 99.7)
    if "live" in parts:
        live(8 if args.quick else 30)
    if "speed" in parts:
        speed(100_000 if args.quick else 1_000_000, 20_000 if args.quick else 100_000)
    missed = [what for what, _, verdict in _TABLE if verdict == "NOT REACHED"]
    print(f"\nnot reached: {', '.join(missed) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
