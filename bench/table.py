"""Measures `oars run` against its neighbours, side by side, and prints one table.

    python bench/table.py                    # everything this machine can show (about 20 minutes on 2 cores)
    python bench/table.py --quick            # a smoke run: few repeats, the small nets
    python bench/table.py --only ddp --json raw.json

Every figure is a ratio. The two sides take turns, each time in a fresh group of processes; a pair of neighbouring runs
gives one ratio, and the table shows the median of these with the quarter below and above it. What else runs on the
machine then weighs on both sides alike. Where a hundredth is looked for (`one`), the two of a pair are alive together
and take turns of two seconds, one stopped while the other runs: a machine's speed varies more between two minutes.
"""

import argparse
import json
import os
import signal
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
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
PLAIN = [sys.executable, str(HERE / "train.py")]
DDP = [sys.executable, str(HERE / "train_ddp.py")]
NO_EXCHANGE = [sys.executable, str(HERE / "no_exchange.py")]
PARTS = ("ddp", "one", "scaling", "gpu")

# net: global batch, steps before the clock starts, timed steps; a run takes a few seconds on two cores
SIZES = {"cnn": (64, 5, 24), "mlp400": (64, 5, 40), "resnet18": (16, 2, 4)}
# The same where a hundredth is looked for: some twelve seconds, two dozen turns.
LONG = {"cnn": (64, 5, 280), "mlp400": (64, 5, 700), "resnet18": (16, 2, 33)}
TURN = 0.5  # seconds
# The same for strong scaling, where sixteen ranks want rows to share.
SCALING = {"cnn": (256, 2, 8), "resnet18": (64, 2, 4)}


def oars(n, *options):
    """The command line of a run on n ranks, up to the script's arguments."""
    return [sys.executable, "-m", "oars", "run", "--quiet", "-n", str(n), *options, str(HERE / "train.py")]


def work(net, sizes=SIZES, **more):
    """A training's arguments."""
    args = {"net": net, **dict(zip(("batch", "warmup", "steps"), sizes[net], strict=True)), **more}
    return [word for key, value in args.items() for word in (f"--{key}", str(value))]


class Failed(Exception):
    """A run that gave no result."""


