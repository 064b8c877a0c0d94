"""DataLoaders: each rank reads its own samples of every global batch, the script sees the global batch.

The sampler runs on every rank alike; its batches of indices are cut as they leave for the fetcher (in this process or
in a worker). What a custom ``collate_fn`` makes of some samples must be the rows it would make of them in the whole
batch: first batches are fetched whole and compared, later ones must agree in shape between ranks (ranks that train
separately do not ask each other: there it is tried on single samples at first). If it pads, sorts or mixes, whole
batches are loaded from then on and cut where a model is called, as hand-made batches are. So are those of a
``collate_fn`` that draws random numbers, of a dataset that writes files when it is read (a cache, filled on first use),
of iterable datasets and of ``batch_size=None``, and what is read in a thread.

Before a batch that was cut is handed out, ranks compare in one small message what they have: kinds, shapes, whether
there is a row for each sample, whether reading failed. Where they differ the batch is read whole, by every rank: then
all see, or raise, what one process would.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, TensorDataset, get_worker_info
from torch.utils.data import _utils as data_utils
from torch.utils.data import dataloader as dataloader_

from oars import debug
from oars.adapt import files
from oars.adapt.python import random as random_
from oars.adapt.python.patching import replaced
from oars.adapt.python.signals import signals
from oars.adapt.torch.batches import collate
from oars.adapt.torch.batches.collate import Cut
from oars.adapt.torch.batches.memory import Remembers, Watching
from oars.adapt.torch.batches.reading import Key, begin, is_aside, key_of, reading
from oars.adapt.torch.batches.workers import begin_anew, seed_worker, turn
from oars.adapt.torch.context import ctx, in_script_thread, offsets_of, on_every_rank, own
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.rows.mirror import recent
from oars.adapt.torch.rows.tensor import Rows
from oars.engine.dissent import pickled
from oars.engine.retry import until_none_is_lost
from oars.engine.world import RankLost

if TYPE_CHECKING:

    from torch.utils.data import Dataset
    from torch.utils.data._utils.fetch import _MapDatasetFetcher
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from oars.adapt.torch.batches.collate import Spec

_Iter: Any = dataloader_._BaseDataLoaderIter
_Fetcher: Any = data_utils.fetch._MapDatasetFetcher
_plain = {name: getattr(_Iter, name) for name in ("__init__", "_reset", "_next_index", "__next__")}
_fetch = _Fetcher.fetch
_iter, _len = DataLoader.__iter__, DataLoader.__len__
UNKNOWN, BY_ROW, WHOLE = "unknown", "by row", "whole"
_ways: WeakKeyDictionary[Key, tuple[str, Any]] = WeakKeyDictionary()  # how to load, and what a batch is made of
_LEDGER = bool(os.environ.get("OARS_LEDGER"))  # write down which rank learnt from which sample, see step_log.py


def fetch(self: _MapDatasetFetcher, index: Any) -> Any:
    """Replaces the map-style fetcher's, here and in workers."""
    if not isinstance(index, Cut):
        with ctx.out_of_step():
            return _fetch(self, index)
    if index.whole:
        return collate.probe(self, index)
    if not index.mine():
        return collate.NOTHING
    before = files.changes()
    if get_worker_info() is not None:
        seed_worker()
        if id(self.dataset) in _remembering:
            return Remembers(_fetch(self, index.indices))
    looked_at = (self.dataset, self.collate_fn) if index.fresh or _looks(self.dataset) else None
    with Watching(looked_at, index.fresh) as watching:
        if watching.lasting:
            pass
        elif get_worker_info() is not None:
            data = collate.by_row(self, index.mine())
        else:
            with ctx.private, ctx.out_of_step("while own samples are read"):
                data = collate.by_row(self, index.mine())
    if watching.little:
        _quickly_looked.add(id(self.dataset))
    if watching.noticed:
        if get_worker_info() is not None and not ctx.alone and ctx.plan.batch != "keep":
            return Remembers(None)  # other workers take over here
        if index.fresh or get_worker_info() is None:  # workers have read later batches by now
            _remembering.add(id(self.dataset))
            return watching.again(lambda: _whole(self, index.indices))
        watching.say()
        return collate.Wrote(data, files.changes() != before)
    return data if files.changes() == before else collate.Wrote(data)


