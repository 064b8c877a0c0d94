"""Predictions from runs on one and two ranks, against what more ranks really take on this machine.

    python bench/predict.py

Measures the machine (`oars doctor --net`), runs each net on one and two ranks, predicts 4, 8 and 16 ranks as far as
there are cores, then runs those too. Every rank has one thread. Rounds are repeated and interleaved; times are medians.
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

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
from oars.watch.machine import read  # noqa: E402
from oars.watch.predict import point  # noqa: E402
from oars.watch.simulate import Sync  # noqa: E402
from oars.watch.workload import from_runs, look  # noqa: E402

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
GOAL = 0.10
# net: samples of a rank (weak scaling; strong has sixteen times as many in all), steps with many and with few samples
NETS = {"cnn": (32, 14, 50), "resnet18": (4, 12, 30)}


def oars(folder, *words):
    """An oars command, one thread a rank, on cores only."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "oars", *words], cwd=folder, env=env, capture_output=True, text=True,
                          timeout=300)
    if done.returncode:
        sys.exit(f"oars {' '.join(words)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


def train(folder, net, ranks, batch, steps, weak, number):
    """A training; what its folder tells."""
    name = f"{net}-{'weak' if weak else 'strong'}-n{ranks}-b{batch}-{number}"
    began = time.perf_counter()
    oars(folder, "run", "--quiet", "--name", name, "-n", str(ranks), "--batch", "keep" if weak else "split",
         "--local-batchnorm", "--snapshot", "off", str(HERE / "train.py"), "--net", net, "--batch", str(batch),
         "--samples", str(256 * NETS[net][0]), "--warmup", "2", "--steps", str(steps))
    from oars.watch.runs import Run

    seen = look(Run(folder / "oars-runs" / name))
    print(f"{name}: {1000 * seen.seconds:.4g} ms a step, {time.perf_counter() - began:.1f} s in all", file=sys.stderr)
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", default=",".join(NETS), help="which (default: all)")
    parser.add_argument("--scaling", choices=("strong", "weak"), help="only this (default: both)")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of runs (default: 2)")
    parser.add_argument("--machine", metavar="FILE", help="take this instead of measuring the machine")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs and machine.toml there")
    parser.add_argument("--json", metavar="FILE", help="keep the table's figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as top:
        folder = Path(args.keep or top)
        folder.mkdir(parents=True, exist_ok=True)
        if not args.machine:
            print(oars(folder, "doctor", "--net", "machine.toml"))
        machine, rows = read(Path(args.machine or folder / "machine.toml")), []
        for net in args.nets.split(","):
            kinds = [kind for kind in ("weak", "strong") if args.scaling in (None, kind)]
            rows += measure(folder, net, machine, args.repeats, kinds)
    show(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    met = sum(abs(row["predicted"] / row["measured"] - 1) <= GOAL for row in rows)
    print(f"{met} of {len(rows)} within {100 * GOAL:.0f} %")


def measure(folder, net, machine, repeats, kinds):
    """Predict and measure one net."""
    each, many, few = NETS[net]
    counts = [n for n in (4, 8, 16) if n <= CORES]
    base, more = {kind: [] for kind in kinds}, {}
    for number in range(repeats):
        small = train(folder, net, 1, each, few, False, number)
        for kind in kinds:
            weak, batch, steps = (True, each, few) if kind == "weak" else (False, 16 * each, many)
            large = [] if weak else [train(folder, net, 1, batch, steps, False, number)]
            base[kind] += [*large, small, train(folder, net, 2, batch, steps, weak, number)]
            for n in counts:
                more.setdefault((kind, n), []).append(
                    train(folder, net, n, batch, max(steps, few // 2), weak, number))
    rows = []
    for kind in kinds:
        load = from_runs(base[kind], machine)
        for n in counts:
            told, seen = point(load, machine, n, Sync(), kind == "weak"), more[kind, n]
            rows.append({"net": net, "kind": kind, "ranks": n, "predicted": told.seconds, "low": told.low,
                         "high": told.high, "efficiency": told.efficiency,
                         "measured": statistics.median(one.seconds for one in seen),
                         "busy": statistics.median(one.busy for one in seen)})
    return rows


def show(rows):
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.title = f"{CORES} cores: predicted from one and two ranks, and measured"
    for column in ("net", "scaling", "ranks", "predicted", "80 % band", "measured", "off by", "goal"):
        table.add_column(column, justify="left" if column in ("net", "scaling") else "right")
    for row in rows:
        off = row["predicted"] / row["measured"] - 1
        table.add_row(row["net"], row["kind"], str(row["ranks"]), f"{1000 * row['predicted']:.4g} ms",
                      f"{1000 * row['low']:.4g} to {1000 * row['high']:.4g}", f"{1000 * row['measured']:.4g} ms",
                      f"{100 * off:+.1f} %", "met" if abs(off) <= GOAL else "missed")
    Console(width=120, highlight=False).print(table)


if __name__ == "__main__":
    main()
