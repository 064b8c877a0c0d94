"""Measures the ways in which ranks keep together (docs/sync.md), side by side, and prints a table for each question.

    python bench/sync.py                         # all of it, in ten minutes on 16 cores
    python bench/sync.py straggler               # one of 4 ranks is slowed four times: what is left of the speed
    python bench/sync.py cost --upto 8           # the exchange's time in a step, on 2, 4 and 8 ranks
    python bench/sync.py servers --upto 8        # samples a second by workers and servers, up to 8 ranks in all
    python bench/sync.py accuracy --seeds 5      # held-out accuracy after the same epochs, on 4 and 8 ranks
    python bench/sync.py straggler --wait 10 --batch 64    # the same where there are fewer cores than ranks
    python bench/sync.py moved                   # how far the weights move in all, where that is known beforehand
    python bench/sync.py wires                   # bytes that the first rank gives MPI to send, and the accuracy

The straggler is real: a process beside the run stops its last rank, or the last that trains, for three quarters of
every 40 ms. With --sync server one more rank, or several, are servers. What is timed runs alone, one thread a rank;
trainings that are only to be compared by their accuracy run side by side, as many as there are cores for.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

HERE = Path(__file__).resolve().parent
NETS = ("cnn", "resnet")
MODES = {
    "allreduce": [],
    "local": ["--sync", "local"],
    "gossip": ["--sync", "gossip"],
    "server": ["--sync", "server"],
}
OTHERS = {  # not by default
    "local, K = 16, Nesterov": ["--sync", "local", "--every", "16", "--outer", "nesterov"],
    "server, s = 4": ["--sync", "server", "--staleness", "4"],
}
WIRES = ("bf16", "int8", "topk:0.01", "powersgd:4")


class Slowed:
    """From a run's first steps on its rank is stopped for three quarters of the time, while in this block."""

    def __init__(self, run: Path, rank: int) -> None:
        self.run, self.rank, self.over = run, rank, threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def work(self) -> None:
        while not (self.run / "metrics.jsonl").exists() and not self.over.wait(0.01):
            pass
        while not self.over.is_set():
            try:
                pid = int((self.run / f"pid-{self.rank}").read_text())
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.03)
                os.kill(pid, signal.SIGCONT)
            except (OSError, ValueError):  # it has ended
                return
            time.sleep(0.01)


class Failed(Exception):
    """A training did not come to its end."""


