"""What a batch can be: nested, named, ragged, strings; and what a collate_fn can do to it."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scenes import fit, keep, mlp, play, say, scene, table
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

x, y = table(30)


class Of(Dataset):
    """A dataset made of a function of the index."""

    def __init__(self, get, n=30):
        self.get, self.n = get, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.get(i)


def train(loader, loss_of):
    """Train a small network with a loss that knows how to read the batch."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    for batch in loader:
        loss = loss_of(model, batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def dicts():
    get = Of(lambda i: {"x": x[i], "meta": {"label": y[i], "name": f"row {i}"}, "weight": float(i % 3)})

    def loss_of(model, batch):
        print(sorted(batch), batch["meta"]["name"][:2], len(batch["meta"]["name"]), batch["weight"].dtype)
        each = F.cross_entropy(model(batch["x"]), batch["meta"]["label"], reduction="none")
        return (each * batch["weight"]).mean()

    train(DataLoader(get, 8, shuffle=True), loss_of)


Pair = namedtuple("Pair", "x y")


@scene
def namedtuples():
    def loss_of(model, batch):
        print(type(batch).__name__, batch._fields, len(batch.x))
        return F.cross_entropy(model(batch.x), batch.y)

    train(DataLoader(Of(lambda i: Pair(x[i], y[i])), 8), loss_of)


@scene
def nested_tuples():
    def loss_of(model, batch):
        (a, (b, number)), target = batch
        print(type(batch).__name__, a.shape, b.shape, number)
        return F.cross_entropy(model(torch.cat([a, b], dim=1)), target)

    train(DataLoader(Of(lambda i: ((x[i, :2], (x[i, 2:], i)), y[i])), 8), loss_of)


@dataclass
class Batch:
    """What a collate_fn may return instead of a tuple."""

    x: torch.Tensor
    y: torch.Tensor
    names: list

    def pin_memory(self):
        return self


def to_batch(rows):
    xs, ys = default_collate(rows)
    return Batch(xs, ys, [f"{int(v)}" for v in ys])


@scene
def dataclasses():
    def loss_of(model, batch):
        print(type(batch).__name__, len(batch.names), batch.names[0])
        return F.cross_entropy(model(batch.x), batch.y)

    train(DataLoader(Of(lambda i: (x[i], y[i])), 8, collate_fn=to_batch), loss_of)


@scene
def strings():
    words = ["port", "starboard", "bow", "stern"]

    def loss_of(model, batch):
        names, target = batch
        print(names)
        rows = torch.stack([torch.tensor([float(len(n)), *map(float, n.encode()[:3]), 1, 0]) / 100 for n in names])
        return F.cross_entropy(model(rows), target)

    train(DataLoader(Of(lambda i: (words[i % 4], y[i])), 8, shuffle=True), loss_of)


@scene
def ragged_lists():
    """collate_fn=list: the loop gets a list of samples of different lengths and works through it."""

    def loss_of(model, batch):
        print([len(row) for row, _ in batch])
        total = 0.0
        for row, target in batch:
            pooled = torch.stack([row.mean(), row.sum(), row.max(), row.min(), row[0], row[-1]])
            total = total + F.cross_entropy(model(pooled), target)
        return total / len(batch)

    train(DataLoader(Of(lambda i: (x.view(-1)[i : i + 2 + i % 5], y[i]), 12), 5, collate_fn=list), loss_of)


def padded(rows):
    """Pads to the longest row of the batch: not row by row."""
    xs, ys = zip(*rows, strict=True)
    return pad_sequence(xs, batch_first=True), torch.tensor([len(v) for v in xs]), torch.stack(ys)


def longest_first(rows):
    """Sorts the batch by length: not row by row either."""
    return padded(sorted(rows, key=lambda row: -len(row[0])))


class Reader(nn.Module):
    """A GRU over padded sequences."""

    def __init__(self, packed):
        super().__init__()
        self.packed = packed
        self.gru = nn.GRU(1, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, seq, lengths):
        seq = seq.unsqueeze(-1)
        if self.packed:
            seq = pack_padded_sequence(seq, lengths, batch_first=True)
            hidden, _ = pad_packed_sequence(self.gru(seq)[0], batch_first=True)
        else:
            hidden, _ = self.gru(seq)
        mask = torch.arange(hidden.shape[1])[None, :] < lengths[:, None]
        return self.out((hidden * mask.unsqueeze(-1)).sum(1) / lengths[:, None])


def read(collate, packed):
    """Train a Reader on rows of 1 to 7 numbers."""
    rows = Of(lambda i: (x.view(-1)[i : i + 1 + (i * 5) % 7], y[i]))
    model = Reader(packed)
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for seq, lengths, target in DataLoader(rows, 8, shuffle=True, collate_fn=collate):
        print(tuple(seq.shape), lengths.tolist())
        loss = F.cross_entropy(model(seq, lengths), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def padding_collate():
    read(padded, packed=False)


@scene
def sorting_collate():
    read(longest_first, packed=True)


@scene
def row_by_row_collate():
    def collate(rows):
        return torch.stack([r * 2 for r, _ in rows]), torch.tensor([int(t) for _, t in rows])

    fit(DataLoader(Of(lambda i: (x[i], y[i])), 8, shuffle=True, collate_fn=collate))


@scene
def centring_collate():
    """Subtracts the batch's mean: the kind of collate_fn that a cut would silently change."""

    def collate(rows):
        xs, ys = default_collate(rows)
        return xs - xs.mean(0), ys

    fit(DataLoader(Of(lambda i: (x[i], y[i])), 8, shuffle=True, collate_fn=collate))


@scene
def drawing_collate():
    """Masks drawn in the collate_fn, from the common streams and from a generator of its own; and a count that is
    the same for all parts of the first batch alone."""
    own = np.random.default_rng(3)

    def collate(rows):
        xs, ys = default_collate(rows)
        hidden = torch.rand(xs.shape) < 0.3
        hidden[: len(rows) // 2] |= torch.from_numpy(own.random((len(rows) // 2, 6)) < 0.3)
        return xs.masked_fill(hidden, 0), ys

    def counting(rows):
        return (*default_collate([r[:2] for r in rows]), sum(r[2] for r in rows))

    fit(DataLoader(Of(lambda i: (x[i], y[i])), 8, shuffle=True, collate_fn=collate))
    for _, target, late in DataLoader(Of(lambda i: (x[i], y[i], int(i > 9))), 8, collate_fn=counting):
        print(target.sum().item(), late)


@scene
def constant_beside_the_rows():
    """A batch that also holds something that has no rows, and something that has as many by accident."""

    def collate(rows):
        xs, ys = default_collate(rows)
        return {"x": xs, "y": ys, "count": len(rows), "scale": torch.tensor(0.5), "eye": torch.eye(6), "none": None}

    def loss_of(model, batch):
        print(batch["count"], batch["scale"].item(), batch["eye"].shape, batch["none"])
        return batch["scale"] * F.cross_entropy(model(batch["x"] @ batch["eye"]), batch["y"])

    train(DataLoader(Of(lambda i: (x[i], y[i])), 6, collate_fn=collate), loss_of)


@scene
def channels_first_collate():
    """The batch is dimension 1: (time, batch, features)."""

    def collate(rows):
        xs, ys = default_collate(rows)
        return xs.view(len(rows), 3, 2).transpose(0, 1).contiguous(), ys

    rnn, out = nn.RNN(2, 5), nn.Linear(5, 3)
    opt = torch.optim.SGD([*rnn.parameters(), *out.parameters()], lr=0.3)
    for seq, target in DataLoader(Of(lambda i: (x[i], y[i])), 8, collate_fn=collate):
        print(tuple(seq.shape))
        loss = F.cross_entropy(out(rnn(seq)[0][-1]), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(rnn, out)


play()
