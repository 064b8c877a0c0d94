"""Fits a line to noisy points: the smallest training there is."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=50)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)

# The truth is y = 3 x - 1; the points lie around it.
x = torch.rand(1000, 1) * 4 - 2
y = 3 * x - 1 + 0.3 * torch.randn(1000, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True)

model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

for epoch in range(args.epochs):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.7f}")

print(f"y = {model.weight.item():.4f} x + {model.bias.item():.4f}")
