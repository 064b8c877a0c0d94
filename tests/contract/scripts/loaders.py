"""Loaders in the main process: every way of choosing which samples make a batch."""

import itertools
import queue
import threading

import torch
import torch.nn.functional as F
from scenes import fit, keep, mlp, play, say, scene, table
from torch.utils import data
from torch.utils.data import DataLoader, TensorDataset

x, y = table()
samples = TensorDataset(x, y)


class Rows(data.Dataset):
    """A map-style dataset that counts nothing and hides nothing: one row and its class."""

    def __init__(self, n=40):
        self.x, self.y = table(n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


@scene
def in_order():
    loader = DataLoader(samples, batch_size=16)
    print(len(loader), len(loader.dataset), loader.batch_size)
    fit(loader)


@scene
def shuffled_epochs():
    loader = DataLoader(Rows(), batch_size=12, shuffle=True)
    model = mlp()
    for epoch in range(3):
        print("epoch", epoch)
        fit(loader, model)


@scene
def drop_last():
    loader = DataLoader(samples, batch_size=12, shuffle=True, drop_last=True)
    print(len(loader))
    fit(loader)


def ahead(batches, of_the_thread):
    """Batches from a thread that reads beside the training; it makes the iterator itself, or is given one."""
    read = queue.Queue(2)
    source = batches if of_the_thread else iter(batches)
    threading.Thread(target=lambda: [read.put(batch) for batch in source] + [read.put(None)], daemon=True).start()
    return iter(read.get, None)


@scene
def read_in_a_thread():
    model = mlp()
    for of_the_thread in (True, False):
        g = torch.Generator().manual_seed(3)
        fit(ahead(DataLoader(Rows(), batch_size=12, shuffle=True, generator=g), of_the_thread), model)


@scene
def own_generator():
    g = torch.Generator().manual_seed(3)
    loader = DataLoader(samples, batch_size=16, shuffle=True, generator=g)
    model = mlp()
    for _ in range(2):
        fit(loader, model)
    print(torch.rand(1, generator=g).item())


@scene
def samplers():
    fit(DataLoader(samples, 16, sampler=data.SequentialSampler(samples)))
    fit(DataLoader(samples, 16, sampler=data.RandomSampler(samples)))
    fit(DataLoader(samples, 16, sampler=data.SubsetRandomSampler(range(5, 28))))
    fit(DataLoader(samples, 16, sampler=list(range(39, -1, -2))))


@scene
def with_replacement():
    fit(DataLoader(samples, 16, sampler=data.RandomSampler(samples, replacement=True, num_samples=50)))
    weights = torch.linspace(0.1, 1, 40)
    fit(DataLoader(samples, 16, sampler=data.WeightedRandomSampler(weights, 30, replacement=True)))
    fit(DataLoader(samples, 16, sampler=data.WeightedRandomSampler(weights, 30, replacement=False)))


class Forever(data.Sampler):
    """Never ends: a fresh permutation after another."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        while True:
            yield from torch.randperm(self.n).tolist()


@scene
def infinite_sampler():
    fit(DataLoader(samples, 16, sampler=Forever(40)), steps=6)


class Buckets(data.Sampler):
    """A batch sampler with batches of many sizes."""

    def __len__(self):
        return 5

    def __iter__(self):
        order = torch.randperm(40).tolist()
        for begin, end in [(0, 13), (13, 14), (14, 20), (20, 37), (37, 40)]:
            yield order[begin:end]


@scene
def batch_samplers():
    loader = DataLoader(samples, batch_sampler=data.BatchSampler(data.RandomSampler(samples), 16, drop_last=True))
    print(len(loader))
    fit(loader)
    loader = DataLoader(Rows(), batch_sampler=Buckets())
    print(len(loader))
    fit(loader)


@scene
def batch_size_none():
    # The dataset is asked for a whole batch at once ...
    fit(DataLoader(samples, batch_size=None, sampler=data.BatchSampler(data.SequentialSampler(samples), 16, False)))
    # ... or for one sample, which is then no batch at all.
    model = mlp()
    for xi, yi in itertools.islice(DataLoader(Rows(), batch_size=None), 4):
        loss = F.cross_entropy(model(xi), torch.tensor(yi))
        loss.backward()
        say(loss)


@scene
def one_batch_only():
    loader = DataLoader(samples, 16, shuffle=True)
    xb, yb = next(iter(loader))
    print(xb.shape, yb.shape, xb.dtype, yb.tolist())
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):  # the old trick: overfit a single batch
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def iterator_by_hand():
    loader = DataLoader(samples, 16, shuffle=True)
    batches = iter(loader)
    model = mlp()
    for _ in range(7):
        try:
            xb, yb = next(batches)
        except StopIteration:
            batches = iter(loader)
            xb, yb = next(batches)
        fit([(xb, yb)], model)
    fit(itertools.islice(itertools.cycle(loader), 5), model)


@scene
def left_early():
    loader = DataLoader(samples, 8, shuffle=True)
    fit(loader, steps=2)
    fit(loader, steps=1)
    fit(loader)


@scene
def two_loaders():
    a = DataLoader(samples, 8, shuffle=True)
    b = DataLoader(Rows(24), 8, shuffle=True)
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for (xa, ya), (xb, yb) in zip(a, b, strict=False):
        loss = F.cross_entropy(model(xa), ya) + 0.5 * F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def parts_of_datasets():
    train, test = data.random_split(samples, [28, 12])
    model = fit(DataLoader(train, 16, shuffle=True))
    both = data.ConcatDataset([data.Subset(samples, range(7)), TensorDataset(*table(9))])
    right = seen = 0
    with torch.no_grad():
        for xb, yb in DataLoader(test, 5):
            right += (model(xb).argmax(1) == yb).sum().item()
            seen += len(yb)
        print("right", right, "of", seen)
        for xb, yb in DataLoader(both, 6):
            say(F.cross_entropy(model(xb), yb))


@scene
def tiny():
    """A last batch, and a dataset, with fewer rows than ranks."""
    fit(DataLoader(Rows(17), 8))
    fit(DataLoader(Rows(2), 8, shuffle=True))
    fit(DataLoader(Rows(1), 8))
    fit(DataLoader(samples, batch_size=1), steps=3)
    fit(DataLoader(samples, batch_size=3), steps=3)


@scene
def list_of_samples():
    pairs = [(x[i].numpy(), y[i].item()) for i in range(20)]  # any object with len and [] is a dataset
    fit(DataLoader(pairs, 8, shuffle=True))


@scene
def evaluation():
    """Train, then an accuracy and a mean loss over a test set, as every tutorial does."""
    model = fit(DataLoader(samples, 16, shuffle=True))
    model.eval()
    total, right, guesses = 0.0, 0, []
    test = DataLoader(Rows(23), 5)
    with torch.no_grad():
        for xb, yb in test:
            out = model(xb)
            total += F.cross_entropy(out, yb, reduction="sum").item()
            pred = out.argmax(dim=1, keepdim=True)
            right += pred.eq(yb.view_as(pred)).sum().item()
            guesses += pred.squeeze(1).tolist()
    print(f"mean {total / len(test.dataset):.9g} right {right}/{len(test.dataset)} ({100.0 * right / 23:.1f}%)")
    print(guesses)


play()
