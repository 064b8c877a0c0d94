"""What cutting networks and leaving out samples is worth, beside tuned controls: the tables of docs/evolve.md.

    make bench-evolve                        # all tables, 3 seeds: some hours of CPU time
    make bench-evolve ARGS="--tables A --seeds 0"

Every comparison has a control with a learning rate of its own, at which it is best. Times are CPU times of one rank, as
ratios of runs that are made one after the other.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[1]
HIGGS, DIGITS = ROOT / "examples" / "higgs" / "higgs.py", ROOT / "bench" / "evolve_digits.py"
PLACE = Path("bench-evolve")


def oars(*words):
    """One command, in the bench's folder; what it prints."""
    done = subprocess.run([sys.executable, "-m", "oars", *map(str, words)], cwd=PLACE, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{words}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")
    return done.stdout


def spent(run, batch):
    """Multiply-adds of a run's training: three times the forward's (the backward takes two), in units of 1e9."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = run / "events.jsonl"
    events = map(json.loads, told.read_text().splitlines() if told.exists() else ())
    cuts = [event for event in events if event["event"] in ("cut", "widened")]
    total, at = 0.0, 0
    for cut in cuts:
        total += (cut["step"] - at) * cut["operations_before"]
        at = cut["step"]
    return 3e-9 * batch * (total + (len(lines) - at) * cuts[-1]["operations"]) if cuts else None


def name_of(label, seed):
    """The run of a line with one seed."""
    return re.sub(r"[^\w.-]+", "-", f"{label}-{seed}")


def cutting(label, seed):
    """Milliseconds that a run has spent in its cuts."""
    events = map(json.loads, (PLACE / "oars-runs" / name_of(label, seed) / "events.jsonl").read_text().splitlines())
    return sum(event["milliseconds"] for event in events if event["event"] == "cut")


def arm(label, script, seeds, options=(), words=(), batch=256):
    """One line of a table: the script with each seed; a run that is there already is not made again."""
    found = []
    for seed in seeds:
        name = name_of(label, seed)
        folder = PLACE / "oars-runs" / name
        if not (folder / "end.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            oars("run", "-n", 1, "--quiet", "--snapshot", "off", "--name", name, *options, script, *words, "--seed",
                 seed)
        log = (folder / "rank-0.log").read_text()
        score = float(re.findall(r"(?:auc|accuracy) ([\d.]+)", log)[-1])
        parameters, seconds = re.search(r"(\d+) parameters, ([\d.]+) s of CPU", log).groups()
        found.append((score, spent(folder, batch), int(parameters), float(seconds)))
    scores = [f[0] for f in found]
    operations = [f[1] for f in found if f[1] is not None]
    line = {"scores": scores, "score": mean(scores), "sd": stdev(scores) if len(scores) > 1 else 0.0,
            "gmac": mean(operations) if operations else None, "parameters": found[0][2],
            "seconds": mean(f[3] for f in found)}
    gmac = f"{line['gmac']:7.0f}" if line["gmac"] else "      -"
    print(f"{label:38} {line['score']:.4f} ({line['sd']:.4f}) {gmac} GMAC {line['parameters']:8,} parameters "
          f"{line['seconds']:7.1f} s", flush=True)
    return line


def reached(what, true):
    """One of the numbers to reach."""
    print(f"  {'reached' if true else 'MISSED '}: {what}", flush=True)


def dense(width):
    """GMAC of a fixed network on table A's data: 10 epochs of 390 steps of 256."""
    return 3e-9 * 256 * 390 * 10 * (21 * width + 2 * width * width + width)


def table_a(seeds):
    """Cutting the network of HIGGS."""
    print("\nA. Higgs-like, 384 x 3, 10 epochs")
    full = arm("fixed 384", HIGGS, seeds)
    cuts = {score: arm(f"cut to 128 by {score}", HIGGS, seeds, ("--prune", "1/3", "--prune-score", score))
            for score in ("wv", "w", "random")}
    small = arm("fixed 128, rate 4e-3", HIGGS, seeds, (), ("--width", 128))
    tuned = arm("fixed 128, rate 8e-3", HIGGS, seeds, (), ("--width", 128, "--rate", 8e-3))
    best = max(small["score"], tuned["score"])
    for score in ("wv", "w"):
        cut = cuts[score]
        reached(f"{score}: AUC {cut['score']:.4f} >= fixed 384 - .0005 = {full['score'] - .0005:.4f}",
                cut["score"] >= full["score"] - .0005)
        reached(f"{score}: AUC {cut['score']:.4f} >= tuned fixed 128 + .0008 = {best + .0008:.4f}",
                cut["score"] >= best + .0008)
    cut = cuts["wv"]
    reached(f"{dense(384) / cut['gmac']:.2f} times fewer multiply-adds, of 4.3", dense(384) / cut["gmac"] >= 4.3)
    reached(f"{full['parameters'] / cut['parameters']:.2f} times fewer parameters, of 8.4",
            full["parameters"] / cut["parameters"] >= 8.4)
    reached(f"{full['seconds'] / cut['seconds']:.2f} times less CPU time, of 3", full["seconds"] / cut["seconds"] >= 3)
    slowest = max(cutting("cut to 128 by wv", seed) for seed in seeds)
    reached(f"eight cuts take {slowest:.0f} ms, of 50", slowest < 50)


def table_b(seeds):
    """Cutting a convolutional network."""
    print("\nB. Noisy digits, conv 32 - conv 64 - dense 128, 8 epochs")
    when = ("--prune-when", "0.8..3.2passes")
    full = arm("whole", DIGITS, seeds, batch=64)
    cut = arm("cut to 1/4 by wv", DIGITS, seeds, ("--prune", "1/4", *when), batch=64)
    drawn = arm("cut to 1/4 at random", DIGITS, seeds, ("--prune", "1/4", *when, "--prune-score", "random"), batch=64)
    scratch = arm("1/4 from the beginning", DIGITS, seeds, (), ("--part", 0.25), batch=64)
    reached(f"{cut['score']:.4f} >= whole - .006 = {full['score'] - .006:.4f}", cut["score"] >= full["score"] - .006)
    reached(f"{cut['score']:.4f} >= from the beginning + .015 = {scratch['score'] + .015:.4f}",
            cut["score"] >= scratch["score"] + .015)
    ratio = full["seconds"] / cut["seconds"]
    reached(f"{ratio:.2f} times less CPU time, of 2.2", ratio >= 2.2)
    reached(f"at random {drawn['score']:.4f} >= .90", drawn["score"] >= .90)


def table_c(seeds):
    """Widths found in one run, beside a sweep."""
    print("\nC. Higgs-like, widths from 48 to 384")
    sweep = [arm(f"fixed {width}", HIGGS, seeds, (), ("--width", width)) for width in (48, 96, 128, 192, 256, 384)]
    cost = sum(dense(width) for width in (48, 96, 128, 192, 256, 384))
    best = max(line["score"] for line in sweep)
    grown = arm("48, widened to 384, cut to 128", HIGGS, seeds, ("--widen", "*=384", "--prune", "1/3"), ("--width", 48))
    reached(f"{grown['score']:.4f} >= the sweep's best - .001 = {best - .001:.4f}", grown["score"] >= best - .001)
    reached(f"{grown['gmac'] / cost:.1%} of the sweep's multiply-adds, of 15 %", grown["gmac"] / cost <= .15)


def table_d(seeds):
    """Leaving samples out, at equal compute: thinning reads about three quarters of what its epochs have."""
    print("\nD. Higgs-like, 128 x 3, rate 8e-3, the compute of 5 epochs")
    words = ("--width", 128, "--rate", 8e-3)
    uniform = arm("uniform, 5 epochs", HIGGS, seeds, (), (*words, "--epochs", 5))
    thin = arm("thin, 7 epochs", HIGGS, seeds, ("--samples", "thin", "--of-run", 7 * 390), (*words, "--epochs", 7))
    less = arm("RS2, 7 epochs of other rows each", HIGGS, seeds, (), (*words, "--epochs", 7, "--share", 5 / 7))
    smaller = arm("RS2, smaller batches", HIGGS, seeds, (), (*words, "--epochs", 7, "--share", 5 / 7, "--batch", 183))
    wrong = ("--wrong", 0.1)
    uniform_wrong = arm("uniform, 10 % wrong labels", HIGGS, seeds, (), (*words, "--epochs", 5, *wrong))
    thin_wrong = arm("thin, 10 % wrong labels", HIGGS, seeds, ("--samples", "thin", "--of-run", 7 * 390),
                     (*words, "--epochs", 7, *wrong))
    better = sum(a > b for a, b in zip(thin["scores"], uniform["scores"], strict=True))
    reached(f"above uniform in {better} of {len(seeds)} seeds", better * 3 >= 2 * len(seeds))
    for other in (less, smaller):
        reached(f"{thin['score']:.4f} above random subsets' {other['score']:.4f}", thin["score"] > other["score"])
    reached(f"with wrong labels {thin_wrong['score']:.4f} >= uniform - .001 = {uniform_wrong['score'] - .001:.4f}",
            thin_wrong["score"] >= uniform_wrong["score"] - .001)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default="ABCD")
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    PLACE.mkdir(exist_ok=True)
    if not (PLACE / "higgs").exists():
        oars("data", "make", "higgs-like", "higgs", "--size", 200_000)
    if not (PLACE / "digits").exists():
        oars("data", "make", "digits", "digits", "--size", 12_000)
    for name in args.tables:
        {"A": table_a, "B": table_b, "C": table_c, "D": table_d}[name](seeds)


if __name__ == "__main__":
    main()
