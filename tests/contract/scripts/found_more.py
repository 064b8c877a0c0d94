"""What was found by attacking, more of it: what minds the whole batch though it looks as if it took row by row."""

import enum
import math
import random
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene, table
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, TensorDataset

x, y = table()


def descend(model, data=(x, y), epochs=2, loss_of=F.cross_entropy, update=None):
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


@scene
def tables_that_mind_the_batch():
    """Entries that are looked up are normalised in place; gradients are scaled by how often they are."""
    ids = torch.randint(0, 15, (40, 4))
    for layer in (nn.Embedding(15, 6, max_norm=0.7), nn.Embedding(15, 6, scale_grad_by_freq=True),
                  nn.EmbeddingBag(15, 6, max_norm=0.7), nn.EmbeddingBag(15, 6, scale_grad_by_freq=True)):
        descend(nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3)), (ids, y))


@scene
def ignored_classes_that_have_no_weight():
    """255, as in maps of classes; not on every rank."""
    images, maps = torch.randn(12, 3, 4, 4), torch.randint(0, 4, (12, 4, 4))
    maps[0, 0], maps[7, 1:3] = 255, 255
    descend(nn.Conv2d(3, 4, 1), (images, maps),
            loss_of=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 3.0]), ignore_index=255))


@scene
def norms_and_differences():
    for of in (lambda o: torch.linalg.norm(o, 2), lambda o: torch.linalg.norm(o, ord=2), torch.linalg.norm,
               lambda o: torch.renorm(o, 2, 1, maxnorm=0.5).pow(2).sum(), lambda o: o.renorm(2, 0, 0.5)[:, 0].sum(),
               lambda o: torch.diff(o, dim=1, prepend=torch.ones(len(o), 1), append=o[:, :1]).pow(2).sum(),
               lambda o: torch.einsum("bi,bi->bi", o, torch.tensor([[1.0, 2.0, 3.0]])).square().mean(),
               lambda o: F.kl_div(o.log_softmax(1).t(), torch.full((3, len(o)), 1 / 3), reduction="batchmean")):
        descend(mlp(), loss_of=lambda out, target, of=of: F.cross_entropy(out, target) + 0.1 * of(out), epochs=1)


@scene
def the_size_as_a_value():
    for after in (lambda m, h, r: h / torch.tensor(r.shape[0]), lambda m, h, r: h * torch.ones(r.shape[0]).sum(),
                  lambda m, h, r: h + torch.full((3,), r.shape[0]) * torch.arange(3),
                  lambda m, h, r: h * (m.net[0].bias[:3] / r.shape[0]), lambda m, h, r: h * r.new_tensor(r.shape[0]),
                  lambda m, h, r: h * math.log(r.shape[0]), lambda m, h, r: h * np.sqrt(r.shape[0]),
                  lambda m, h, r: h * torch.zeros(r.shape[0], 2).shape[0] / 10,
                  lambda m, h, r: h * len(torch.zeros(r.size(0))) / 10, lambda m, h, r: h * abs(r.shape[0]) / 10,
                  lambda m, h, r: h * divmod(r.shape[0], 5)[1] * (r.shape[0] & 7)):
        descend(Around(after), epochs=1)


@scene
def rows_from_elsewhere():
    """A model that is given part of the batch by an attribute, by a variable around it, by these only later."""
    model = Around(lambda m, h, r: h + m.extra)
    descend(model, update=lambda rows: setattr(model, "extra", rows[:, :3] * 0.3))
    around = {}
    descend(Around(lambda m, h, r: h * around["gain"]), update=lambda rows: around.update(gain=rows[:, :3] + 1))
    later = Around(lambda m, h, r: h if m.extra is None else F.dropout(m.extra, 0.2) * h)
    descend(later, update=lambda rows: setattr(later, "extra", rows[:, :3] if len(rows) == 12 else None), epochs=3)
    around.clear()
    calls = [0]

    def count(rows):
        calls[0] += 1
        around.update(gain=rows[:, :3] + 1 if calls[0] > 4 else 1.5)

    descend(Around(lambda m, h, r: h * around["gain"]), update=count, epochs=3)


@scene
def switched_from_outside():
    """Dropout comes and goes with a variable that is no attribute of the model's; running statistics go on."""
    model = Around(lambda m, h, r: F.dropout(m.norm(F.dropout(h, 0.1)), 0.3) if switch[0] else m.norm(h))
    model.norm, switch, calls = nn.BatchNorm1d(3), [False], [0]

    def turn(rows):
        calls[0] += 1
        switch[0] = 4 < calls[0] < 8

    descend(model, update=turn, epochs=4)


