"""DataLoaders: each rank reads its own samples of every global batch, the script sees the global batch.

The sampler runs on every rank alike; its batches of indices are cut as they leave for the fetcher (in this process or
in a worker). What a custom ``collate_fn`` makes of some samples must be the rows it would make of them in the whole
batch: first batches are fetched whole and compared, later ones must agree in shape between ranks (for ranks that are
apart, which ask nobody, it is tried on single samples at first). If it pads, sorts or mixes, whole batches are loaded
from then on and cut where a model is called, as hand-made batches are. So are those of a ``collate_fn`` that draws
random numbers, of a dataset that writes files when it is read (a cache, filled on first use), of iterable datasets and
of ``batch_size=None``, and what is read in a thread.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import _utils as data_utils
from torch.utils.data import dataloader as dataloader_

from oars import debug
from oars.adapt import files
from oars.adapt.python import random as random_
from oars.adapt.torch.batches import collate
from oars.adapt.torch.batches.collate import Cut
from oars.adapt.torch.context import ctx, offsets_of, on_every_rank, own
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.rows.mirror import recent
from oars.adapt.torch.rows.tensor import Rows
from oars.engine.retry import until_none_is_lost
from oars.engine.world import RankLost

_Iter: Any = dataloader_._BaseDataLoaderIter
_Workers: Any = dataloader_._MultiProcessingDataLoaderIter
_Fetcher: Any = data_utils.fetch._MapDatasetFetcher
_DEFAULT = (data_utils.collate.default_collate, data_utils.collate.default_convert)
_plain = {name: getattr(_Iter, name) for name in ("__init__", "_reset", "_next_index", "__next__")}
_with_workers = _Workers.__init__
_fetch = _Fetcher.fetch
_iter, _len = DataLoader.__iter__, DataLoader.__len__
UNKNOWN, BY_ROW, WHOLE = "unknown", "by row", "whole"
_ways: WeakKeyDictionary[Key, tuple[str, Any]] = WeakKeyDictionary()  # how to load, and what a batch is made of
_LEDGER = bool(os.environ.get("OARS_LEDGER"))  # write down which rank learnt from which sample, see steps.py
_seeded_in: int | None = None


def fetch(self: Any, index: Any) -> Any:
    """Replaces the map-style fetcher's, here and in workers."""
    if not isinstance(index, Cut):
        return _fetch(self, index)
    if index.whole:
        return collate.probe(self, index)
    if not index.mine():
        return collate.NOTHING
    before = files.changes()
    if get_worker_info() is not None:
        _seed_worker()
        data = _fetch(self, index.mine())
    else:
        with ctx.private:
            data = _fetch(self, index.mine())
    return data if files.changes() == before else collate.Wrote(data)


def _seed_worker() -> None:
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


class Watchdog(data_utils.worker.ManagerWatchdog):
    """In a worker: is the rank that made it still there? PyTorch takes whoever is the parent now for that rank, which
    may have died since the fork: such a worker would wait for ever."""

    def __init__(self) -> None:
        super().__init__()
        if (made_by := multiprocessing.parent_process()) is not None and made_by.pid is not None:
            self.manager_pid = made_by.pid


# ---- the iterator -------------------------------------------------------------------------------------------------


class Key:
    """Stands for a loader. Iterators hold this and not the loader, which would make a circle of a loader and its
    persistent workers: what is left to the garbage collector's circles waits 5 s for each worker."""

    def __init__(self, loader: DataLoader) -> None:
        self.drop_last = loader.drop_last
        self.wrote = False  # whether own samples wrote files when they were read


def iter_init(self: Any, loader: DataLoader) -> None:
    """Replaces the iterators' ``__init__``: remember which loader's it is."""
    self._oars_loader, self._oars_queue = vars(loader).setdefault("_oars_key", Key(loader)), deque()
    self._oars_apart = _apart(loader)
    ctx.iterations += 1
    self._oars_place = (ctx.iterations, 0)
    _plain["__init__"](self, loader)


def workers_init(self: Any, loader: DataLoader) -> None:
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


def _apart(loader: DataLoader) -> bool:
    """Whether a loader is read beside the training: there nothing can be said to other ranks, for the order of messages
    would be chance. Every rank then reads all of it."""
    return "_oars_apart" in vars(loader) or _in_thread()


def _in_thread() -> bool:
    """Whether a thread of the script's reads: it must send no messages, for they would meet others than its own, nor
    swap the random streams, from which the script may draw meanwhile."""
    return threading.current_thread() is not threading.main_thread()


def iter_reset(self: Any, loader: DataLoader, first_iter: bool = False) -> None:
    """Replaces ``_reset`` (persistent workers begin anew)."""
    self._oars_queue = deque()
    if not first_iter:
        ctx.iterations += 1
        self._oars_place = (ctx.iterations, 0)
    _plain["_reset"](self, loader, first_iter)


