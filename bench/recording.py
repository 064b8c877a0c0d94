"""What recording costs a training loop: processor time per step with it and without, in turn, in one process.

    oars run -n 1 --snapshot off bench/recording.py

A tiny network is the worst case: the cost of a step's record does not grow with the network, but for the gradients'
norm, which is taken a few times a second.
"""

import statistics
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from oars.adapt.torch import step_log
    from oars.adapt.torch.context import ctx
except ImportError:
    raise SystemExit("run this with oars run") from None
if ctx.record is None:
    raise SystemExit("run this with oars run")

NETS = {
    "linear 10 -> 1, batch 8": (nn.Linear(10, 1), (10,), 8, 400),
    "MLP 784-256-10, batch 100": (nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), (784,), 100, 100),
    "CNN 32-64-1024, batch 50": (nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 1024), nn.ReLU(), nn.Linear(1024, 10)), (1, 28, 28), 50, 2),
}
torch.set_num_threads(1)
mark, step = ctx.record.times.mark, ctx.record.step


def recording(on):
    """Switch what is written down about a step on or off; when the next norm is due moves on by the time it was off."""
    global due
    ctx.record.times.mark = mark if on else lambda phase: None
    ctx.record.step = step if on else lambda *told: None
    if not on:
        due = step_log._norm_at - time.thread_time()
    step_log._norm_at = time.thread_time() + due if on else float("inf")


due = 0.0
for name, (model, shape, batch, each) in NETS.items():
    data = DataLoader(TensorDataset(torch.randn(batch * each, *shape)), batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    took = {True: [], False: []}
    for block in range(80):
        on = block % 2 == 0
        recording(on)
        began = time.process_time()
        for (x,) in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        took[on].append((time.process_time() - began) / each)
    with_, without = statistics.median(took[True][10:]), statistics.median(took[False][10:])
    print(f"{name}: {1e6 * without:.1f} us a step, {1e6 * (with_ - without):+.1f} us "
          f"({100 * (with_ / without - 1):+.2f} %) with recording", flush=True)
