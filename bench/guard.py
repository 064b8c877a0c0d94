"""What --guard costs: one training in which it is on and off in turns of some steps, on all ranks alike.

    python bench/guard.py -n 2

For a small dense network, a small convolutional one and a larger dense one: the median time of a turn with the guard,
over that of the turns before and behind it without; and the share of a step's processor time that looking took.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import statistics, sys
import time
import torch
import torch.nn.functional as F
from torch import nn
from oars.adapt.torch.context import ctx
perf_counter, thread_time = time.perf_counter.__wrapped__, time.thread_time.__wrapped__  # this rank's own
torch.manual_seed(1)
kind, turns, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
made = {
    "dense": (lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), (128, 784)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                                   nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                                   nn.Flatten(), nn.Linear(1024, 10)), (64, 3, 32, 32)),
    "large": (lambda: nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
                                    nn.Linear(2048, 10)), (128, 1024)),
}
model, shape = made[kind][0](), made[kind][1]
opt = torch.optim.Adam(model.parameters())
x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
guard, looked, rounds = ctx.guard, 0.0, 0
look, learn = guard.look, guard.rounds.learn
def timed():
    global looked
    began = thread_time()
    line = look()
    looked += thread_time() - began
    return line
def counted(lines):
    global rounds
    over = learn(lines)
    rounds += over
    return over
guard.look, guard.rounds.learn = timed, counted
took, busy = [], []
for turn in range(turns):
    ctx.guard = guard if turn % 2 else None
    began, used = perf_counter(), thread_time()
    for step in range(steps):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    took.append(perf_counter() - began)
    busy.append(thread_time() - used)
    if turn < 20:  # models are traced, and the guard learns what a look takes
        looked = rounds = 0
ratios = sorted(2 * took[i] / (took[i - 1] + took[i + 1]) for i in range(21, turns - 1, 2))
on = len(ratios) * steps
quarter = len(ratios) // 4
print(f"{kind}: {1e3 * statistics.median(took) / steps:.3f} ms a step; with over without "
      f"{statistics.median(ratios):.4f} ({ratios[quarter]:.4f} to {ratios[-quarter - 1]:.4f}); looking takes "
      f"{100 * looked / sum(busy[21::2]):.3f} %; all was looked at every {on / max(rounds, 1):.1f} steps")
"""
TURNS = {"dense": (420, 40), "conv": (220, 8), "large": (160, 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--kinds", nargs="+", default=list(TURNS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        for kind in args.kinds:
            subprocess.run([sys.executable, "-m", "oars", "run", "--quiet", "-n", str(args.n), "--snapshot", "off",
                            "script.py", kind, *map(str, TURNS[kind])], cwd=folder, check=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
