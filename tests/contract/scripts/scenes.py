"""What the contract's scripts share: scenes, a little data, a plain training loop.

A scene is a small training, seeded alone, so that one that fails does not disturb the next. Scripts play all of
theirs, or those named on the command line: ``python losses.py contrastive vae``. Nothing here knows of ranks.
"""

import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

_scenes = {}
_playing = ""


def scene(function):
    """Register a scene under its function's name."""
    _scenes[function.__name__] = function
    return function


def play():
    """Play the scenes; after each, print where the random streams stand, for they are part of the training."""
    global _playing
    for _playing in sys.argv[1:] or list(_scenes):
        print(f"== {_playing}")
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        _scenes[_playing]()
        print(f"streams {torch.rand(1).item():.9g} {np.random.rand():.9g} {random.random():.9g}")
    _scenes.clear()  # another script may follow in this process


def say(loss, what="loss"):
    """Print a loss to nine digits."""
    print(f"{what} {loss.item():.9g}")


def keep(*modules):
    """Save the modules' final weights to a file named after the scene."""
    torch.save([m.state_dict() for m in modules], f"{_playing}.pt")


def table(n=40, d=6, classes=3, seed=1):
    """n rows of d numbers, and a class for each; does not touch the common stream."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    y = (x @ torch.randn(d, classes, generator=g)).argmax(1)
    return x, y


def mlp(d=6, classes=3, hidden=8):
    """A small network for `table`."""
    return nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def fit(batches, model=None, lr=0.1, steps=None):
    """Train on (x, y) batches, printing each loss; keeps and returns the model."""
    model = model or mlp()
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step, (x, y) in enumerate(batches):
        if step == steps:
            break
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} rows {len(x)} loss {loss.item():.9g}")
    keep(model)
    return model
