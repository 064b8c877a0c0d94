"""Modules that are called many times in each call of the model around them: cells in loops over time, layers that are
used again. What one does in a later turn may be something else than in the first."""

import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene
from small import Around, descend
from torch import nn

g = torch.Generator().manual_seed(3)
series = torch.randn(24, 13, generator=g)
labels = torch.randint(0, 3, (24,), generator=g)


@scene
def waves_by_lbfgs():
    """Two LSTM cells over time, of batches made by hand."""
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

        def forward(self, rows, future=0):
            outputs = []
            h, c, h2, c2 = (torch.zeros(rows.size(0), 8) for _ in range(4))
            for now in rows.split(1, dim=1):
                h, c = self.first(now, (h, c))
                h2, c2 = self.second(h, (h2, c2))
                outputs += [self.last(h2)]
            for _ in range(future):
                h, c = self.first(outputs[-1], (h, c))
                h2, c2 = self.second(h, (h2, c2))
                outputs += [self.last(h2)]
            return torch.cat(outputs, dim=1)

    model = Sequence()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=6)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(series[:, :-1]), series[:, 1:])
        say(loss)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        with torch.no_grad():
            say(model(series[:7, :-1], future=5).square().mean())


class Cell(nn.Module):
    """A cell, and what is done in each of its turns."""

    def __init__(self, turn):
        super().__init__()
        self.inner, self.turn, self.calls = nn.RNNCell(1, 6), turn, 0

    def forward(self, now, h):
        return self.turn(self, self.inner(now, h), now)


class Loop(nn.Module):
    """A cell over time; after is what is done with its last state."""

    def __init__(self, turn, after=lambda loop, h: h):
        super().__init__()
        self.cell, self.last, self.after = Cell(turn), nn.Linear(6, 3), after
        self.kept, self.time = [], 0

    def forward(self, rows):
        self.kept.clear()
        h = torch.zeros(rows.shape[0], 6)
        for self.time, now in enumerate(rows.split(1, dim=1)):
            STEP[0] = self.time
            h = self.cell(now, h)
        return self.last(self.after(self, h))


STEP = [0]


def at(step, otherwise=lambda c, h, x: h):
    """Something that is done in one turn only."""
    def of(what):
        return lambda c, h, x: what(c, h, x) if STEP[0] == step else otherwise(c, h, x)

    return of


@scene
def a_turn_that_is_another():
    """Rows meet in some turn of each forward, by an operation or by a dimension; noise and dropout come in it."""
    for turn in (
        at(2)(lambda c, h, x: h - h.mean(0)),
        at(7)(lambda c, h, x: h - h.mean(0)),
        at(11, lambda c, h, x: h - h.mean(1, keepdim=True))(lambda c, h, x: h - h.mean(0, keepdim=True)),
        at(6)(lambda c, h, x: h + torch.randn_like(h)),
        at(9)(lambda c, h, x: F.dropout(h, 0.3)),
        at(5)(lambda c, h, x: h * torch.rand(1).item()),
        at(10)(lambda c, h, x: h / h.shape[0]),
        at(6)(lambda c, h, x: h if h.sum() > 0 else -h),
    ):
        descend(Loop(turn), data=(series, labels), epochs=3)


@scene
def kept_in_some_turns():
    """States that are kept for what comes behind the loop, in each turn or in late ones."""
    kept = []

    def keeping(when):
        def turn(c, h, x):
            if STEP[0] == 0:
                kept.clear()
            if when(STEP[0]):
                kept.append(h * 2)
            return h

        return turn

    for when in (lambda t: True, lambda t: t > 8, lambda t: t == 5):
        descend(Loop(keeping(when), lambda loop, h: h + torch.stack(kept).mean(0)), data=(series, labels), epochs=2)
        descend(Loop(keeping(when), lambda loop, h: h - torch.cat(kept).mean(0)), data=(series, labels), epochs=2)


@scene
def told_in_some_turns():
    def telling(c, h, x):
        if STEP[0] in (6, 9):
            print("turn", STEP[0], tuple(h.shape), len(h))
        return h

    descend(Loop(telling), data=(series, labels), epochs=2)


@scene
def counted_turns():
    """The cell counts its own calls: by an attribute, by a buffer."""
    def counting(c, h, x):
        c.calls += 1
        return h - h.mean(0) if c.calls % 50 == 20 else h

    descend(Loop(counting), data=(series, labels), epochs=2)
    model = Loop(lambda c, h, x: h - h.mean(0) if int(c.turns.add_(1)) % 50 == 20 else h)
    model.cell.register_buffer("turns", torch.zeros((), dtype=torch.long))
    descend(model, data=(series, labels), epochs=2)


@scene
def made_in_the_model_and_handed_on():
    """Plain tensors of the batch's size that a model gives to modules inside: alike in all rows, or not."""
    class Gate(nn.Module):
        def forward(self, h, of):
            return h * of

    gate = Gate()
    for make in (
        lambda r: torch.ones(r.shape[0], 1) * 2,
        lambda r: torch.zeros(r.size(0), 3) + 1,
        lambda r: torch.arange(r.shape[0])[:, None] / 10,
        lambda r: torch.linspace(0, 1, r.shape[0])[:, None],
        lambda r: torch.ones(r.shape[0], r.shape[0]).cumsum(0)[:, :1] / 20,
    ):
        descend(Around(lambda m, h, r, make=make: gate(gate(h, make(r)), make(r) + 1)), epochs=3)


@scene
def one_layer_at_many_depths():
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True)

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.last = layer, nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, rows):
            h = rows[:, :12].reshape(rows.shape[0], 2, 6)
            for _ in range(5):
                h = self.layer(h)
                h = self.norm(h.transpose(1, 2)).transpose(1, 2)
            return self.last(h.mean(1))

    descend(Deep(), data=(series, labels), epochs=3)
    model = mlp(13)
    for _ in range(3):
        with torch.no_grad():
            print(f"{model(series).sum().item():.6g}")
    keep(model)


play()
