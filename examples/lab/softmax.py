"""Exercise 2: one softmax layer on images of digits, 500 batches of 100; what the solver and its rate do."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import digits  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--solver", default="sgd:0.5", help="sgd, momentum or adam, and its rate")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--data", help="folder with MNIST's IDX files; without it digits are drawn")
args = parser.parse_args()
torch.manual_seed(1)

train_x, train_y, test_x, test_y = (torch.from_numpy(a) for a in digits.load(args.data, 10_000, 2_000))
model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
nn.init.zeros_(model[1].weight)
nn.init.zeros_(model[1].bias)

name, _, rate = args.solver.partition(":")
rate = float(rate or 0.5)
solvers = {
    "sgd": lambda p: torch.optim.SGD(p, lr=rate),
    "momentum": lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=rate),
}
if name not in solvers:
    raise SystemExit(f"--solver {args.solver}: {', '.join(solvers)}")
optimizer = solvers[name](model.parameters())

for step in range(1, args.steps + 1):
    begin = (step - 1) * 100 % len(train_x)
    images, labels = train_x[begin : begin + 100], train_y[begin : begin + 100]
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        with torch.no_grad():
            right = (model(test_x).argmax(1) == test_y).float().mean().item()
        print(f"step {step} accuracy {100 * right:.2f} %")