class Trained:
    """A finished training on so many ranks, servers not counted, and what its run folder tells."""

    def __init__(self, ranks, options, *words, script="sync_train.py", servers=1, slowed=False):
        servers *= "server" in options
        source = os.pathsep.join(p for p in (str(HERE.parent / "src"), os.environ.get("PYTHONPATH")) if p)
        env = {**os.environ, "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "oars-runs", "it")
            command = [sys.executable, "-m", "oars", "run", "--quiet", "--name", "it", "-n", str(ranks + servers),
                       *options, *(["--servers", str(servers)] if servers else []), str(HERE / script),
                       *map(str, words)]
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True)
            try:
                with Slowed(run, ranks - 1) if slowed else nullcontext():
                    out, err = process.communicate(timeout=300)
            except subprocess.TimeoutExpired:
                process.terminate()
                out, err = process.communicate()
            if process.returncode:
                raise Failed(f"{' '.join(command)}\n{out[-500:]}{err[-2000:]}")
            self.out = out
            self.accuracies = [float(found) for found in re.findall(r"^\w+ seed \d+ accuracy ([\d.]+)", out, re.M)]
            self.summary = json.loads((run / "summary.json").read_text())
            self.steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def speed(self, batch, epochs):
        """Samples a second, from one epoch's first step to another's, where all ranks meet: after the first third of
        them, in which ranks find out who is how fast, to the last."""
        steps = len(self.steps) // epochs
        first, last = (self.steps[epoch * steps] for epoch in (epochs // 3, epochs - 1))
        return batch * (last["step"] - first["step"]) / (last["time"] - first["time"])

    def exchange(self, first, last):
        """Seconds of exchange in a step, of these steps, and of all else: the medians of the means of eight."""
        pairs = list(zip(self.steps[first:last], self.steps[first + 1 : last], strict=False))
        whole = [b["time"] - a["time"] for a, b in pairs]
        spent = [seconds * b["exchange_share"] for seconds, (_, b) in zip(whole, pairs, strict=True)]
        rest = [a - b for a, b in zip(whole, spent, strict=True)]
        return [statistics.median(statistics.mean(x[i : i + 8]) for i in range(0, len(x) - 7, 8))
                for x in (spent, rest)]


def straggler(args):
    """Samples a second with a slow rank, of those without."""
    ranks, batch, epochs = 4, args.batch, 6
    print("\none of 4 ranks slowed four times, so 81 % is left of their speed: samples/s without, with, share",
          flush=True)
    work = ["--batch", batch, "--images", 20 * batch, "--epochs", epochs, "--held-out", 100, "--wait", args.wait]
    for name, options in MODES.items():
        whole = Trained(ranks, options, *work).speed(batch, epochs)
        slow = Trained(ranks, options, *work, slowed=True).speed(batch, epochs)
        print(f"{name:<26}{whole:>8.0f}{slow:>8.0f}{100 * slow / whole:>6.0f} %", flush=True)


def cost(args):
    """The exchange's time in a step, by the number of ranks, each of which has 8 rows of a batch."""
    sizes = [n for n in (2, 4, 8, 16) if n <= args.upto]
    print(f"\nms of exchange in a step on {', '.join(map(str, sizes))} ranks, and of its own work, which shares the "
          "machine's memory and caches with the others'", flush=True)
    for name, options in [item for item in MODES.items() if item[0] != "server"]:
        found = [Trained(n, options, "--net", *NETS, "--batch", 8 * n, "--images", 8 * n * 30, "--epochs", 2,
                         "--held-out", 100, "--wait", args.wait) for n in sizes]
        for net, first in zip(NETS, (8, 68), strict=True):
            times = [trained.exchange(first, first + 52) for trained in found]
            print(f"{name:<12}{net:<8}" + "   ".join(
                "".join(f"{1000 * t:>9.2f}" for t in kind) + f"   last / first {kind[-1] / kind[0]:.2f}"
                for kind in zip(*times, strict=True)), flush=True)


def servers(args):
    """Samples a second of so many workers, each of which has 16 rows of a batch, with so many servers."""
    print("\nsamples/s of workers with servers", flush=True)
    epochs = 3
    for held in (1, 2, 4):
        for workers in (1, 2, 4, 8):
            if workers + held <= args.upto and workers >= held:
                batch = 16 * workers
                told = Trained(workers, MODES["server"], "--batch", batch, "--images", 16 * batch, "--epochs", epochs,
                               "--held-out", 100, "--wait", args.wait, servers=held)
                print(f"{workers} workers, {held} servers {told.speed(batch, epochs):>8.0f}", flush=True)


def accuracy(args):
    """Held-out accuracy after the same epochs, over seeds; as many trainings at once as there are cores for."""
    print(f"\naccuracy after the same epochs, {args.seeds} seeds: mean, of each", flush=True)
    cores, free = threading.Condition(), os.cpu_count() or 1
    found: dict = {}

    def one(job):
        nonlocal free
        name, options, net, ranks = job
        need = min(ranks, os.cpu_count() or 1)  # a server works while those who train wait for it
        with cores:
            cores.wait_for(lambda: free >= need)
            free -= need
        try:
            found[name, net, ranks] = got = Trained(ranks, options, "--net", net, "--epochs", args.epochs, "--seed",
                                                    *range(1, args.seeds + 1)).accuracies
            print(f"{net:<8}{ranks} ranks  {name:<26}{statistics.mean(got):>7.2f}   "
                  + " ".join(f"{a:.2f}" for a in got), flush=True)
        finally:
            with cores:
                free += need
                cores.notify_all()

    few = min(args.ranks)
    jobs = [(name, options, net, ranks) for ranks in sorted(args.ranks, reverse=True) for net in NETS
            for name, options in (MODES | OTHERS if ranks == few else MODES).items()]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(one, jobs))
    print("points from allreduce")
    for name, net, ranks in sorted(found, key=lambda job: job[1:]):
        change = statistics.mean(found[name, net, ranks]) - statistics.mean(found["allreduce", net, ranks])
        print(f"{net:<8}{ranks} ranks  {name:<26}{change:>+7.2f}", flush=True)


def moved(args):
    """How far from one process's the weights end where gradients do not depend on them, in parts of its way."""
    def read(out):
        return [[float(word) for word in line.split()] for line in out.splitlines()]

    print("\na loss that is linear in the weights, 4 ranks: off one process's way, without momentum, with one of 0.9")
    alone = read(subprocess.check_output([sys.executable, HERE / "linear.py"], text=True))
    for name, options in (MODES | OTHERS).items():
        if "nesterov" in options:  # goes further on purpose
            continue
        told = read(Trained(4, options, script="linear.py").out)
        off = [math.dist(a, b) / math.hypot(*b) for a, b in zip(told, alone, strict=True)]
        print(f"{name:<26}" + "".join(f"{100 * part:>8.2f} %" for part in off), flush=True)


def wires(args):
    """Bytes given to MPI and accuracy, for each wire."""
    print("\nwires on 2 ranks: MB sent by the first, accuracy; between hosts fp32 would send the gradients too")
    for name in ("allreduce", "local"):
        for wire in WIRES:
            told = Trained(2, [*MODES[name], "--wire", wire], "--epochs", args.epochs)
            print(f"{name:<16}{wire:<12}{told.summary['sent_bytes'] / 1e6:>9.2f}{told.accuracies[0]:>8.2f}", flush=True)


PARTS = {"straggler": straggler, "cost": cost, "servers": servers, "accuracy": accuracy, "moved": moved,
         "wires": wires}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS))
    parser.add_argument("--upto", type=int, default=os.cpu_count(), help="ranks, where their number is varied")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="whose accuracy is compared")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6, help="of the trainings whose accuracy is compared")
    parser.add_argument("--batch", type=int, default=256, help="rows, of the straggler's training")
    parser.add_argument("--wait", type=int, default=0, help="milliseconds that a sample takes to get, where "
                        "something is timed: with them a few cores do for many ranks")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    failed = False
    for name in args.parts or PARTS:
        began = time.monotonic()
        try:
            PARTS[name](args)
        except Failed as error:  # the other parts can still tell something
            print(error, flush=True)
            failed = True
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
