"""What scripts of the contract share that try a small model in many ways: two tables, two loops, two models."""

import torch
import torch.nn.functional as F
from scenes import keep, mlp, say, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = table(60, 8)
few_x, few_y = table()


def batches(size=10):
    return DataLoader(TensorDataset(x, y), size, shuffle=True)


def train(model, epochs=2, **more):
    """The plain loop; `more` goes to the model's call."""
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(epochs):
        for xb, yb in batches():
            loss = F.cross_entropy(model(xb, **more), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)


class Two(nn.Module):
    """Two layers with something between, which the scenes fill in."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 16), nn.Linear(16, 3), between

    def forward(self, x, *args):
        return self.last(F.relu(self.between(self, self.first(x), *args)))


def descend(model, data=(few_x, few_y), epochs=2, loss_of=F.cross_entropy, update=None):
    """Batches of 14, 14 and 12 rows; a target is last, an `update` comes before each of the model's calls."""
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(epochs):
        for *inputs, target in DataLoader(TensorDataset(*data), 14, shuffle=True):
            if update is not None:
                update(*inputs)
            loss = loss_of(model(*inputs), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)
    keep(model)


class Around(nn.Module):
    """A small network, and what is done to its result."""

    def __init__(self, after):
        super().__init__()
        self.net, self.after, self.extra = mlp(), after, None

    def forward(self, rows):
        return self.after(self, self.net(rows), rows)
