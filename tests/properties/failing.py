"""Random scripts that fail: where an error is raised, on which row, where it is caught, and what the handler does.

    python failing.py 0 40      # plays those of seeds 0 to 39
    python failing.py 17 1      # that of seed 17 alone, with its error uncaught

Nothing here knows of ranks: the test runs it by ``python`` and by ``oars run``, and compares lines, files and codes.
An error that takes longer than two seconds to come is told as such, which one process never does.
"""

import atexit
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

ROWS, WIDTH, CLASSES, WORDS = 36, 6, 3, 12
BAD = 99.0  # the value of a row that fails


class BadValue(ValueError):
    """An error of the script's own."""


class Checked(torch.autograd.Function):
    """Passes rows on; refuses bad ones on its way there, or back."""

    @staticmethod
    def forward(ctx, a, back):
        ctx.save_for_backward(a)
        ctx.back = back
        if not back and (a > 90).any():
            raise BadValue("a value above 90 in forward")
        return a * 1.0

    @staticmethod
    def backward(ctx, grad):
        if ctx.back and (ctx.saved_tensors[0] > 90).any():
            raise BadValue("a value above 90 in backward")
        return grad, None


def refuse(grad):
    """A hook that does not take large gradients."""
    if grad.abs().max() > 1e3:
        raise BadValue("a gradient above 1000")


class Net(nn.Module):
    """Fails in the way that it is told."""

    def __init__(self, how, kind):
        super().__init__()
        self.how = how
        middle = {"plain": nn.Tanh(), "norm": nn.BatchNorm1d(8), "drop": nn.Dropout(0.3)}[kind]
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.last = nn.Sequential(nn.Linear(WIDTH, 8), middle), nn.Linear(8, CLASSES)

    def forward(self, a, words):
        if self.how == "check" and (a > 90).any():
            raise BadValue(f"a value above 90 in a batch of {len(a)}")
        if self.how == "assert":
            assert a.max() < 90, "too large"
        if self.how == "function":
            a = Checked.apply(a, False)
        if self.how == "function back":
            a = Checked.apply(a.requires_grad_(), True)
        if self.how == "cholesky":
            a = a + 0 * torch.linalg.cholesky(torch.eye(2) * (50 - a[:, :1, None])).sum((1, 2))[:, None]
        out = self.last(self.first(a.clamp(-3, 3)) + 0.1 * self.words(words).mean(1)[:, :1])
        if self.how == "hook" and out.requires_grad:
            out.register_hook(refuse)
            out = out * torch.where(a[:, :1] > 90, 1e6, 1.0)
        return out


class Data(Dataset):
    """Rows, classes and words, of which some are bad in the way that it is told."""

    def __init__(self, how, bad):
        g = torch.Generator().manual_seed(1)
        self.how, self.bad = how, bad
        self.x = torch.randn(ROWS, WIDTH, generator=g)
        self.y = (self.x @ torch.randn(WIDTH, CLASSES, generator=g)).argmax(1)
        self.words = torch.randint(WORDS, (ROWS, 4), generator=g)
        for row in bad:
            if how == "label":
                self.y[row] = CLASSES + 4
            elif how == "word":
                self.words[row, 2] = WORDS
            elif how not in ("sample", "stop", "collate", "shape"):
                self.x[row, 0] = BAD

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        if i in self.bad:
            if self.how == "sample":
                raise BadValue(f"sample {i} cannot be read")
            if self.how == "stop":
                raise KeyError(i)
            if self.how == "shape":
                return self.x[i, :4], self.y[i], self.words[i]
            if self.how == "collate":
                return None
        return self.x[i], self.y[i], self.words[i]


def collate(samples):
    """Refuses samples that are not there."""
    if any(sample is None for sample in samples):
        raise BadValue("a sample is missing")
    return default_collate(samples)


HOWS = ("label", "word", "check", "assert", "function", "function back", "cholesky", "hook", "divide", "one_hot",
        "gather", "table", "read", "sample", "stop", "shape", "collate", "metric")


def drawn(seed):
    """The script of a seed."""
    draw = random.Random(seed)
    return {"how": draw.choice(HOWS), "bad": draw.sample(range(ROWS), draw.randint(1, 2)),
            "batch": draw.randint(3, 14), "shuffle": draw.random() < 0.5, "workers": draw.choice((0, 0, 0, 2)),
            "kind": draw.choice(("plain", "norm", "drop")),
            "caught": draw.choice(("step", "loss", "epoch", "training", "twice")),
            "handler": draw.choice(("skip", "retry", "save", "evaluate", "another", "slower", "finally"))}


