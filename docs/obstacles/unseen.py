"""What it would cost to see more: the figures of "not seen" in docs/what-is-split.md.

    python docs/obstacles/unseen.py

Shares of processor time, in turns, with what they are shares of measured twice (the control, near 1).
"""

import time

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

KEPT = {}


class Noted(TorchFunctionMode):
    """Notes operations; with ``arguments``, also what they are given besides tensors."""

    def __init__(self, arguments):
        super().__init__()
        self.arguments, self.done = arguments, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.done.append(id(func))
        if self.arguments:
            given = (*args, *(kwargs or {}).values())
            self.done += [repr(a) for a in given if not isinstance(a, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def follow(out, arguments):
    """The operations of autograd's graph; with ``arguments``, what they have kept besides tensors."""
    todo, seen, way = [out.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        way.append(type(node).__name__)
        if arguments:
            for name in KEPT.setdefault(type(node), [n for n in dir(node) if n.startswith("_saved_")]):
                value = getattr(node, name)
                if not isinstance(value, torch.Tensor):
                    way.append(repr(value))
        todo += [below for below, _ in node.next_functions]
    return hash(tuple(way))


def shares(name, turns, works):
    """What each work takes, as a share of the first, which is done twice."""
    first = next(iter(works))
    works = {first: works[first], f"{first} again": works[first], **works}
    spent = dict.fromkeys(works, 0.0)
    for turn in range(turns):
        for how, work in works.items() if turn % 2 else reversed(works.items()):
            began = time.process_time()
            for _ in range(10):
                work()
            spent[how] += time.process_time() - began
    print(f"{name}:", ", ".join(f"{how} {each / spent[first]:.2f}" for how, each in spent.items() if how != first))


def arguments():
    """A small model's call, and what is noted of it."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())))
    x = torch.randn(16, 32)

    def without(mode):
        with torch.no_grad(), mode:
            model(x)

    shares("with gradients", 200, {"the call": lambda: model(x), "and its operations": lambda: follow(model(x), False),
                                   "and their arguments": lambda: follow(model(x), True)})
    shares("without gradients", 200, {
        "the call": lambda: without(torch.no_grad()), "and its operations": lambda: without(Noted(False)),
        "and their arguments": lambda: without(Noted(True))})


def rows():
    """Forward and backward of one row of an image, and of two."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(),
                          nn.Linear(32 * 28 * 28, 10))
    one, two = torch.randn(1, 3, 32, 32), torch.randn(2, 3, 32, 32)
    shares("rows", 20, {"one": lambda: model(one).sum().backward(), "two": lambda: model(two).sum().backward()})


def gradients():
    """100 MB that are copied into a message, and that are compared with it."""
    grad, sent = torch.randn(25_000_000), torch.zeros(25_000_000)
    sent.copy_(grad)
    shares("gradients", 4, {"copied": lambda: sent.copy_(grad), "compared": lambda: torch.equal(sent, grad)})


def trained(threads):
    """The bias before a BatchNorm after ten steps of Adam, and its gradient."""
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 1))
    optimizer, x = torch.optim.Adam(net.parameters(), 1e-3), torch.randn(512, 64)
    for _ in range(10):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return net[0].bias.detach(), net[0].bias.grad


(one, grad), (two, _) = trained(1), trained(2)
print(f"a bias before a BatchNorm: gradient {grad.abs().max():.1e}, apart by {(one - two).abs().max():.1e} "
      "with one and with two threads")
torch.set_num_threads(1)
arguments()
rows()
gradients()
