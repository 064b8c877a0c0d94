"""What depends on the whole batch though it looks as if it took row by row: views, sizes, tables, norms."""

import itertools
import math
import operator
import statistics
import struct

import numpy as np
import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene
from small import Around, batches, descend, few_x, few_y
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@scene
def views_of_a_batch():
    """Changed through a part of it."""
    changes = {
        "chunk": lambda b: b.chunk(2)[0].zero_(),
        "rows": lambda b: [row.clamp_(-0.5, 0.5) for row in b],
        "flat": lambda b: b.view(-1)[3:5].fill_(9),
        "transposed": lambda b: b.t()[0].zero_(),
        "first": lambda b: b[0].fill_(7),
        "data": lambda b: b.data[2].fill_(8),
        "corner": lambda b: b.detach()[3:, 1].add_(5),
        "column": lambda b: b[:, 1][2:4].mul_(30),
    }
    for name, change in changes.items():
        xb = next(iter(batches()))[0]
        change(xb)
        print(name, f"{xb.sum().item():.6g} {xb.mul(xb).sum().item():.6g}", xb[0, 0].item())


@scene
def indices_that_are_rows():
    for size in (2, 3, 4, 10):
        xb, yb = next(iter(batches(size)))
        print(xb.index_select(1, yb).shape, f"{xb.index_select(1, yb).sum().item():.6g}", xb[:, yb].shape)
        print(xb[:, 1].tolist(), f"{torch.outer(xb[:, 0], xb[:, 1]).sum().item():.6g}")


@scene
def tables_that_mind_the_batch():
    """Entries that are looked up are normalised in place; gradients are scaled by how often they are."""
    ids = torch.randint(0, 15, (40, 4))
    for layer in (nn.Embedding(15, 6, max_norm=0.7), nn.Embedding(15, 6, scale_grad_by_freq=True),
                  nn.EmbeddingBag(15, 6, max_norm=0.7), nn.EmbeddingBag(15, 6, scale_grad_by_freq=True)):
        descend(nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3)), (ids, few_y))


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
def the_size_behind_a_gate_that_opens_later():
    """While the gate is zero, results do not show that the size is used: the logarithm itself must be noticed."""
    model, calls = Around(lambda m, h, r: h * (1 + m.gate * math.log(r.shape[0]))), itertools.count()
    model.gate = nn.Parameter(torch.zeros(1), requires_grad=False)
    descend(model, epochs=4, update=lambda *_: model.gate.requires_grad_(next(calls) > 3))


# What C code makes of the batch's size: no method of the number is called.
BY_C = [
    lambda m, h, r: h * len(range(r.shape[0]))/10,
    lambda m, h, r: h * float(np.ones(r.shape[0]).sum())/10,
    lambda m, h, r: h * float('%d' % r.shape[0])/10,  # noqa: UP031
    lambda m, h, r: h * float(f"{r.shape[0]}")/10,
    lambda m, h, r: h * math.comb(r.shape[0], 2)/50,
    lambda m, h, r: h * len(str(r.shape)),
    lambda m, h, r: h * len(str(tuple(r.shape))),
    lambda m, h, r: h * sum(0.1 for _ in range(r.shape[0])),
    lambda m, h, r: h * len([0]*r.shape[0])/10,
    lambda m, h, r: h * len(bytes(r.shape[0]))/10,
    lambda m, h, r: h * r.shape.numel()/100,
    lambda m, h, r: h * float(np.prod(r.shape))/100,
    lambda m, h, r: h * math.prod(r.shape)/100,
    lambda m, h, r: h * r.t().contiguous().stride()[0]/10,
    lambda m, h, r: h * r.t().contiguous().stride(0)/10,
    lambda m, h, r: h * r.nelement()/100,
    lambda m, h, r: h * len(r.contiguous().untyped_storage())/1000,
    lambda m, h, r: h * math.factorial(r.shape[0]%5),
    lambda m, h, r: h * float(np.linspace(0, 1, r.shape[0])[1]),
    lambda m, h, r: h * len(list(itertools.islice(itertools.count(), r.shape[0])))/10,
    lambda m, h, r: h * operator.index(r.shape[0])/10,
    lambda m, h, r: h * struct.unpack("i", struct.pack("i", r.shape[0]))[0]/10,
    lambda m, h, r: h * statistics.mean([r.shape[0], 1]),
    lambda m, h, r: h * sum(r.shape)/10,
    lambda m, h, r: h * max(r.shape)/10,
    lambda m, h, r: h * math.gcd(r.shape[0], 4),
    lambda m, h, r: h * {10:2.0}.get(r.shape[0], 1.0),
    lambda m, h, r: h * (2.0 if r.shape==(10, 6) else 1.0),
    lambda m, h, r: h * (2.0 if r.shape[0] in {10, 20} else 1.0),
    lambda m, h, r: h * (2.0 if r.shape[0] in [10, 20] else 1.0),
    lambda m, h, r: h * np.arange(100)[r.shape[0]]/10.,
    lambda m, h, r: h * list(range(100))[r.shape[0]]/10,
    lambda m, h, r: h * r.nbytes/1000,
    lambda m, h, r: h * r.__len__()/10,
    lambda m, h, r: h * torch.eye(r.shape[0]).sum()/10,
    lambda m, h, r: h * torch.arange(r.shape[0]).float().mean(),
    lambda m, h, r: h * torch.linspace(0, 1, r.shape[0])[1],
    lambda m, h, r: h * float(np.int64(r.shape[0]))/10,
    lambda m, h, r: h * len(torch.zeros(r.shape[0]).tolist())/10,
]


@scene
def the_size_read_by_c_code():
    for after in BY_C:
        descend(Around(after), epochs=1)


@scene
def sizes_that_are_left_behind():
    """In a list, a dictionary and a global; and counters that stay those of one call."""
    def after(m, h, r):
        seen.append(1)
        sizes[0] = len(range(r.shape[0]))
        m.kept["size"] = operator.index(r.shape[0])
        return h

    for _ in range(2):
        seen, sizes, model = [], [0], Around(after)
        model.kept = {}
        descend(model, epochs=2)
        print(len(seen), sizes, model.kept)


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

    for xb, yb in [batch for _ in range(2) for batch in DataLoader(TensorDataset(few_x.clone(), few_y), 14)]:
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


play()