class Run:
    """A training in a folder of its own."""

    def __init__(self, command, threads, settings=None):
        source = os.pathsep.join(p for p in (str(HERE.parent / "src"), os.environ.get("PYTHONPATH")) if p)
        env = {**os.environ, "PYTHONPATH": source, **(settings or {})}
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        if "cuda" not in command:
            env["CUDA_VISIBLE_DEVICES"] = ""  # ranks on cores, also where there is a GPU
        self.folder = tempfile.TemporaryDirectory()
        self.began = time.perf_counter()
        self.process = subprocess.Popen(command, cwd=self.folder.name, env=env, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def going(self):
        """Whether it has not ended."""
        return self.process.poll() is None

    def send(self, number):
        """Send a signal to all its processes, the eldest first."""
        for pid in family(self.process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def result(self):
        """What it says of itself, its wall time, what the run folder adds."""
        with self.folder as folder:
            out, err = self.process.communicate(timeout=600)
            wall = time.perf_counter() - self.began
            lines = [line for line in out.splitlines() if line.startswith("{")]
            if self.process.returncode or not lines:
                raise Failed(f"{' '.join(self.process.args)}\n{out[-500:]}{err[-2000:]}")
            result = {**json.loads(lines[-1]), "wall": wall}
            shares = [
                json.loads(line).get("exchange_share")
                for metrics in Path(folder).glob("oars-runs/*/metrics.jsonl")
                for line in metrics.read_text().splitlines()
            ]
            shares = [s for s in shares[2:] if s is not None]
            if shares:
                result["exchange_share"] = statistics.median(shares)
            return result


def family(pid):
    """A process and all that came from it."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += task.read_text().split()
        except OSError:  # it has ended
            pass
    return [pid, *(p for child in children for p in family(int(child)))]


def alternate(sides, repeats):
    """Run the sides in turn, `repeats` times, changing who goes first; a list of results for each."""
    results = [[] for _ in sides]
    for i in range(repeats):
        order = range(len(sides)) if i % 2 == 0 else reversed(range(len(sides)))
        for k in order:
            results[k].append(Run(*sides[k]).result())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def take_turns(sides, repeats):
    """The same with the sides of a repeat alive together: while one runs, the others are stopped."""
    results = [[] for _ in sides]
    for i in range(repeats):
        order = [*range(len(sides))] if i % 2 == 0 else [*reversed(range(len(sides)))]
        runs = {k: Run(*sides[k]) for k in order}
        try:
            while len(going := [k for k in order if runs[k].going()]) > 1:
                for k in going:
                    for other in going:
                        runs[other].send(signal.SIGCONT if other == k else signal.SIGSTOP)
                    time.sleep(TURN)
        finally:
            for run in runs.values():
                run.send(signal.SIGCONT)
        for k in order:
            results[k].append(runs[k].result())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def quartiles(values):
    """First quarter, median, third quarter; of few values, the extremes."""
    if len(values) < 4:
        return min(values), statistics.median(values), max(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Report:
    """Collects rows for the table, and the raw results for a file."""

    def __init__(self):
        self.rows, self.raw, self.missed = [], {}, 0

    def pair(self, name, sides, repeats, goal, take=alternate, **more):
        """Measure two sides and add the row: their ratio (or difference in seconds) against the goal."""
        if results := self.measure(name, sides, repeats, take):
            self.row(name, *results, goal, **more)

    def measure(self, name, sides, repeats, take):
        """The sides' results; None, with a row that says so, if one failed."""
        print(f"{name} ", end="", file=sys.stderr, flush=True)
        try:
            return take(sides, repeats)
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"\n{error}", file=sys.stderr)
            self.rows.append((name, *"-----", "failed", ""))
            self.missed += 1
            return None

    def row(self, name, ours, theirs, goal=None, key="step", difference=False, note=None):
        """Add a row of two sides' results; without a goal it is there to compare others with."""
        self.raw[name] = {"ours": ours, "theirs": theirs}
        pairs = zip(ours, theirs, strict=True)
        figures = [a[key] - b[key] if difference else a[key] / b[key] for a, b in pairs]
        low, middle, high = quartiles(figures)
        missed = goal is not None and middle > goal
        self.missed += missed
        a, b = (statistics.median(r[key] for r in side) for side in (ours, theirs))
        scale, unit = (1, "s") if key == "wall" else (1000, "ms")
        self.rows.append(
            (
                name,
                f"{a * scale:.4g} {unit}",
                f"{b * scale:.4g} {unit}",
                f"{middle:.3f}{' s' if difference else ''}",
                f"{low:.3f} to {high:.3f}",
                "" if goal is None else f"≤ {goal:.2f}{' s' if difference else ''}",
                "" if goal is None else "missed" if missed else "met",
                note(ours) if note else "",
            )
        )

    def show(self, repeats):
        """Print the table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.title = f"{CORES} cores, medians of {repeats} interleaved repeats, quarters in between"
        for column in ("what", "oars", "against", "ratio", "spread", "goal", "", "exchange"):
            table.add_column(column, justify="left" if column in ("what", "exchange") else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        Console(width=160, highlight=False).print(table)


def copy_speed():
    """Bytes per second of a plain copy with all cores, the median of nine."""
    import torch

    a, b = torch.ones(1 << 24), torch.ones(1 << 24)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        b.copy_(a)
        times.append(time.perf_counter() - began)
    return a.numel() * 4 / statistics.median(times)


def exchange_note(n, bus):
    """Says what share of the step the exchange took, and how its speed compares to a copy of the same gradients."""

    def note(ours):
        shares = [r["exchange_share"] for r in ours if "exchange_share" in r]
        if not shares:
            return ""
        share, step = statistics.median(shares), statistics.median(r["step"] for r in ours)
        if share * step < 1e-6:
            return f"{100 * share:.0f} %"
        # Every rank's gradients are read and the sum is written back: n times the gradients' size goes by.
        speed = n * ours[0]["gradient_bytes"] / (share * step)
        return f"{100 * share:.0f} %, {speed / 1e9:.2f} GB/s ({100 * speed / bus:.0f} % of a copy)"

    return note


def against_ddp(report, repeats, quick, bus):
    """Step time on 2 and 4 ranks against the same training written by hand for DDP over Gloo."""
    for net in ("cnn", "mlp400") if quick else ("cnn", "mlp400", "resnet18"):
        for n in (2,) if quick else (2, 4):
            threads = max(1, CORES // n)
            ddp = ([*DDP, "-n", str(n), *work(net)], threads)
            name = f"{net}, {n} ranks, against DDP"
            report.pair(name, [([*oars(n), *work(net)], threads), ddp], repeats, 1.0, note=exchange_note(n, bus))
            if net == "resnet18":
                # DDP's BatchNorm looks at each rank's rows alone; ours, by default, at the whole batch.
                local = ([*oars(n, "--local-batchnorm"), *work(net)], threads)
                name = f"{net}, {n} ranks, local BatchNorm, against DDP"
                report.pair(name, [local, ddp], repeats, 1.0, note=exchange_note(n, bus))


def one_rank(report, repeats, quick):
    """`oars run -n 1` against plain python: the step, and what starting adds."""
    for net in ("cnn",) if quick else ("cnn", "mlp400"):
        python = ([*PLAIN, *work(net, LONG)], CORES)
        sides = [([*oars(1), *work(net, LONG)], CORES), python, python]
        if results := report.measure(f"{net}, 1 rank, against python", sides, repeats, take_turns):
            ours, theirs, again = results
            report.row(f"{net}, 1 rank, against python", ours, theirs, 1.01)
            report.row(f"{net}, python against itself", again, theirs)  # what the machine can tell apart
    nothing = work("cnn", steps=1, warmup=0)
    sides = [([*oars(1), *nothing], CORES), ([*PLAIN, *nothing], CORES)]
    report.pair("start-up, 1 rank, added to python's", sides, repeats, 0.5, key="wall", difference=True)


def scaling(report, repeats, quick):
    """Strong scaling, one thread a rank: the same global batch on more and more ranks. Prints its own table."""
    counts = [n for n in (1, 2, 4, 8, 16) if n <= min(16, CORES)]
    for net in ("cnn",) if quick or CORES < 8 else ("cnn", "resnet18"):
        print(f"scaling of {net} ", end="", file=sys.stderr, flush=True)
        args = work(net, SCALING)
        sides = [([*PLAIN, *args], 1)]
        sides += [([*oars(n), *args], 1) for n in counts]
        sides += [([*other, "-n", str(n), *args], 1) for other in (DDP, NO_EXCHANGE) for n in counts[1:]]
        try:
            results = alternate(sides, repeats)
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"\n{error}", file=sys.stderr)
            report.missed += 1
            continue
        report.raw[f"scaling {net}"] = results
        base = [r["step"] for r in results[0]]

        def efficiency(n, runs, base=base):
            low, middle, high = quartiles([b / (n * r["step"]) for b, r in zip(base, runs, strict=True)])
            return f"{middle:.2f} ({low:.2f} to {high:.2f})"

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.title = f"{net}: strong scaling against one process, one thread a rank, global batch {SCALING[net][0]}"
        for column in ("ranks", "step", "efficiency", "DDP's", "of as many that never talk"):
            table.add_column(column, justify="right")
        for i, n in enumerate(counts):
            runs = results[1 + i]
            step = statistics.median(r["step"] for r in runs)
            theirs = [efficiency(n, results[i + k * (len(counts) - 1) + 1]) if n > 1 else "" for k in (1, 2)]
            table.add_row(str(n), f"{1000 * step:.4g} ms", efficiency(n, runs), *theirs)
        Console(width=110, highlight=False).print(table)


def gpu(report, repeats, quick):
    """One rank on a GPU against plain python: eager and compiled, bf16, channels last."""
    try:
        import torchvision  # noqa: F401

        net, batch = "inception", 256
    except Exception:
        net, batch = "resnet50", 128
    common = ["--net", net, "--batch", str(batch), "--steps", "8" if quick else "20"]
    common += ["--device", "cuda", "--bf16", "--channels-last"]
    for kind, extra in (("eager", ["--warmup", "8"]), ("compiled", ["--warmup", "8", "--compile"])):
        print(f"{time.strftime('%H:%M:%S')} ", end="", file=sys.stderr)
        sides = [([*oars(1), *common, *extra], None), ([*PLAIN, *common, *extra], None)]
        report.pair(f"{net} on the GPU, {kind}, bf16, 1 rank, against python", sides, repeats, 1.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two repeats of the small nets, to see that it works")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part (may be repeated)")
    parser.add_argument("--repeats", type=int, help="pairs of runs for each figure (default 7; 2 with --quick)")
    parser.add_argument("--json", metavar="FILE", help="keep every single result")
    args = parser.parse_args()
    repeats = args.repeats or (2 if args.quick else 7)

    import torch

    has_gpu = torch.cuda.is_available()
    parts = args.only or [p for p in PARTS if p != "gpu" or has_gpu]
    report = Report()
    bus = copy_speed()
    print(f"{CORES} cores; a plain copy moves {bus / 1e9:.1f} GB/s; torch {torch.__version__}")
    if "ddp" in parts:
        against_ddp(report, repeats, args.quick, bus)
    if "one" in parts:
        one_rank(report, repeats, args.quick)
    if "gpu" in parts and has_gpu:
        gpu(report, repeats, args.quick)
    if report.rows:
        report.show(repeats)
    if "scaling" in parts:
        scaling(report, repeats, args.quick)
    if args.json:
        host = {"cores": CORES, "torch": torch.__version__, "copy_bytes_per_s": bus, "gpu": has_gpu}
        Path(args.json).write_text(json.dumps({"machine": host, "repeats": repeats, "runs": report.raw}, indent=1))
    if report.missed:
        print(f"{report.missed} goal{'s' * (report.missed > 1)} missed")


if __name__ == "__main__":
    main()