def _whole(fetcher: _MapDatasetFetcher, indices: list) -> Any:
    with ctx.out_of_step():
        return _fetch(fetcher, indices)


_remembering: set[int] = set()  # data sets with a memory, in a worker
_looked: dict[int, int] = {}  # how often samples of a data set were read
_quickly_looked: set[int] = set()  # data sets that hold little


def _looks(dataset: Dataset) -> bool:
    """Whether to check this time if reading changes the data set: the 1st, 2nd, 4th … time, and every 64th; always,
    if there is little to look at. PyTorch's own data sets of tensors need no check."""
    if type(dataset) is TensorDataset:
        return False
    if id(dataset) in _quickly_looked:
        return True
    times = _looked[id(dataset)] = _looked.get(id(dataset), 0) + 1
    return times & (times - 1) == 0 or times % 64 == 0


# ---- the iterator -------------------------------------------------------------------------------------------------


def iter_init(self: _BaseDataLoaderIter, loader: DataLoader) -> None:
    """Replaces the iterators' ``__init__``: remember which loader's it is."""
    ctx.iterations += 1
    begin(self, loader, _aside(loader))
    _plain["__init__"](self, loader)


def _aside(loader: DataLoader) -> bool:
    """Whether a loader is read beside the training, in a thread or by a data set: there nothing can be said to other
    ranks, nor may random streams be swapped, from which the script may draw meanwhile. Every rank then reads all."""
    return is_aside(loader) or not ctx.in_step


def iter_reset(self: _BaseDataLoaderIter, loader: DataLoader, first_iter: bool = False) -> None:
    """Replaces ``_reset`` (persistent workers begin anew)."""
    here = reading(self)
    here.queue = deque()
    turn(self, loader)
    if not first_iter:
        ctx.iterations += 1
        here.place = (ctx.iterations, 0)
    _plain["_reset"](self, loader, first_iter)


def next_index(self: _BaseDataLoaderIter) -> Any:
    """Replaces ``_next_index``: cut what the sampler gives."""
    here = reading(self)
    if not here.queue and not ctx.in_step:  # the iterator was made before
        here.aside = True
    if here.aside:
        return _plain["_next_index"](self)
    if not _by_number(self):
        here.queue.append(None)
        return _plain["_next_index"](self)
    indices = list(_plain["_next_index"](self))
    offsets = offsets_of(len(indices))
    if ctx.plan.batch == "keep":
        indices, offsets = _several(self, indices)
    way, _ = _way(self)
    small = len(indices) < ctx.share_from and not self._num_workers  # (workers draw from streams of each rank)
    uncut = small or way == WHOLE or on_every_rank(len(indices))
    again = self._collate_fn not in collate.DEFAULT and not ctx.alone and here.loader.looks()
    whole = not small and (way == UNKNOWN or (way == BY_ROW and again))
    here.queue.append(cut := Cut(indices, offsets, *own(offsets), whole, ctx.era, uncut, here.loader not in _ways))
    return indices if uncut else cut


def _several(self: _BaseDataLoaderIter, first: list) -> tuple[list, tuple]:
    """``--batch keep``: as many of the sampler's batches as there are ranks make one global batch."""
    parts = [first]
    while len(parts) < ctx.size and (more := next(self._sampler_iter, None)) is not None:
        parts.append(list(more))
    sizes = [len(p) for p in parts] + [0] * (ctx.size - len(parts))
    return [i for p in parts for i in p], tuple(sum(sizes[:r]) for r in range(ctx.size + 1))


def _by_number(iterator: _BaseDataLoaderIter) -> bool:
    return iterator._dataset_kind == dataloader_._DatasetKind.Map and iterator._auto_collation


def _way(iterator: _BaseDataLoaderIter) -> tuple[str, Any]:
    if not ctx.in_step:
        return WHOLE, None
    way = _ways.get(reading(iterator).loader)
    return way or (BY_ROW if iterator._collate_fn in collate.DEFAULT else UNKNOWN, None)