def loss_of(net, batch, how):
    """The loss; some errors come up behind the model."""
    a, y, words = batch
    out = net(a, words)
    if how == "divide":
        assert (100 // (99 - a[:, 0].round().long()).clamp(-9, 9)).shape == y.shape
    if how == "one_hot":
        out = out + 0 * F.one_hot(y + 7 * (a[:, 0] > 90), CLASSES + 7)[:, :CLASSES]
        out = out + 0 * F.one_hot(y + (a[:, 0] > 90) * CLASSES, CLASSES)
    if how == "gather":
        out = out + 0 * out.gather(1, (y + 5 * (a[:, 0] > 90)).unsqueeze(1))
    if how == "table":
        out = out + 0 * torch.eye(CLASSES)[y + 5 * (a[:, 0] > 90)]
    loss = F.cross_entropy(out, y)
    if how == "read" and a.max().item() > 90:
        raise BadValue(f"the largest is {a.max().item():.1f}")
    if how == "metric" and any(value > 90 for value in a[:, 0].tolist()):
        raise BadValue("seen by the metric")
    return loss


def said(error, began):
    """An error's type and the last line of what it says; whether it came late."""
    text = str(error).strip().splitlines()
    print(type(error).__name__, text[-1] if text else "", "LATE" if time.monotonic() - began > 2 else "")


def evaluate(net, data, how):
    """On what is good."""
    good = [data[i] for i in range(ROWS) if i not in data.bad]
    net.eval()
    with torch.no_grad():
        right = sum((net(a, w).argmax(1) == y).sum().item() for a, y, w in DataLoader(good, 7))
    net.train()
    print("right", right)


def train(number, how, bad, batch, shuffle, workers, kind, caught, handler, uncaught=False):
    """One of them."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    data, net = Data(how, bad), Net(how, kind)
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    kinds = () if uncaught else (ValueError, IndexError, RuntimeError, AssertionError, KeyError, ZeroDivisionError)
    in_step, in_epoch = (kinds if caught in levels else () for levels in (("step", "loss", "twice"), ("epoch",)))

    def handle(error, seen, began):
        said(error, began)
        opt.zero_grad()
        if handler == "retry" and seen is not None and how not in ("label", "word"):
            a, y, words = seen
            loss = F.cross_entropy(net.last(net.first(a.clamp(-3, 3))), y)
            loss.backward()
            opt.step()
            print(f"retried {loss.item():.9g}")
        elif handler == "save":
            torch.save(net.state_dict(), f"failed-{number}.pt")
        elif handler == "evaluate":
            evaluate(net, data, how)
        elif handler == "slower":
            opt.param_groups[0]["lr"] *= 0.5
        elif handler == "another":
            try:
                raise RuntimeError("another one") from error
            except RuntimeError as other:
                print(other, type(other.__cause__).__name__)

    def step(seen):
        loss = loss_of(net, seen, how)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"rows {len(seen[0])} loss {loss.item():.9g}")

    def epoch():
        batches = iter(DataLoader(data, batch, shuffle=shuffle, num_workers=workers, collate_fn=collate))
        while True:
            seen, began = None, time.monotonic()
            try:
                seen = next(batches)
                if caught == "loss":
                    try:
                        loss_of(net, seen, how)
                    except kinds as error:
                        handle(error, seen, began)
                        continue
                step(seen)
            except StopIteration:
                return
            except in_step as error:
                handle(error, seen, began)
                if caught == "twice":
                    try:
                        if seen is not None:
                            step(seen)
                    except kinds as again:
                        said(again, began)
            finally:
                if handler == "finally":
                    print("finally", f"{sum(p.sum() for p in net.parameters()).item():.6g}")

    began = time.monotonic()
    try:
        for _ in range(2):
            try:
                epoch()
            except in_epoch as error:
                handle(error, None, time.monotonic())
    except kinds as error:
        handle(error, None, time.monotonic())
    finally:
        if uncaught:
            torch.save(net.state_dict(), "last.pt")
            evaluate(net, data, how)
    if time.monotonic() - began > 30:
        print("LATE")
    torch.save(net.state_dict(), f"{number}.pt")


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:3])
    atexit.register(lambda: print("left", file=open("left.txt", "w")))
    atexit.register(print, "leaving")
    for number in range(first, first + count):
        one = drawn(number)
        print(f"== {number} {one}")
        train(number, **one, uncaught=count == 1)