def next_index(self: Any) -> Any:
    """Replaces ``_next_index``: cut what the sampler gives."""
    if not self._oars_queue and _in_thread():  # the iterator was made before
        self._oars_apart = True
    if self._oars_apart:
        return _plain["_next_index"](self)
    if not _by_number(self):
        self._oars_queue.append(None)
        return _plain["_next_index"](self)
    indices = list(_plain["_next_index"](self))
    offsets = offsets_of(len(indices))
    if ctx.plan.batch == "keep":
        indices, offsets = _several(self, indices)
    way, _ = _way(self)
    uncut = way == WHOLE or on_every_rank(len(indices))
    self._oars_queue.append(cut := Cut(indices, offsets, *own(offsets), way == UNKNOWN, ctx.era, uncut))
    return indices if uncut else cut


def _several(self: Any, first: list) -> tuple[list, tuple]:
    """``--batch keep``: as many of the sampler's batches as there are ranks make one global batch."""
    parts = [first]
    while len(parts) < ctx.size and (more := next(self._sampler_iter, None)) is not None:
        parts.append(list(more))
    sizes = [len(p) for p in parts] + [0] * (ctx.size - len(parts))
    return [i for p in parts for i in p], tuple(sum(sizes[:r]) for r in range(ctx.size + 1))


def _by_number(iterator: Any) -> bool:
    return iterator._dataset_kind == dataloader_._DatasetKind.Map and iterator._auto_collation


def _way(iterator: Any) -> tuple[str, Any]:
    if _in_thread():
        return WHOLE, None
    way = _ways.get(iterator._oars_loader)
    return way or (BY_ROW if iterator._collate_fn in _DEFAULT else UNKNOWN, None)


def iter_next(self: Any) -> Any:
    """Replaces ``__next__``: a rank's rows become the global batch."""
    try:
        data = _read(self, _plain["__next__"](self))
    except StopIteration:
        raise
    except Exception as error:
        _unread(self, error)
        raise
    if self._oars_apart:
        ctx.record.notice("a loader that is read in a thread is read whole by every rank; computing is still split")
        return data
    recent.clear()
    cut = self._oars_queue.popleft()
    while cut is not None:
        try:
            return (ctx.phases.owed.batch if ctx.alone else whole_batch)(self, data, cut)
        except RankLost:
            lineage.renew()
            data, cut = _for_the_living(self, data, cut)
    if cut is None:
        ctx.record.notice("a loader without numbered samples (IterableDataset or batch_size=None) is read whole by "
                          "every rank; computing is still split")
        ctx.samples += collate.length(data)
        return data


def _unread(self: Any, error: Exception) -> None:
    """A batch could not be read. Where it was cut the other ranks know nothing of that, and go on to the next with it:
    should the script do so without it, the rows would be those of different batches."""
    cut = None if self._oars_apart or not self._oars_queue else self._oars_queue.popleft()
    if cut is not None and not (cut.whole or cut.uncut or ctx.separate):
        why = f"{type(error).__name__}: {error}".strip().splitlines()[-1]  # a worker tells all of its traceback
        ctx.world.astray = (f"rank {ctx.world.origin} could not read its samples ({why}), and the script goes on "
                            "without them, of which the other ranks do not know: leave them out of the data set")


def _read(self: Any, data: Any) -> Any:
    """What a fetcher gave."""
    if not isinstance(data, collate.Wrote):
        return data
    self._oars_loader.wrote = True
    return data.data


def _for_the_living(self: Any, data: Any, cut: Cut) -> tuple[Any, Cut]:
    """A batch that was cut, and perhaps read, before a rank was lost: cut it for those that are left, and read what
    of it is not here. Who has it whole reads nothing again: that would draw its random numbers twice."""
    offsets = offsets_of(len(cut.indices))
    # New ranks know nothing of what collating does: all look again (see ``forget``).
    whole = cut.whole or (cut.era < ctx.grown and self._collate_fn not in _DEFAULT)
    anew = Cut(cut.indices, offsets, *own(offsets), whole, ctx.era)
    if cut.whole or (not whole and (_way(self)[0] == WHOLE or on_every_rank(len(cut.indices)))):
        return data, anew._replace(uncut=cut.uncut)
    return _read(self, fetch(_fetcher(self), anew)), anew


def whole_batch(self: Any, data: Any, cut: Cut) -> Any:
    """The global batch from this rank's part of it."""
    if cut.era != ctx.era:
        data, cut = _for_the_living(self, data, cut)
    batch = _batch(self, data, cut)
    ctx.samples += len(cut.indices)
    iteration, batches = self._oars_place
    self._oars_place = (iteration, batches + 1)
    if _LEDGER:
        ctx.handed.append((iteration, batches, cut.indices))
    way, spec = _way(self)
    if way == BY_ROW:
        lineage.source(collate.rows_in(batch), _Again(_fetcher(self), cut.indices, spec, self._collate_fn in _DEFAULT))
    return batch


