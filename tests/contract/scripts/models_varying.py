"""Models that do not do the same in every call: by chance, by a switch, by what they are given."""

import contextvars
import enum
import os
import random
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from scenes import mlp, play, say, scene
from small import Around, Two, batches, descend, few_x, few_y, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@scene
def drop_path():
    """Whole rows dropped, as timm does; by chance none in the first batches."""
    train(Two(lambda m, h: h * h.new_empty(h.shape[0], 1).bernoulli_(0.95) / 0.95), epochs=5)


@scene
def sometimes_mixed():
    """Rows mix only when a coin says so."""
    train(Two(lambda m, h: h - h.mean(0) if random.random() < 0.2 else h), epochs=5)


@scene
def layer_drop():
    train(Two(lambda m, h: h if random.random() < 0.3 else F.dropout(h, 0.2)), epochs=4)


@scene
def dropout_of_weights():
    train(Two(lambda m, h: F.dropout(h @ F.dropout(torch.eye(16), 0.1), 0.1)), epochs=3)


@scene
def some_labels_dropped():
    train(Two(lambda m, h: torch.where((torch.rand(h.shape[0]) < 0.05)[:, None], torch.zeros_like(h), h)), epochs=4)


MIX, SETTINGS, CONFIG = False, {"mix": False, "deep": {"mix": False}}, SimpleNamespace(mix=False, count=0)


def helped(h):
    """A function of the script's, with a switch of its own."""
    return h - h.mean(0) if SETTINGS["deep"]["mix"] else h


@scene
def switches_that_no_module_has():
    """A global, an entry of a dictionary, a field, a class's, a closure's, a module's dictionary: each on for a bit."""
    global MIX
    mix = False

    def between(m, h):
        CONFIG.count += 1  # a counter is none
        h = h - h.mean(0) if MIX or SETTINGS["mix"] or CONFIG.mix or mix else h
        h = h - 0.5 * h.mean(0) if m.settings["mix"] or m.kept.mix or type(m).switch else h
        return helped(h)

    class Switched(Two):
        switch = False

    model = Switched(between)
    model.settings, model.kept = {"mix": False}, SimpleNamespace(mix=False)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    step = 0
    for _ in range(8):
        for xb, yb in batches():
            step += 1
            MIX, mix, Switched.switch = 9 < step < 12, 25 < step < 28, step in (35, 36)
            SETTINGS["mix"], SETTINGS["deep"]["mix"], CONFIG.mix = step in (13, 14), step == 20, step == 22
            model.settings["mix"], model.kept.mix = step in (30, 31), step == 33
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)


def unchanged(h):
    return h


def centred(h):
    return h - h.mean(0)


after, STEPS, MIXING = unchanged, [], contextvars.ContextVar("mixing", default=False)


class Hidden:
    __slots__ = ("on",)


@scene
def switches_of_any_kind():
    """A function that is replaced, a list, a variable of the process, a file, a slot, a context: each on for a bit."""
    global after
    hidden, calls = Hidden(), [0]

    def between(m, h):
        calls[0] += 1
        h = h - h.mean(0) if os.environ.get("MIX") or os.path.exists("mix") or hidden.on or MIXING.get() else h
        for step in STEPS:
            h = step(h)
        return after(h) * (h.shape.numel() / 100 if len(STEPS) == 2 else 1)

    hidden.on = False
    model = Two(between)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step, (xb, yb) in enumerate(batch for _ in range(7) for batch in batches()):
        after = centred if step in (5, 6) else unchanged
        STEPS[:] = [centred] if step == 9 else [unchanged, unchanged] if step == 11 else []
        hidden.on = step in (19, 20)
        os.environ.update({"MIX": "1"}) if step in (12, 13) else os.environ.pop("MIX", None)
        open("mix", "w").close() if step == 17 else os.path.exists("mix") and os.remove("mix")
        MIXING.set(step in (22, 23))
        with torch.no_grad():
            print(f"{model(xb).sum().item():.6g}")
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    print(calls)


@scene
def inference():
    """A model that asks whether it is on."""
    model = Two(lambda m, h: h - h.max(0).values if torch.is_inference_mode_enabled() else h)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for xb, _ in batches():
                print(f"{model(xb).sum().item():.6g}")


@scene
def stages():
    """Switched by an attribute, by an int, by a float."""

    def between(m, h, stage, alpha):
        h = h - h.mean(0, keepdim=True) if getattr(m, "centre", False) else h
        h = h / h.norm(dim=0, keepdim=True) if stage == 1 else h
        return (1 - alpha) * h + alpha * h.flip(0) if alpha > 0 else h

    model = Two(between)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    step = 0
    for _ in range(5):
        for xb, yb in batches():
            step += 1
            model.centre = 9 < step < 13
            loss = F.cross_entropy(model(xb, int(17 < step < 21), 0.3 if 23 < step < 26 else 0.0), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)


@scene
def lengths_in_a_list():
    """All alike in the first batches, as bucketing gives them."""
    net = nn.ModuleDict({"table": nn.Embedding(20, 8), "last": nn.Linear(8, 2)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, ids, lengths):
            keep = (torch.arange(ids.size(1))[None] < torch.tensor(lengths)[:, None]).float()
            return self.net["last"]((self.net["table"](ids) * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))

    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(10):
        ids, labels = torch.randint(0, 20, (6, 5)), torch.randint(0, 2, (6,))
        loss = F.cross_entropy(model(ids, [5] * 6 if step < 5 else [5, 4, 4, 3, 2, 1]), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)


@scene
def what_forward_tells():
    """A forward that prints its batch, and one that keeps its size."""

    def telling(m, h):
        print("in the model:", h.size(), f"{h.shape}", f"{h.size(0):d}")
        return h

    def keeping(m, h):
        m.rows, m.kept_shape = h.size(0), h.shape
        return h

    for between in (telling, keeping):
        model = Two(between)
        for xb, _ in batches():
            out = model(xb)
            print(f"{out.sum().item() / getattr(model, 'rows', 1):.6g}", getattr(model, "kept_shape", ""))


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
        loader = DataLoader(TensorDataset(few_x, few_y), 14)
        for step, (xb, yb) in enumerate([batch for _ in range(4) for batch in loader]):
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


play()
