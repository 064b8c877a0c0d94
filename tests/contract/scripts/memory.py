"""Data sets that remember what was read, that print, or that seed the global streams while they are read."""

import functools
import itertools
import logging
import random
import warnings

import numpy as np
import torch
from scenes import fit, play, scene, table
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

x, y = table()
COUNTS = {"reads": 0}


class Rows(Dataset):
    def __init__(self):
        self.x, self.y = x.clone(), y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.read(i)
        return self.x[i], self.y[i]

    def read(self, i):
        pass


def twice(data, workers=(0,), **how):
    for k in workers:
        batches = DataLoader(data, 9, num_workers=k, **how)
        model = fit(batches)
        fit(batches, model)
    return data


@scene
def counters():
    class Counted(Rows):
        def __init__(self):
            super().__init__()
            self.reads = 0

        def __getitem__(self, i):
            self.reads += 1
            return self.x[i] + 0.01 * self.reads, self.y[i]

    print(twice(Counted()).reads)
    print(twice(Counted(), (2,)).reads)


@scene
def caches_and_lists():
    class Cached(Rows):
        def __init__(self):
            super().__init__()
            self.cache, self.bad, self.order = {}, [], torch.zeros(3)

        def read(self, i):
            self.cache[i] = self.cache.get(i, 0) + 1
            if i % 7 == 3:
                self.bad.append(i)
            COUNTS["reads"] += 1

    data = twice(Cached(), shuffle=True)
    print(len(data.cache), sorted(data.cache.values())[-1], data.bad, COUNTS)
    data = twice(Subset(Cached(), range(25))).dataset
    print(len(data.cache), data.bad, COUNTS)


@scene
def running_means_that_feed_the_data():
    class Running(Rows):
        def __init__(self):
            super().__init__()
            self.mean, self.seen = torch.zeros(6), np.zeros(1)

        def __getitem__(self, i):
            self.mean.mul_(0.9).add_(self.x[i], alpha=0.1)
            self.seen += 1
            return self.x[i] - self.mean, self.y[i]

    data = twice(Running())
    print(f"{data.mean.sum().item():.5f} {data.seen}")


@scene
def seeds_of_the_global_streams():
    class Seeded(Rows):
        def __getitem__(self, i):
            torch.manual_seed(i)
            return self.x[i] + 0.1 * torch.randn(6), self.y[i]

    class Others(Rows):
        def __getitem__(self, i):
            random.seed(i)
            np.random.seed(i)
            return self.x[i] + random.random() + np.random.rand(), self.y[i].clone()

    twice(Seeded(), (0, 2), shuffle=True)
    twice(Others(), shuffle=True)


@scene
def what_is_printed():
    class Told(Rows):
        def read(self, i):
            print("reads", i)
            if i == 5:
                warnings.warn("five", stacklevel=1)

    twice(Told())


@scene
def memories_that_begin_later():
    """A list of bad samples, and a line of text, which no sample of the first batches has a part in."""
    class Late(Rows):
        def __init__(self):
            super().__init__()
            self.bad = []

        def __getitem__(self, i):
            if i in (23, 31, 32):
                self.bad.append(i)
                print("bad", i)
            return self.x[i] + 0.01 * len(self.bad), self.y[i]

    print(twice(Late()).bad, twice(Late(), shuffle=True).bad)


@scene
def with_a_collate_of_its_own():
    class Counted(Rows):
        reads = 0

        def __init__(self):
            super().__init__()
            self.reads = 0

        def read(self, i):
            self.reads += 1

    def stack(samples):
        return torch.stack([a for a, _ in samples]), torch.stack([b for _, b in samples])

    print(twice(Counted(), collate_fn=stack).reads)


NUMBERS, CALLS = itertools.count(), [0]


def count_up():
    CALLS[0] += 1
    return CALLS[0]


@functools.lru_cache(None)
def loaded(i):
    return x[i] + 0.001 * count_up()


class Slots:
    __slots__ = ("reads",)


