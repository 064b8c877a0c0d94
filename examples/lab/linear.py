"""Exercise 1: a line through four points, by gradient descent. Only the step and the optimizer differ."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--solver", default="sgd:0.01", help="sgd, adam or adadelta, and its step")
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()

x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
y = torch.tensor([[0.0], [-1.0], [-2.0], [-3.0]])  # y = 1 - x
model = nn.Linear(1, 1)
with torch.no_grad():
    model.weight.fill_(0.3)
    model.bias.fill_(-0.3)

name, _, rate = args.solver.partition(":")
rate = float(rate or 0.01)
if name == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
elif name == "adam":
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
elif name == "adadelta":
    optimizer = torch.optim.Adadelta(model.parameters(), lr=rate, rho=0.95, eps=1e-8)
else:
    raise SystemExit(f"--solver {args.solver}: sgd, adam or adadelta")

for _ in range(args.steps):
    loss = ((model(x) - y) ** 2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

loss = ((model(x) - y) ** 2).sum()
print(f"y = {model.weight.item():.4f} x + {model.bias.item():.4f}, final loss {loss.item():.3g}")
