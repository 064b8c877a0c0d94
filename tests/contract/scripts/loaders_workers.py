"""Loaders with worker processes, and datasets that are streams."""

import itertools
import queue
import threading

import torch
from scenes import fit, mlp, play, scene, table
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

x, y = table()
offset = 0.0


class Rows(Dataset):
    """One row and its class, shifted by what worker_init_fn set."""

    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        return x[i] + offset, y[i]


def shift(worker):
    """A worker_init_fn with an effect that can be seen in the data."""
    global offset
    offset = 0.25


class Stream(IterableDataset):
    """Rows one after another; workers take every so many."""

    def __init__(self, n=40, share=True):
        self.n, self.share = n, share

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info and self.share else (0, 1)
        for i in range(first, self.n, step):
            yield x[i % 40], y[i % 40]


class Batches(IterableDataset):
    """A stream of ready-made batches."""

    def __iter__(self):
        for i in range(0, 40, 10):
            yield x[i : i + 10], y[i : i + 10]


class Endless(IterableDataset):
    """A stream without end, drawn from the common random stream."""

    def __iter__(self):
        while True:
            i = int(torch.randint(40, (1,)))
            yield x[i], y[i]


@scene
def stream():
    fit(DataLoader(Stream(), batch_size=12))
    fit(DataLoader(Stream(), batch_size=12, drop_last=True))
    fit(DataLoader(Stream(2), batch_size=12))


@scene
def stream_of_batches():
    fit(DataLoader(Batches(), batch_size=None))


@scene
def endless_stream():
    fit(DataLoader(Endless(), batch_size=8), steps=4)
    fit(itertools.islice(DataLoader(Endless(), batch_size=8), 3))


class ReadAhead(threading.Thread):
    """A thread that reads a loader while the script trains, as prefetch_generator does."""

    def __init__(self, batches):
        super().__init__(daemon=True)
        self.batches, self.queue = batches, queue.Queue(3)
        self.start()

    def run(self):
        for batch in self.batches:
            self.queue.put(batch)
        self.queue.put(None)

    def __iter__(self):
        return iter(self.queue.get, None)


@scene
def read_ahead_by_a_thread():
    """The last batch is smaller than the number of ranks."""
    loader = DataLoader(TensorDataset(x[:37], y[:37]), 12, shuffle=True)
    model = mlp()
    for ahead in (loader, iter(loader), loader):
        fit(ReadAhead(ahead), model)


@scene
def two_workers():
    loader = DataLoader(Rows(), 12, shuffle=True, num_workers=2)
    model = mlp()
    for _ in range(2):
        fit(loader, model)


@scene
def persistent_workers():
    loader = DataLoader(
        Rows(), 9, shuffle=True, num_workers=2, persistent_workers=True, worker_init_fn=shift, prefetch_factor=3
    )
    model = mlp()
    for _ in range(2):
        fit(loader, model)


@scene
def spawned_workers():
    loader = DataLoader(TensorDataset(x, y), 12, shuffle=True, num_workers=1, multiprocessing_context="spawn")
    fit(loader)
    print(loader.multiprocessing_context.get_start_method())


@scene
def pinned():
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True, pin_memory=True)
    fit((xb.to("cpu", non_blocking=True), yb) for xb, yb in loader)


@scene
def stream_with_workers():
    fit(DataLoader(Stream(), batch_size=6, num_workers=2))
    fit(DataLoader(Stream(11, share=False), batch_size=4, num_workers=1))


if __name__ == "__main__":
    play()
