"""What labelling costs: held-out accuracy by labels, actions by the simulated labeller, and the speed of the server.

    python bench/label.py             # ten seeds (hours on two cores)
    python bench/label.py --quick     # one seed, fewer images

Prints a table, and of each goal whether it is reached. Held-out images are in no pool. Random choice stands beside.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from oars.data import make_shots
from oars.label import choose, layout, pixels
from oars.label.head import Head, standard
from oars.label.log import Log, filesystem, journal_for
from oars.label.simulate import Labeller, Served, read_truth

LABELS = (20, 50, 100, 200, 400)
_TABLE: list[tuple[str, str, str]] = []


def row(what: str, found: str, goal: str = "", reached: bool | None = None) -> None:
    """A line of the table, as soon as it is known."""
    verdict = "" if reached is None else "reached" if reached else "NOT REACHED"
    _TABLE.append((what, goal, verdict))
    print(f"{what:<44} {found:<34} {goal:<30} {verdict}", flush=True)


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
        chances = np.sort(self.head.chances(self.features), 1)
        self.best = self.head.classes[self.head.chances(self.features).argmax(1)]
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


def images(folder: Path, size: int, hard: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Features of a generated set, and its labels."""
    import h5py

    make_shots.water_ice(folder, size, 0, 1, hard)
    with h5py.File(folder / "water-ice.h5") as file:
        shots, labels = file["images"], file["labels"][:].astype(np.int64)
        shape = pixels.Geometry.seen([shots[at] for at in range(0, size, max(1, size // 200))])
        both = [(pixels.radial(shot, shape), pixels.spots(shot, shape)) for shot in map(shots.__getitem__, range(size))]
    radial, spots = (np.stack(part) for part in zip(*both, strict=True))
    return {"radial": standard(radial), "spots+radial": standard(np.concatenate([spots, radial], 1))}, labels


def accuracy(name: str, features: np.ndarray, truth: np.ndarray, pool: int, seeds: int) -> dict[tuple, float]:
    """The rows of one set; the means, by way and number of labels."""
    most = int(0.7 * pool)
    means: dict[tuple, float] = {}
    for how in ("margin", "random"):
        runs = [learn(features, truth, pool, how, seed, most) for seed in range(seeds)]
        for budget in runs[0]:
            all_, balanced = (np.array([run[budget][at] for run in runs]) * 100 for at in (0, 1))
            means[how, budget], means[how, budget, "balanced"] = float(all_.mean()), float(balanced.mean())
            row(f"{name}, {how}, {budget} labels", f"{all_.mean():.2f} % (least {all_.min():.2f}, balanced "
                f"{balanced.mean():.1f})")
    means["all"] = means["random", most]
    return means


def groups(folder: Path, features: str, seeds: int, name: str, most: int, purity: float) -> None:
    """The simulated labeller on a real server."""
    truth = read_truth(folder / "truth.csv")
    actions, right, exams = [], [], []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as work:
            served = Served(Path(work), str(folder / "water-ice.h5"), "--features", features, "--seed", str(seed))
            labeller = Labeller(served.client(), truth, seed)
            labeller.client.settled()
            labeller.classes()
            labeller.groups()
            actions.append(labeller.actions)
            right.append(100 * labeller.right()[1])
            labeller.exam()
            exams.append(labeller.actions)
            served.end()
    found = f"{statistics.mean(actions):.0f} actions, {statistics.mean(right):.2f} % (least {min(right):.2f})"
    row(f"{name}, in groups, 1 in 10 overlooked", found, f"<= {most} actions, >= {purity} %",
        statistics.mean(actions) <= most and statistics.mean(right) >= purity)
    row(f"{name}, with the exam", f"{statistics.mean(exams):.0f} actions", "<= 350 actions" if most < 200 else "",
        statistics.mean(exams) <= 350 if most < 200 else None)


def audit(folder: Path) -> None:
    """What an audit says of the hard set when 800 have labels."""
    truth = read_truth(folder / "truth.csv")
    with tempfile.TemporaryDirectory() as work:
        served = Served(Path(work), str(folder / "water-ice.h5"))
        labeller = Labeller(served.client(), truth)
        labeller.client.settled()
        labeller.classes()
        while (state := labeller.client.settled())["labelled"] < min(800, len(truth) // 4):
            labeller.boundary(min(50, state["left"]))
        found = {name: labeller.audit(name) for name in sorted(set(truth.values()))}
        served.end()
    passed = [name for name, one in found.items() if one["passed"]]
    row("hard, audits that pass at 800 labels", ", ".join(passed) or "none", "not all", len(passed) < len(found))


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
    with tempfile.TemporaryDirectory() as work:
        log = Log(Path(work) / "log.sqlite", journal_for(filesystem(Path(work))))
        took = timed(lambda: log.add("bench", "label", {"rows": list(range(100)), "class": 1}), 50)
        log.close()
    row("an action of 100 rows, to disk", f"{took:.1f} ms", "<= 20 ms", took <= 20)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one seed, 1,000 images in the pool")
    parser.add_argument("--only", default="accuracy,groups,audit,speed", help="which parts, with commas between")
    args = parser.parse_args()
    seeds, pool, test = (1, 1000, 500) if args.quick else (10, 4000, 2000)
    parts = args.only.split(",")
    with tempfile.TemporaryDirectory() as work:
        easy, hard = Path(work) / "easy", Path(work) / "hard"
        if "accuracy" in parts:
            features, truth = images(easy, pool + test, False)
            found = accuracy("water-ice (radial)", features["radial"], truth, pool, seeds)
            row("water-ice, 50 labels", f"{found['margin', 50]:.2f} %", ">= 97 %", found["margin", 50] >= 97)
            row("water-ice, 100 labels", f"{found['margin', 100]:.2f} %", ">= 98.5 %", found["margin", 100] >= 98.5)
            features, truth = images(hard, pool + test, True)
            found = accuracy("hard (spots+radial)", features["spots+radial"], truth, pool, seeds)
            row("hard, margin of 200 beside random of 70 %", f"{found['margin', 200]:.2f} / {found['all']:.2f} %",
                "as good", found["margin", 200] >= found["all"])
            row("hard, 400 labels", f"{found['margin', 400]:.2f} % (balanced "
                f"{found['margin', 400, 'balanced']:.1f})", ">= 96 %, balanced >= 87",
                found["margin", 400] >= 96 and found["margin", 400, "balanced"] >= 87)
        for folder, is_hard in ((Path(work) / "easy-pool", False), (Path(work) / "hard-pool", True)):
            if "groups" in parts or ("audit" in parts and is_hard):
                make_shots.water_ice(folder, pool, 1, 1, is_hard)
            if "groups" in parts:
                groups(folder, "auto" if is_hard else "radial", min(seeds, 3), "hard" if is_hard else "water-ice",
                       400 if is_hard else 150, 99.3 if is_hard else 99.7)
            if "audit" in parts and is_hard:
                audit(folder)
    if "speed" in parts:
        speed(100_000 if args.quick else 1_000_000, 20_000 if args.quick else 100_000)
    missed = [what for what, _, verdict in _TABLE if verdict == "NOT REACHED"]
    print(f"\nnot reached: {', '.join(missed) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
