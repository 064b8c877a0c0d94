"""Measures the ways in which ranks keep together (docs/sync.md), side by side, and prints a table for each question.

    python bench/sync.py                         # all of it, on 2 ranks
    python bench/sync.py straggler -n 4          # one rank is slowed four times: what is left of the speed
    python bench/sync.py accuracy --seeds 5      # held-out accuracy after the same epochs
    python bench/sync.py wires                   # bytes that the first rank gives MPI to send, and the accuracy
    python bench/sync.py servers -n 4            # samples a second by workers and servers, up to 4 ranks in all

The straggler is real: a process beside the run stops its last rank, or the last that trains, for three quarters of
every 40 ms. With --sync server one of the ranks is the server.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "examples" / "digits_cnn.py"
MODES = {
    "allreduce": [],
    "local, K = 8": ["--sync", "local"],
    "local, K = 16, Nesterov": ["--sync", "local", "--every", "16", "--outer", "nesterov"],
    "gossip": ["--sync", "gossip"],
    "server": ["--sync", "server"],
}
WIRES = ("bf16", "int8", "topk:0.01", "powersgd:4")


class Slowed:
    """While in this block a rank is stopped for three quarters of the time."""

    def __init__(self, pid_file: Path) -> None:
        self.pid_file, self.over = pid_file, threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def work(self) -> None:
        while not self.pid_file.exists() and not self.over.wait(0.01):
            pass
        while not self.over.is_set():
            try:
                pid = int(self.pid_file.read_text())
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.03)
                os.kill(pid, signal.SIGCONT)
            except (OSError, ValueError):  # it has ended
                return
            time.sleep(0.01)


def train(ranks, options, *words, slowed=False):
    """Run the digits CNN: its accuracy, and what the run folder tells."""
    source = os.pathsep.join(p for p in (str(HERE.parent / "src"), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "oars-runs", "it")
        command = [sys.executable, "-m", "oars", "run", "--quiet", "--name", "it", "-n", str(ranks), *options,
                   str(SCRIPT), *map(str, words)]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        if slowed:
            with Slowed(run / f"pid-{ranks - 1 - ('server' in options)}"):
                out, err = process.communicate(timeout=900)
        else:
            out, err = process.communicate(timeout=900)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}\n{out[-500:]}{err[-2000:]}")
        accuracy = next(float(line.split()[1]) for line in out.splitlines() if line.startswith("accuracy"))
        summary = json.loads((run / "summary.json").read_text())
        return {"accuracy": accuracy, **summary}


def straggler(args):
    """Samples a second with a slow rank, of those without."""
    print(f"\none of {args.n} ranks slowed four times: samples/s without, with, share")
    work = ["--images", args.images, "--epochs", args.epochs]
    for name, options in MODES.items():
        whole = train(args.n, options, *work)["samples_per_s"]
        slow = train(args.n, options, *work, slowed=True)["samples_per_s"]
        print(f"{name:<26}{whole:>8.0f}{slow:>8.0f}{100 * slow / whole:>6.0f} %", flush=True)


def accuracy(args):
    """Held-out accuracy after the same epochs, over seeds."""
    print(f"\naccuracy on {args.n} ranks, {args.epochs} epochs of {args.images} images, {args.seeds} seeds: mean, "
          "spread, points from allreduce")
    base = None
    for name, options in MODES.items():
        found = [train(args.n, options, "--images", args.images, "--epochs", args.epochs, "--seed", seed)["accuracy"]
                 for seed in range(1, args.seeds + 1)]
        mean = statistics.mean(found)
        base = mean if base is None else base
        print(f"{name:<26}{mean:>8.2f}{max(found) - min(found):>7.2f}{mean - base:>+7.2f}", flush=True)


def wires(args):
    """Bytes given to MPI and accuracy, for each wire."""
    print(f"\nwires on {args.n} ranks: MB sent by the first, accuracy; between hosts fp32 would send the gradients too")
    for name, options in (("allreduce", []), ("local, K = 8", ["--sync", "local"])):
        for wire in WIRES:
            told = train(args.n, [*options, "--wire", wire], "--images", args.images, "--epochs", args.epochs)
            print(f"{name:<16}{wire:<12}{told['sent_bytes'] / 1e6:>9.2f}{told['accuracy']:>8.2f}", flush=True)


def servers(args):
    """Samples a second of so many workers with so many servers."""
    print("\nsamples/s of workers with servers")
    work = ["--images", args.images, "--epochs", args.epochs]
    for held in (1, 2, 4):
        for workers in (1, 2, 4, 8):
            if workers + held <= args.n:
                told = train(workers + held, ["--sync", "server", "--servers", str(held)], *work)
                print(f"{workers} workers, {held} servers {told['samples_per_s']:>8.0f}", flush=True)


PARTS = {"straggler": straggler, "accuracy": accuracy, "wires": wires, "servers": servers}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS))
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=3000)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    for name in args.parts or PARTS:
        PARTS[name](args)


if __name__ == "__main__":
    main()