@scene
def decided_by_a_counter():
    """Which is a buffer: no attribute changes."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, rows):
            self.calls += 1
            out = self.net(rows)
            return out - out.mean(0) if int(self.calls) % 5 == 3 else out

    descend(Net(), epochs=3)


@scene
def leaves_made_anew():
    """Weights in a dict, which every step replaces."""
    more = {"gain": torch.ones(3, requires_grad=True)}
    model = Around(lambda m, h, r: h * more["gain"])

    def replace(rows):
        if more["gain"].grad is not None:
            more["gain"] = (more["gain"] - 0.1 * more["gain"].grad).detach().requires_grad_()

    descend(model, update=replace, epochs=3)
    say(more["gain"].norm())


@scene
def hooks_of_all_modules():
    model = mlp()
    descend(model)
    handle = register_module_forward_hook(lambda m, i, o: o + 0.1 * o.mean(0) if isinstance(m, nn.Tanh) else None)
    descend(model)
    handle.remove()
    descend(model)


class Way(enum.Enum):
    """How rows are treated."""

    ALONE, CENTRED = 1, 2


@scene
def told_by_an_argument():
    """That rows mix is told by what is no number, nor a string."""
    class Net(nn.Module):
        def __init__(self, mixes):
            super().__init__()
            self.net, self.mixes = mlp(), mixes

        def forward(self, rows, how):
            out = self.net(rows)
            return out - out.mean(0) if self.mixes(how) else out

    for way, mixes in ((Way, lambda how: how is Way.CENTRED), (lambda n: np.bool_(n == 2), bool),
                       (lambda n: SimpleNamespace(mix=n == 2), lambda how: how.mix),
                       (lambda n: (lambda: True) if n == 2 else (lambda: False), lambda how: how())):
        model = Net(mixes)
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for step, (xb, yb) in enumerate([batch for _ in range(4) for batch in DataLoader(TensorDataset(x, y), 14)]):
            loss = F.cross_entropy(model(xb, way(2 if step in (4, 5, 9) else 1)), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)


@scene
def generators_of_the_models_own():
    """What they decide differs from call to call, by chance not in the first ones."""
    for coin in (np.random.default_rng(3).random, random.Random(3).random):
        descend(Around(lambda m, h, r, coin=coin: h - h.mean(0) if coin() < 0.2 else h), epochs=5)
    g = torch.Generator().manual_seed(1)
    descend(Around(lambda m, h, r: h * torch.empty(r.shape[0], 1).bernoulli_(0.97, generator=g)), epochs=6)


@scene
def hooks_on_leaves_whose_gradients_are_handed_out():
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model[2].bias.register_hook(lambda grad: grad * torch.tensor([1.0, 0.0, 1.0]))
    for xb, yb in DataLoader(TensorDataset(x, y), 14):
        grads = torch.autograd.grad(F.cross_entropy(model(xb), yb), list(model.parameters()))
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * grad
        say(sum(grad.abs().sum() for grad in grads))
    keep(model)


@scene
def hooks_on_rows():
    """One that goes back once more by itself, as deep equilibrium models do, and one that mixes rows."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, rows):
            def step(state):
                return torch.tanh(0.3 * self.again(state) + self.first(rows))

            with torch.no_grad():
                state = step(step(rows.new_zeros(rows.shape[0], 8)))
            state = step(state)
            at = state.detach().requires_grad_()
            there = step(at)

            def through(grad):
                out = grad
                for _ in range(4):
                    out = torch.autograd.grad(there, at, out, retain_graph=True)[0] + grad
                return out

            state.register_hook(through)
            out = self.last(state)
            out.register_hook(lambda grad: 0.5 * grad + 0.5 * grad.flip(0))
            return out

    descend(Net())
    model = mlp()

    def loss_of(out, target):
        out.register_hook(lambda grad: grad.flip(0))
        return F.cross_entropy(out, target)

    descend(model, loss_of=loss_of)


@scene
def batches_changed_in_views():
    """By row, by slice, as an array; between calls of a model that takes plain own rows by then."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(xb, yb):
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)

    for xb, yb in [batch for _ in range(2) for batch in DataLoader(TensorDataset(x.clone(), y), 14)]:
        for i, row in enumerate(xb):
            row.mul_(0.1 * i)
        step(xb, yb)
        some = xb[2:5]
        some += 1
        step(xb, yb)
        array = xb.numpy()
        array[1] = 3
        step(xb, yb)
        array[5] = -2
        say(model(F.dropout(xb, 0.1)).sum())
        np.asarray(xb)[3] = 5
        say(xb.sum())
        flips = torch.rand(len(xb)) < 0.5
        xb[flips] = xb[flips].flip(-1)
        step(xb, yb)
    keep(model)


@torch.jit.script
def bent(h, bias):
    h = h + bias
    return h * 0.5 * (1.0 + torch.tanh(h))


@scene
def scripted_functions():
    model = Around(lambda m, h, r: bent(h, m.net[0].bias[:3]))
    descend(model)
    descend(mlp(), loss_of=lambda out, target: F.cross_entropy(bent(out, torch.zeros(3)), target))


@scene
def padding_in_evaluation():
    """PyTorch's encoder gives zeros for padding, unless some row of the batch is not padded at its end."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, rows, pad):
            return self.last(self.encoder(self.first(rows), src_key_padding_mask=pad).mean(1))

    rows, labels = torch.randn(24, 5, 3), torch.randint(0, 2, (24,))
    pad = torch.arange(5)[None] >= torch.randint(1, 6, (24, 1))
    pad[::6], pad[9] = False, torch.tensor([True, False, False, True, False])
    model = Net()
    descend(model, (rows, pad, labels), epochs=1)
    model.eval()
    for _ in range(2):
        for *inputs, target in DataLoader(TensorDataset(rows, pad, labels), 6):
            with torch.no_grad():
                say(F.cross_entropy(model(*inputs), target))
                with torch.device("cpu"):
                    say(F.cross_entropy(model(*inputs), target))
            say(F.cross_entropy(model(*inputs), target))


play()