def iter_next(self: _BaseDataLoaderIter) -> Any:
    """Replaces ``__next__``: a rank's rows become the global batch."""
    try:
        data = _read(self, _plain["__next__"](self))
    except Exception as error:
        if not _is_everybodys(self, error):
            raise
        data = collate.Failed(error.with_traceback(None))  # (it would keep the iterator, and its workers)
    here = reading(self)
    if here.aside:
        if in_script_thread():
            ctx.record.notice("a loader that is read in a thread is read whole by every rank; computing in the main "
                              "thread is still split",
                              "read the loader in the main thread: its num_workers read ahead as well", "data")
        return data
    recent.clear()
    cut = here.queue.popleft()
    while cut is not None:
        try:
            return (ctx.phases.owed.batch if ctx.alone else whole_batch)(self, data, cut)
        except RankLost:
            lineage.renew()
            data, cut = _for_the_living(self, data, cut)
    if cut is None:
        ctx.record.notice("a loader without numbered samples (IterableDataset or batch_size=None) is read whole by "
                          "every rank; computing is still split",
                          "use a dataset with __len__ and __getitem__, and a batch_size: each rank then reads its own "
                          "rows (oars.data.open gives one for files)", "data")
        ctx.samples += collate.length(data)
        return data


def _is_everybodys(self: _BaseDataLoaderIter, error: Exception) -> bool:
    """A batch could not be read. Whether it was cut, and the other ranks must know."""
    here = reading(self)
    if here.aside or not here.queue:
        return False
    cut = here.queue[0]
    if cut is None or cut.whole or cut.uncut or ctx.alone:
        here.queue.popleft()
        if cut is not None and ctx.alone and not (cut.whole or cut.uncut or ctx.separate):
            why = f"{type(error).__name__}: {error}".strip().splitlines()[-1]  # a worker tells all of its traceback
            ctx.world.astray = (f"rank {ctx.world.origin} could not read its samples ({why}) and the script ignored "
                                "the error: ranks are now on different batches; remove these samples from the data set")
        return False
    return True


def _fail(self: _BaseDataLoaderIter, data: Any, cut: Cut) -> Any:
    """Some rank could not read its samples: all read the batch as one process does, and raise what that raises."""
    errors = ctx.world.allgather(pickled(data.error) if isinstance(data, collate.Failed) else b"")
    with ctx.private:
        _refetch(self, cut)
    raise pickle.loads(next(error for error in errors if error))  # it went well this time


def _read(self: _BaseDataLoaderIter, data: Any) -> Any:
    """What a fetcher gave."""
    if not isinstance(data, collate.Wrote):
        return data
    loader = reading(self).loader
    loader.wrote, loader.late = loader.wrote or data.files, loader.late or not data.files
    return data.data


def _for_the_living(self: _BaseDataLoaderIter, data: Any, cut: Cut) -> tuple[Any, Cut]:
    """A batch that was cut, and perhaps read, before a rank was lost: cut it for those that are left, and read what
    of it is not here. Who has it whole reads nothing again: that would draw its random numbers twice."""
    offsets = offsets_of(len(cut.indices))
    # New ranks know nothing of what collating does: all look again (see ``forget``).
    whole = cut.whole or (cut.era < ctx.grown and self._collate_fn not in collate.DEFAULT)
    anew = Cut(cut.indices, offsets, *own(offsets), whole, ctx.era)
    if cut.whole or (not whole and (_way(self)[0] == WHOLE or on_every_rank(len(cut.indices)))):
        return data, anew._replace(uncut=cut.uncut)
    try:
        return _read(self, fetch(_fetcher(self), anew)), anew
    except RankLost:
        raise
    except Exception as error:  # of the data set: the other ranks must know
        if ctx.alone or whole:
            raise
        return collate.Failed(error.with_traceback(None)), anew


