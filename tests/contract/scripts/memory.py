"""Data sets that remember what was read, that print, or that seed the global streams while they are read."""

import random
import warnings

import numpy as np
import torch
from scenes import fit, play, scene, table
from torch.utils.data import DataLoader, Dataset, Subset

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