def forget() -> None:
    """What was found of loaders: ranks have joined, which have not seen it."""
    _ways.clear()


class _Again:
    """Reads a batch's rows again, after a loss."""

    def __init__(self, fetcher: Any, indices: list, spec: Any, default: bool) -> None:
        self.fetcher, self.indices, self.spec, self.default = fetcher, indices, spec, default

    def __call__(self) -> list[Rows]:
        offsets = offsets_of(len(self.indices))
        cut = Cut(self.indices, offsets, *own(offsets), False, ctx.era)
        data = fetch(self.fetcher, cut)
        data = data.data if isinstance(data, collate.Wrote) else data
        if len(self.indices) < ctx.size:
            data = collate.with_template(data, collate.default_spec(data) if self.default else self.spec)
        return collate.rows_in(collate.to_batch(data, collate.default_spec(data) if self.default else self.spec, cut))


def _batch(self: Any, data: Any, cut: Cut) -> Any:
    way, spec = _way(self)
    if cut.whole:
        every, spec = data
        return every if _in_thread() else _probed(self, every, spec, cut)
    if cut.uncut:
        return data
    if way == WHOLE or on_every_rank(len(cut.indices)):  # it was cut before this was known
        return _refetch(self, cut)
    default = self._collate_fn in _DEFAULT
    if self._oars_loader not in _ways and not ctx.alone:  # the first batch, and what its samples wrote on other ranks
        if any(ctx.world.allgather(self._oars_loader.wrote)):
            _not_in_parts(self._oars_loader, self._dataset)
            return _refetch(self, cut)
        _ways[self._oars_loader] = (BY_ROW, None)
    if len(set(cut.offsets)) <= ctx.size:  # some rank has no rows; with --batch keep, however many there are
        data = collate.with_template(data, collate.default_spec(data) if default else spec)
    if default:
        spec = collate.default_spec(data)
    elif not ((ctx.alone and ctx.phases.any_shape()) or collate.alike(data, spec)):
        return _not_by_row(self, _refetch(self, cut))
    return collate.to_batch(data, spec, cut)


def _probed(self: Any, every: Any, spec: Any, cut: Cut) -> Any:
    """A batch that was fetched whole to see what collating does: all ranks must have seen the same."""
    specs = [s for s in ctx.world.allgather(spec) if s is not collate.NOTHING]
    if any(s is None or s != specs[0] for s in specs):
        return _not_by_row(self, every)
    if _way(self)[0] == WHOLE or not specs:  # none of those that are left had rows to look at
        return every
    _ways[self._oars_loader] = (BY_ROW, specs[0])
    if debug.on:
        debug.say(f"batches of {type(self._dataset).__name__} are read in parts: collating works row by row")
    return collate.to_batch(every, specs[0], cut)


def _not_by_row(self: Any, every: Any) -> Any:
    if debug.on:
        debug.say(f"batches of {type(self._dataset).__name__} are read whole: collating does not work row by row")
    _ways[self._oars_loader] = (WHOLE, None)
    name = getattr(self._collate_fn, "__name__", type(self._collate_fn).__name__)
    ctx.record.notice(f"collate_fn {name} works on whole batches (pads, sorts, mixes or draws): every rank reads them "
                      "whole; computing is still split")
    return every


def _not_in_parts(loader: Key, dataset: Any) -> None:
    _ways[loader] = (WHOLE, None)
    ctx.record.notice(f"{type(dataset).__name__} writes files when samples are read: every rank reads whole batches, "
                      "so that all of them are written; computing is still split")


def _refetch(self: Any, cut: Cut) -> Any:
    return _fetch(_fetcher(self), cut.indices)


def _fetcher(self: Any) -> Any:
    return dataloader_._DatasetKind.create_fetcher(
        self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last)


# ---- the loader ---------------------------------------------------------------------------------------------------


def loader_iter(self: DataLoader) -> Any:
    """Replaces ``DataLoader.__iter__``: a moment for all ranks to check that their common streams agree, and whether
    samples wrote files."""
    if _apart(self):
        return _iter(self)
    key = vars(self).setdefault("_oars_key", Key(self))
    wrote = key.wrote and _ways.get(key, ("",))[0] == BY_ROW  # later than in its first batch
    told = until_none_is_lost(lambda: ctx.world.allgather((random_.fingerprint(), wrote)), lineage.renew)
    if any(stream != told[0][0] for stream, _ in told):
        ctx.record.notice("the ranks' random streams had come apart (something drew numbers on some ranks only); all "
                          "go on from the first rank's")
        random_.restore(ctx.world.broadcast(random_.state))
    if any(wrote for _, wrote in told):
        _not_in_parts(key, self.dataset)
    return _iter(self)


def loader_len(self: DataLoader) -> int:
    """Replaces ``DataLoader.__len__``: with ``--batch keep`` there are fewer, larger batches."""
    n = _len(self)
    return -(-n // ctx.size) if ctx.plan.batch == "keep" else n