def whole_batch(self: _BaseDataLoaderIter, data: Any, cut: Cut) -> Any:
    """The global batch from this rank's part of it."""
    if cut.era != ctx.era:
        data, cut = _for_the_living(self, data, cut)
    batch = _batch(self, data, cut)
    ctx.samples += len(cut.indices)
    here = reading(self)
    iteration, batches = here.place
    here.place = (iteration, batches + 1)
    if _LEDGER:
        ctx.handed.append((iteration, batches, cut.indices))
    way, spec = _way(self)
    if way == BY_ROW and not cut.uncut:
        ctx.sharing.batch(len(cut.indices), self._num_workers > 0)
        default = self._collate_fn in collate.DEFAULT
        lineage.source(collate.rows_in(batch), _Again(_fetcher(self), cut.indices, spec, default))
    return batch


def forget() -> None:
    """What was found of loaders: ranks have joined, which have not seen it."""
    _ways.clear()


class _Again:
    """Reads a batch's rows again, after a loss."""

    def __init__(self, fetcher: _MapDatasetFetcher, indices: list, spec: Any, default: bool) -> None:
        self.fetcher, self.indices, self.spec, self.default = fetcher, indices, spec, default

    def __call__(self) -> list[Rows]:
        offsets = offsets_of(len(self.indices))
        cut = Cut(self.indices, offsets, *own(offsets), False, ctx.era)
        data = fetch(self.fetcher, cut)
        data = data.data if isinstance(data, collate.Wrote) else data
        if isinstance(data, (collate.Unfit, Remembers)):
            data, cut = _whole(self.fetcher, self.indices), cut._replace(whole=True)
        if len(self.indices) < ctx.size:
            data = collate.with_template(data, collate.default_spec(data) if self.default else self.spec)
        return collate.rows_in(collate.to_batch(data, collate.default_spec(data) if self.default else self.spec, cut))


def _batch(self: _BaseDataLoaderIter, data: Any, cut: Cut) -> Any:
    way, spec = _way(self)
    if cut.whole:
        every, spec = data
        return every if not ctx.in_step else _probed(self, every, spec, cut)
    if cut.uncut:
        return data
    loader, remembered = reading(self).loader, isinstance(data, Remembers)
    if remembered and data.data is None and ctx.alone:
        data, remembered = Remembers(_refetch(self, cut)), True
    if way == WHOLE or on_every_rank(len(cut.indices)):  # it was cut before this was known
        return data.data if remembered and data.data is not None else _refetch(self, cut)
    default = self._collate_fn in collate.DEFAULT
    if not (ctx.alone and (default or ctx.phases.any_shape())):
        found = collate.compare(data, None if default else spec, cut, loader.wrote)
        if found.failed:
            return _fail(self, data, cut)
        if found.wrote or found.remembers:
            _not_in_parts(loader, self._dataset, found.remembers)
            if found.remembers and self._num_workers and ctx.plan.batch != "keep":
                begin_anew(self, cut.indices)
                reading(self).queue.popleft()
                return _plain["__next__"](self)
            return data.data if remembered else _refetch(self, cut)
        if not found.fit and default:
            ctx.record.notice(f"samples of a batch of {type(self._dataset).__name__} are of different kinds or shapes: "
                              "every rank reads such batches whole",
                              "give all samples the same types and shapes in __getitem__ (pad them to one length)",
                              "data")
        if not found.fit:
            every = _refetch(self, cut)
            return every if default else _not_by_row(self, every)
        if loader not in _ways:
            _ways[loader] = (BY_ROW, None)
    if remembered:  # ranks that train on their own tell each other when the next epoch begins
        data, cut, loader.late = data.data, cut._replace(whole=True), True
        return collate.to_batch(data, collate.default_spec(data) if default else spec, cut)
    if len(set(cut.offsets)) <= ctx.size:  # some rank has no rows; with --batch keep, however many there are
        data = collate.with_template(data, collate.default_spec(data) if default else spec)
    if default:
        spec = collate.default_spec(data)
    return collate.to_batch(data, spec, cut)


