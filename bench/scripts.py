"""Scripts that read like public ones, at their own sizes: `python` on one core against `oars run`.

    python bench/scripts.py                          # all, five turns (about 40 minutes on 2 cores)
    python bench/scripts.py --only vae gan --turns 7
    python bench/scripts.py --look                   # three steps of each, once: do all run?

The sides take turns, each in fresh processes. A run gives the steady step (the median of its later half), the first
100 steps (over 100 steady ones of the same run) and the start-up (from the command to the first step). Tables show
medians over the turns, with the smallest and the largest ratio. Scripts of Keras are run on every backend.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIRST = 100
# name: (script, steps, environment)
SCRIPTS = {
    **{name: (name, 400, {}) for name in ("softmax", "mlp", "vae", "gan", "ppo", "keras_loop", "tf1_session")},
    **{name: (name, 160, {}) for name in ("cnn", "rnn", "seqfirst", "bert", "nanogpt", "unet", "contrastive")},
    "siamese": ("siamese", 120, {}),
    "cells": ("cells", 120, {}),
    **{f"keras_fit ({backend})": ("keras_fit", 160, {"KERAS_BACKEND": backend})
       for backend in ("torch", "tensorflow", "jax")},
}


def marks(command, settings):
    """When each step of a run began, from its start, in seconds."""
    source = os.pathsep.join(p for p in (str(HERE.parent / "src"), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3",
           "PYTHONPATH": source, **settings}
    with tempfile.TemporaryDirectory() as folder:
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, timeout=1200)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"marks"')]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-3000:]}")
    return [mark - began for mark in json.loads(lines[-1])["marks"]]


def figures(times):
    """Start-up, the steady step, and the first steps over as many steady ones."""
    steps = [b - a for a, b in zip(times, times[1:], strict=False)]
    steady = statistics.median(steps[len(steps) // 2:])
    first = min(FIRST, len(steps))
    return {"start": times[0], "step": steady, "first": (times[first] - times[0]) / (first * steady)}


def measured(name, sides, turns, steps):
    """A list of figures for each side."""
    script, usual, settings = SCRIPTS[name]
    words = [str(HERE / "scripts" / f"{script}.py"), str(steps or usual)]
    results = [[] for _ in sides]
    for turn in range(turns):
        for k in range(len(sides))[:: 1 if turn % 2 == 0 else -1]:
            results[k].append(figures(marks([*sides[k], *words], settings)))
            print(".", end="", file=sys.stderr, flush=True)
    return results


def row(name, plain, ranks):
    """A line of the table."""
    ratios = [b["step"] / a["step"] for a, b in zip(plain, ranks, strict=True)]
    def middle(side, what):
        return statistics.median(result[what] for result in side)
    return (f"| {name} | {middle(plain, 'step') * 1e3:.2f} ms | {middle(ranks, 'step') * 1e3:.2f} ms "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} "
            f"| {middle(plain, 'first'):.2f} | {middle(ranks, 'first'):.2f} "
            f"| {middle(plain, 'start'):.1f} s | {middle(ranks, 'start'):.1f} s |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--look", action="store_true", help="three steps of each, once")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    sides = [sys.executable], [sys.executable, "-m", "oars", "run", "--quiet", "-n", str(args.n)]
    print("| script | python | ranks | ratio | spread | first 100, python | first 100, ranks | start-up, python "
          "| start-up, ranks |\n|---|---|---|---|---|---|---|---|---|")
    raw = {}
    for name in args.only:
        raw[name] = measured(name, sides, 1 if args.look else args.turns, 3 if args.look else 0)
        print(row(name, *raw[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
