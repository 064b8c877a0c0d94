"""Worker processes of loaders: how they are made, what they draw from, and when they end.

Where a data set turns out to have a memory, its workers have read later batches by then, each rank's its own samples of
them. So new workers take over at that batch, and read whole: until then there was nothing to remember.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import _utils as data_utils
from torch.utils.data import dataloader as dataloader_

from oars.adapt.torch.batches.reading import reading, share_key
from oars.adapt.torch.context import ctx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_Workers: Any = dataloader_._MultiProcessingDataLoaderIter
_with_workers = _Workers.__init__
_seeded_in: int | None = None


class Watchdog(data_utils.worker.ManagerWatchdog):
    """In a worker: is the rank that made it still there? PyTorch takes whoever is the parent now for that rank, which
    may have died since the fork: such a worker would wait for ever."""

    def __init__(self) -> None:
        super().__init__()
        if (made_by := multiprocessing.parent_process()) is not None and made_by.pid is not None:
            self.manager_pid = made_by.pid


def worker_number(inner: Callable[..., Any]) -> Any:
    """Around the warning of more workers than cores: a rank has its share of these, the script counts on all."""
    def check(self: DataLoader) -> None:
        if self.num_workers > (os.cpu_count() or 1):
            inner(self)

    return check


def workers_init(self: _MultiProcessingDataLoaderIter, loader: DataLoader) -> None:
    """Replaces ``__init__`` of iterators with workers: these are forked, whatever the script says, for what is patched
    here is not in processes that begin anew."""
    asked = loader.multiprocessing_context
    how = torch.multiprocessing if asked is None else asked
    if how.get_start_method() == "fork" or "fork" not in multiprocessing.get_all_start_methods():
        _with_workers(self, loader)
        return
    loader.multiprocessing_context = "fork"
    try:
        _with_workers(self, loader)
    finally:
        loader.multiprocessing_context = asked


def seed_worker() -> None:
    """Once in a worker: what it draws for own samples must differ from what other ranks' workers draw."""
    global _seeded_in
    if _seeded_in == os.getpid() or ctx.world.origin == 0:
        return
    _seeded_in = os.getpid()
    shift = ctx.world.origin * 1_000_003
    random.seed(random.getrandbits(64) + shift)
    torch.manual_seed((torch.initial_seed() + shift) % 2**63)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numpy.random.seed((int(numpy.random.randint(2**31)) + shift) % 2**32)


class _Rest:
    """Stands for the loader of an iterator that begins anew at these batches."""

    pin_memory_device = ""

    def __init__(self, iterator: Any, batches: Iterator[list]) -> None:
        self._iterator, self._index_sampler = iterator, batches
        self.turned = reading(iterator).place[1] % iterator._num_workers
        self.multiprocessing_context = multiprocessing.get_context("fork")
        self.generator = torch.Generator().manual_seed(iterator._base_seed % 2**63)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, "_" + name.lstrip("_"))


def begin_anew(iterator: Any, batch: list) -> None:
    """New workers, which know nothing: they read ``batch``, those that were on their way, and all later ones."""
    here, sampler, passes = reading(iterator), iterator._index_sampler, ctx.iterations
    on_their_way = [list(cut.indices) for cut in here.queue if cut is not None]
    iterator._shutdown_workers()
    rest: Any = _Rest(iterator, itertools.chain([batch], on_their_way, iterator._sampler_iter))
    share_key(rest, here.loader)
    _with_workers(iterator, rest)
    iterator._index_sampler = sampler
    ctx.iterations, reading(iterator).place, reading(iterator).turned = passes, here.place, rest.turned


def turn(iterator: Any, loader: Any) -> None:
    """The worker whose turn it is on one process is the first to get a batch; in the next epoch it is the first one."""
    by = loader.turned if isinstance(loader, _Rest) else -reading(iterator).turned
    if by:
        for queues in (iterator._index_queues, iterator._workers):
            queues[:] = queues[by:] + queues[:by]
        reading(iterator).turned = 0
