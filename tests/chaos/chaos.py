"""Chaos: trainings in which ranks die, at named points and at random times, and what must be true afterwards.

    python tests/chaos/chaos.py --runs 200         # make chaos: prints "N survived, M not"
    python tests/chaos/chaos.py --seed 17          # that one again, telling what happens in it

After each run: the training finished, its printed lines are those of one process, every sample of every epoch was
learnt from once (the ledger), the survivors' weights are equal to the bit, and as many deaths were noticed as happened.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from running import Run, python  # noqa: E402

SCRIPT = HERE / "train.py"
KINDS = [[], ["--accumulate", "3"], ["--penalty", "0.001"], ["--workers", "1"], ["--handmade"]]
POINTS = {  # point: how often a run of two epochs comes by, at least
    "start": 1, "batch": 26, "forward": 26, "backward": 26, "in backward": 150, "end of backward": 26,
    "in a collective": 130, "in allreduce": 60, "behind allreduce": 60, "in exchange": 8, "behind exchange": 8,
    "in optimizer": 8, "end": 1,
}  # fmt: skip
FOLLOWING = ("recovery", "recovered", "taking over")  # come by only after another death


@dataclass
class Voyage:
    """One run: how many ranks, which script, who dies where."""

    ranks: int
    kind: list
    deaths: list = field(default_factory=list)  # [rank, point, count]
    shots: list = field(default_factory=list)  # (rank, seconds after the start)

    @classmethod
    def drawn(cls, seed):
        """The voyage of a seed."""
        draw = random.Random(seed)
        ranks = draw.randint(2, 6)
        voyage = cls(ranks, draw.choice(KINDS))
        doomed = draw.sample(range(ranks), draw.randint(1, ranks - 1))
        for rank in doomed:
            if voyage.deaths and draw.random() < 0.3:
                voyage.deaths.append([rank, draw.choice(FOLLOWING), 1])
            elif draw.random() < 0.25:
                voyage.shots.append((rank, draw.uniform(0, 3)))
            else:
                point = draw.choice(list(POINTS))
                voyage.deaths.append([rank, point, draw.randint(1, POINTS[point])])
        return voyage


def sail_script(script, ranks, deaths, folder, *options, limit=120, **env):
    """Any script with these deaths in it."""
    return Run(Path(folder), "--quiet", "-n", ranks, *options, script, deaths=deaths, limit=limit, **env)


def lines_of(kind, known={}):  # noqa: B006 (one run of python per kind is enough)
    """What one process prints, and what it writes to its log."""
    if (key := tuple(kind)) not in known:
        with tempfile.TemporaryDirectory() as folder:
            known[key] = python(folder, SCRIPT, *kind), Path(folder, "log.txt").read_text().splitlines()
    return known[key]


def sail(voyage, folder, limit=120):
    """The run of a voyage."""
    run = Run(Path(folder), "--quiet", "-n", voyage.ranks, SCRIPT, *voyage.kind, deaths=voyage.deaths, limit=limit,
              OARS_DIGEST="1", OARS_LEDGER="1")
    for rank, delay in voyage.shots:
        threading.Thread(target=shoot, args=(run.folder / f"pid-{rank}", delay), daemon=True).start()
    return run


def shoot(pid_file, delay):
    """Kill a rank some time after it has started."""
    for _ in range(3000):
        if pid_file.exists():
            break
        time.sleep(0.01)
    time.sleep(delay)
    try:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    except (OSError, ValueError):  # it had ended already
        pass


def wrong_with(voyage, folder):
    """Run a voyage; what was not as it must be, or an empty string."""
    run = sail(voyage, folder)
    if run.code:
        return f"exit code {run.code}: {run.err[-1500:]}"
    printed, logged = lines_of(voyage.kind)
    if told := unlike(run.lines, printed) or unlike(Path(folder, "log.txt").read_text().splitlines(), logged):
        return told
    if torch.load(Path(folder, "best.pt"), weights_only=True)["epoch"] != len(printed) - 1:
        return "best.pt is not that of the last epoch"
    if strange := {path.name for path in Path(folder).iterdir()} - {"best.pt", "log.txt", "oars-runs"}:
        return f"left behind: {strange}"
    lost = {rank for event in run.events("lost") for rank in event["ranks"]}
    if run.events("passed over"):
        return "a step was passed over"
    doomed = {death[0] for death in voyage.deaths} | {rank for rank, _ in voyage.shots}
    if not lost <= doomed:
        return f"ranks {sorted(lost - doomed)} were called lost"
    weights = {rank: text for rank, text in run.digests().items() if rank not in lost}
    if len(set(weights.values())) != 1:
        return f"the survivors' weights differ: {weights}"
    return "" if voyage.kind == ["--handmade"] else unlearnt(run.folder)


def unlike(lines, expected):
    """Where the printed lines differ from one process's: words must be equal, losses to 1e-3."""
    if len(lines) != len(expected):
        return f"{len(lines)} lines instead of {len(expected)}: {lines}"
    for line, other in zip(lines, expected, strict=True):
        for a, b in zip(line.split(), other.split(), strict=True):
            if a != b and not (_number(a) and _number(b) and abs(float(a.strip(",")) - float(b.strip(","))) < 1e-3):
                return f"{line!r} instead of {other!r}"
    return ""


def _number(word):
    return re.fullmatch(r"-?\d+\.\d+,?", word)


def unlearnt(run):
    """What the ledger says is missing or double."""
    batches = {}
    for ledger in run.glob("ledger-*.jsonl"):
        for line in ledger.read_text().splitlines():
            entry = json.loads(line)
            if entry["of"] <= 20:  # training, not the test set's larger batches
                batches.setdefault((entry["iteration"], entry["batch"]), []).append(entry)
    epochs = {}
    for (iteration, batch), entries in batches.items():
        era = max(entry["era"] for entry in entries)
        samples = [s for entry in entries if entry["era"] == era for s in entry["samples"]]
        if len(samples) != entries[0]["of"]:
            return f"batch {batch} of iteration {iteration}: {len(samples)} of {entries[0]['of']} samples"
        epochs.setdefault(iteration, []).extend(samples)
    for iteration, samples in epochs.items():
        if len(samples) != len(set(samples)):
            return f"iteration {iteration} learnt from some samples twice"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.runs)
    failed = []
    for seed in seeds:
        voyage, folder = Voyage.drawn(seed), tempfile.mkdtemp(prefix="chaos-")
        began = time.monotonic()
        if wrong := wrong_with(voyage, folder):
            failed.append(seed)
            print(f"seed {seed}: {voyage}\n  {wrong}\n  kept in {folder}", flush=True)
            continue
        shutil.rmtree(folder)
        if args.seed is not None:
            print(f"{voyage}\nsurvived in {time.monotonic() - began:.1f} s")
        else:
            print(".", end="", flush=True)
    print(f"\n{len(seeds) - len(failed)} survived, {len(failed)} not" + (f": seeds {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
