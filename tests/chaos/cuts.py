"""Deaths around the cuts of ``--prune``: the others cut alike, and train on as one process would have.

    python tests/chaos/cuts.py --runs 40           # prints "N survived, M not"
    python tests/chaos/cuts.py --seed 17           # that one again
"""

import argparse
import itertools
import random
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from running import Run  # noqa: E402

SCRIPT = HERE.parent / "evolve" / "scripts" / "mlp.py"
POINTS = {"deciding": 9, "decided": 9, "cut": 8, "behind cut": 8, "batch": 60, "forward": 60, "backward": 60,
          "in a collective": 150}  # how often a run comes by


def drawn(seed):
    """How many ranks, and who dies where: [rank, point, count]."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    deaths = []
    for rank in draw.sample(range(ranks), draw.randint(1, ranks - 1)):
        point = draw.choice(list(POINTS)[:4] * 3 + list(POINTS)[4:])
        deaths.append([rank, point, draw.randint(1, POINTS[point])])
    return ranks, deaths


def run_in(folder, ranks, deaths=None):
    """The script in this folder, cut to a third."""
    return Run(Path(folder), "--quiet", "-n", ranks, "--prune", "1/3", SCRIPT, deaths=deaths, limit=120,
               OARS_DIGEST="1")


def undisturbed(known=[]):  # noqa: B006 (once is enough)
    """What one rank prints."""
    if not known:
        with tempfile.TemporaryDirectory() as folder:
            known.append(run_in(folder, 1).lines)
    return known[0]


def unlike(lines, expected):
    """Where lines differ by more than rounding: a sample may cross the border of the classes."""
    for line, other in itertools.zip_longest(lines, expected, fillvalue=""):
        words, others = line.split(), other.split()
        if len(words) != len(others) or any(a != b and not ("." in a and abs(float(a.strip(",")) - float(
                b.strip(","))) < 0.01) for a, b in zip(words, others, strict=True)):
            return f"{line!r} instead of {other!r}"
    return ""


def wrong_with(seed, folder):
    """Run a seed; what was not as it must be, or an empty string."""
    ranks, deaths = drawn(seed)
    run = run_in(folder, ranks, deaths)
    if run.code:
        return f"exit code {run.code}: {run.err[-1500:]}"
    if told := unlike(run.lines, undisturbed()):
        return told
    lost = {rank for event in run.events("lost") for rank in event["ranks"]}
    if not lost <= {rank for rank, _, _ in deaths}:
        return f"ranks {lost} were called lost, of {deaths}"
    if len({text for rank, text in run.digests().items() if rank not in lost}) != 1:
        return "the survivors' weights differ"
    cuts = {event["cut"] for event in run.events("cut")}
    return "" if cuts == set(range(1, 9)) else f"cuts {sorted(cuts)} instead of 8"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, help="only this one")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.runs)
    failed = []
    for seed in seeds:
        folder = tempfile.mkdtemp(prefix="cuts-")
        if wrong := wrong_with(seed, folder):
            failed.append(seed)
            print(f"seed {seed}: {drawn(seed)}\n  {wrong}\n  kept in {folder}", flush=True)
            continue
        shutil.rmtree(folder)
        print(".", end="", flush=True)
    print(f"\n{len(seeds) - len(failed)} survived, {len(failed)} not" + (f": seeds {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