class Chain:
    def __init__(self, left):
        self.next, self.bad = Chain(left - 1) if left else None, []


@scene
def whatever_the_code_can_name():
    """A function's list, a class's dictionary, a slot, iterators, a cache of functools, generators, a long chain."""
    class Named(Rows):
        cache = {}

        def __init__(self, work):
            super().__init__()
            self.work, self.slots, self.numbers, self.chain = work, Slots(), iter(range(1000)), Chain(6)
            self.slots.reads = 0
            self.numpy, self.torch = np.random.default_rng(3), torch.Generator().manual_seed(3)
            self.random, self.drawn = random.Random(3), (random.random() for _ in range(1000))

        def __getitem__(self, i):
            return self.x[i] + 0.01 * self.work(self, i), self.y[i]

    def slot(data, i):
        data.slots.reads += 1
        return data.slots.reads

    def deep(data, i):
        last = data.chain
        while last.next:
            last = last.next
        if i % 7 == 3:
            last.bad.append(i)
        return len(last.bad)

    for work in (lambda d, i: count_up(), lambda d, i: Named.cache.setdefault(i, len(Named.cache)), slot, deep,
                 lambda d, i: next(NUMBERS), lambda d, i: next(d.numbers), lambda d, i: loaded(i).sum(),
                 lambda d, i: d.numpy.normal(), lambda d, i: torch.randn(1, generator=d.torch),
                 lambda d, i: d.random.random(), lambda d, i: next(d.drawn)):
        data = Named(work)
        for _ in range(2):
            fit(DataLoader(data, 9, shuffle=True), steps=3)
    print(CALLS, len(Named.cache), next(NUMBERS), loaded.cache_info())


@scene
def networks_that_learn_from_what_is_read():
    class Learning(Rows):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
            self.opt = torch.optim.SGD(self.net.parameters(), 0.01)

        def __getitem__(self, i):
            loss = self.net(self.x[i].repeat(4, 1) + torch.arange(4)[:, None]).square().mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            return self.net(self.x[i : i + 1].repeat(4, 1))[0].detach(), self.y[i]

    data = twice(Learning())
    print(data.net[1].num_batches_tracked, f"{data.net[0].weight.sum().item():.5f}")


@scene
def memories_that_begin_later_in_workers():
    """Other workers take over, which go on from there; those that stay for several epochs, too."""
    class Late(Rows):
        def __init__(self):
            super().__init__()
            self.bad = []

        def __getitem__(self, i):
            if i in (23, 31, 32):
                self.bad.append(i)
            return self.x[i] + 0.01 * len(self.bad), self.y[i]

    for how in ({}, {"persistent_workers": True}, {"collate_fn": torch.utils.data.default_collate}):
        batches = DataLoader(Late(), 6, num_workers=2, shuffle=True, **how)
        for _ in range(3):
            fit(batches)


@scene
def what_is_logged():
    """By samples of every rank, into a file."""
    log = logging.getLogger("samples")
    log.propagate, log.level = False, logging.INFO
    log.addHandler(logging.FileHandler("samples.log"))

    class Logged(Rows):
        def read(self, i):
            if i % 3 == 2:
                log.info("sample %d", i)

    twice(Logged())
    logging.shutdown()


@scene
def collates_that_remember():
    """A number that is counted up, and a mean that runs."""
    class Centred:
        def __init__(self):
            self.mean, self.calls = 0.0, 0

        def __call__(self, samples):
            rows, classes = torch.utils.data.default_collate(samples)
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * float(rows.mean())
            return rows - self.mean, classes

    collate = Centred()
    twice(TensorDataset(x, y), collate_fn=collate)
    print(collate.calls, f"{collate.mean:.6f}")


@scene
def files_that_are_opened_late_are_no_memory():
    class Late(Rows):
        def __init__(self):
            super().__init__()
            self.file = None

        def read(self, i):
            self.file = self.file or open(__file__)

    twice(Late()).file.close()


play()