def _probed(self: _BaseDataLoaderIter, every: Any, spec: Spec | None, cut: Cut) -> Any:
    """A batch that was fetched whole to see what collating does: all ranks must have seen the same."""
    specs = [s for s in ctx.world.allgather(spec) if s is not collate.NOTHING]
    if collate.REMEMBERS in specs:
        _not_in_parts(reading(self).loader, self._dataset, True)
        return every
    if any(s is None or s != specs[0] for s in specs):
        return _not_by_row(self, every)
    if _way(self)[0] == WHOLE or not specs:  # none of those that are left had rows to look at
        return every
    _ways[reading(self).loader] = (BY_ROW, specs[0])
    if debug.on:
        debug.say(f"batches of {type(self._dataset).__name__} are read in parts: collating works row by row")
    return collate.to_batch(every, specs[0], cut)


def _not_by_row(self: _BaseDataLoaderIter, every: Any) -> Any:
    if debug.on:
        debug.say(f"batches of {type(self._dataset).__name__} are read whole: collating does not work row by row")
    _ways[reading(self).loader] = (WHOLE, None)
    name = getattr(self._collate_fn, "__name__", type(self._collate_fn).__name__)
    ctx.record.notice(f"collate_fn {name} works on whole batches (pads, sorts, mixes or draws): every rank reads them "
                      "whole, and they are cut where a model is called",
                      "pad, mix and draw in __getitem__ and let collate_fn only stack; leave it if reading is quick",
                      "data")
    return every


def _not_in_parts(loader: Key, dataset: Dataset, remembers: bool = False) -> None:
    _ways[loader] = (WHOLE, None)
    does = "changes, prints or seeds the global random stream" if remembers else "writes files"
    ctx.record.notice(f"{type(dataset).__name__} {does} when samples are read: every rank reads whole batches, "
                      "so that this is done for all of them; computing is still split",
                      "let __getitem__ only read: no counters or caches in the dataset, and generators made from the "
                      "index" if remembers else "write the files before the training: __getitem__ then only reads",
                      "data")


def _refetch(self: Any, cut: Cut) -> Any:
    if not self._num_workers:
        return _whole(_fetcher(self), cut.indices)
    worker = (self._rcvd_idx - 1) % self._num_workers  # the one of one process
    info = data_utils.worker.WorkerInfo(id=worker, num_workers=self._num_workers, seed=self._base_seed + worker,
                                        dataset=self._dataset)
    try:
        with replaced(data_utils.worker, _worker_info=info):  # collating does not fail in the same way there
            return _whole(_fetcher(self), cut.indices)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        failed = type(error), error.with_traceback(None), trace
    torch._utils.ExceptionWrapper(failed, f"in DataLoader worker process {worker}").reraise()


def _fetcher(self: _BaseDataLoaderIter) -> Any:
    return dataloader_._DatasetKind.create_fetcher(
        self._dataset_kind, self._dataset, self._auto_collation, self._collate_fn, self._drop_last)


# ---- the loader ---------------------------------------------------------------------------------------------------


def loader_iter(self: DataLoader) -> Any:
    """Replaces ``DataLoader.__iter__``: a moment for all ranks to check that their common streams agree, and whether
    samples wrote files."""
    if _aside(self):
        return _iter(self)
    key = key_of(self)
    late = _ways.get(key, (BY_ROW,))[0] == BY_ROW  # later than in its first batch
    mine = random_.fingerprint(), late and (key.wrote or key.late), late and key.late, signals.due
    every = until_none_is_lost(lambda: ctx.world.allgather(mine), lineage.renew)
    if any(due for *_, due in every):
        signals.deliver()
    if any(stream != every[0][0] for stream, *_ in every):
        ctx.record.notice("the ranks' random streams differed (something drew numbers on some ranks only); all "
                          "ranks continue from the first rank's")
        random_.restore(ctx.world.broadcast(random_.state))
    if any(wrote for _, wrote, *_ in every):
        _not_in_parts(key, self.dataset, any(remembers for *_, remembers, _ in every))
    return _iter(self)


def loader_len(self: DataLoader) -> int:
    """Replaces ``DataLoader.__len__``: with ``--batch keep`` there are fewer, larger batches."""
    n = _len(self)
    return -(-n // ctx.size) if ctx.plan.batch == "keep" else n
