"""What a batch is made of: which of its parts are rows, and how a rank's part of each becomes the global one.

A *spec* mirrors a batch's nesting: "rows" for a tensor with one row a sample, "list" for a list with one entry a sample
(strings, ragged tensors, objects), "array" for a NumPy array of rows, "same" for what does not depend on the samples,
and a tuple of specs for a dict, list, tuple, named tuple or dataclass.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import numbers
import pickle
import random
import types
import zlib
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate, default_convert

from oars.adapt import files
from oars.adapt.python import random as random_
from oars.adapt.python.looking import fields, is_a
from oars.adapt.torch.batches.memory import Memory, Remembers
from oars.adapt.torch.context import Offsets, ctx, own
from oars.adapt.torch.rows.tensor import Rows

if TYPE_CHECKING:
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    Spec = str | tuple[Any, ...]

DEFAULT = (default_collate, default_convert)
NOTHING = "oars: no rows on this rank"
REMEMBERS = "oars: the data set has a memory"


class Wrote(NamedTuple):
    """A batch's own part whose samples wrote files when they were read (a cache, filled on first use)."""

    data: Any
    files: bool = True  # not only what the data set holds, or what it prints


class Unfit(NamedTuple):
    """Collating own samples does not work, or not row by row: the whole batch is needed."""


class Failed(NamedTuple):
    """A batch's own part that could not be read."""

    error: Exception


class Cut(NamedTuple):
    """A global batch's indices on their way to a fetcher."""

    indices: list
    offsets: Offsets
    first: int
    rows: int
    whole: bool  # fetch all of it, and see what collating makes of own samples alone
    era: int = 0  # for the ranks of which era it was cut
    uncut: bool = False  # the fetcher got all indices, as on one process
    fresh: bool = False  # nothing is known yet of what reading samples does

    def mine(self) -> list:
        """Own samples' indices."""
        return self.indices[self.first : self.first + self.rows]


def probe(fetcher: _MapDatasetFetcher, cut: Cut) -> tuple[Any, Any]:
    """The whole batch, and its spec: None if collating own samples gives other rows than collating all."""
    files_before = files.changes()
    of_dataset = Memory(fetcher.dataset, thorough=True)
    before_reading = Memory(fetcher.dataset, fetcher.collate_fn, thorough=True)
    with ctx.out_of_step():
        samples = read(fetcher, cut.indices)
    by_sample = isinstance(samples, list) and len(samples) == len(cut.indices)  # else whole batches, as Keras's are
    mine = copy.deepcopy(samples[cut.first : cut.first + cut.rows]) if by_sample else None  # collating may change them
    own_generators = generators(fetcher.collate_fn)
    before = _positions(own_generators)
    with ctx.out_of_step():
        every = fetcher.collate_fn(samples)
    if _positions(own_generators) != before or files.changes() != files_before:
        return every, None  # it draws (masks, mixes), or writes: read whole, so that this is as on one process
    if of_dataset.lasting or of_dataset.changed():
        return every, REMEMBERS
    if before_reading.lasting or before_reading.changed():
        return every, None  # the collate_fn remembers, if only that it has given a warning
    if not cut.rows:
        return every, NOTHING
    if ctx.alone and by_sample and _pads(fetcher.collate_fn, mine, every, cut):
        return every, None
    try:
        with ctx.private, ctx.out_of_step("while own samples are collated"):
            some = fetcher.collate_fn(mine if by_sample else read(fetcher, cut.mine()))
    except Exception:  # the script's own code: it takes whole batches, perhaps
        before_reading.put_back()
        return every, None
    if before_reading.changed():
        before_reading.put_back()
        return every, None
    return every, _compare(every, some, cut)


def read(fetcher: _MapDatasetFetcher, indices: list) -> Any:
    """The samples of these indices."""
    many: Any = getattr(fetcher.dataset, "__getitems__", None)
    return many(indices) if many else [fetcher.dataset[i] for i in indices]


_earlier: list[tuple[Any, Any]] = []  # the collate_fn that was used last in this process, and a sample it was given


def by_row(fetcher: _MapDatasetFetcher, indices: list) -> Any:
    """Own samples, collated; ``Unfit`` if that cannot be. What a ``collate_fn`` of the script's does may depend on
    the data, so it collates them once more, backwards and behind a sample of an earlier batch: the same rows, if it
    takes each alone."""
    samples = ctx.sharing.read(lambda: read(fetcher, indices), len(indices))
    if ctx.alone:
        return fetcher.collate_fn(samples)
    if fetcher.collate_fn in DEFAULT or not isinstance(samples, list) or len(samples) != len(indices):
        try:
            return fetcher.collate_fn(samples)
        except Exception:
            return Unfit()
    others = [sample for collate_fn, sample in _earlier if collate_fn is fetcher.collate_fn]
    others = [*others, *map(_copied, samples[::-1])]
    _earlier[:] = [(fetcher.collate_fn, _copied(samples[0]))]
    try:
        data, again = fetcher.collate_fn(samples), fetcher.collate_fn(others)
    except Exception:
        return Unfit()
    return data if _alike(data, again, len(samples), len(others) - len(samples)) else Unfit()


def _copied(x: Any) -> Any:
    """A sample that may be changed. What most are made of is copied here, ten times faster than by ``deepcopy``."""
    kind = type(x)
    if kind in (int, float, str, bytes, bool, type(None)):
        return x
    if kind is torch.Tensor:
        return x.clone()
    if kind is np.ndarray and not x.dtype.hasobject:
        return x.copy()
    if kind in (list, tuple):
        return kind(map(_copied, x))
    return {key: _copied(value) for key, value in x.items()} if kind is dict else copy.deepcopy(x)


def _alike(data: Any, again: Any, rows: int, others: int) -> bool:
    """Whether the second has the rows of the first, backwards, behind some others."""
    if isinstance(data, (torch.Tensor, np.ndarray)) and data.ndim and len(data) == rows:
        return type(again) is type(data) and len(again) == rows + others and _equal(
            data, again[others:].flip(0) if isinstance(again, torch.Tensor) else again[others:][::-1])
    if type(data) is not type(again):
        return False
    if isinstance(data, (list, tuple)) and not hasattr(data, "_fields") and len(data) == rows != len(again):
        return len(again) == rows + others and _equal(list(data), list(again[others:])[::-1])
    parts, more = children(data), children(again)
    if parts is None or more is None:
        return _equal(data, again)
    return len(parts) == len(more) and all(_alike(a, b, rows, others) for a, b in zip(parts, more, strict=True))


def _pads(collate_fn: Callable[[Any], Any], mine: Any, every: Any, cut: Cut) -> bool:
    """Whether collating makes samples of different lengths fit each other, be they of one length in this batch.

    Ranks that train separately do not compare shapes later (``compare``): whether rows fit must be known now.
    """
    def differs(samples: list, whole: Any, of: Cut) -> bool:
        return _compare(whole, collate_fn(copy.deepcopy(samples)), of) is None

    try:
        if any(differs([sample], every, cut._replace(first=cut.first + i, rows=1)) for i, sample in enumerate(mine)):
            return True
        pair = [_shorter(mine[0]), mine[0]]
        return differs(pair[:1], collate_fn(copy.deepcopy(pair)), Cut([0, 1], (), 0, 1, False))
    except Exception:  # the script's own code: it does not take samples of different lengths, or a single one
        return False


def _shorter(x: Any) -> Any:
    """A sample whose sequences lack their last element."""
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return x[:-1] if x.ndim and len(x) > 1 else x
    if isinstance(x, list) and len(x) > 1 and all(isinstance(e, numbers.Number) for e in x):
        return x[:-1]
    parts = children(x)
    return x if parts is None else _rebuilt(x, list(map(_shorter, parts)))


def generators(x: Any, depth: int = 4) -> list:
    """The random generators that a callable may draw from: in its closure, its globals, its object's attributes."""
    if is_a(x, torch.Generator, np.random.Generator, np.random.RandomState, random.Random):
        return [x]
    if depth == 0 or is_a(x, types.ModuleType, type, torch.nn.Module):
        return []
    if is_a(x, functools.partial):
        parts = [x.func, *x.args, *x.keywords.values()]
    elif is_a(x, types.MethodType):
        parts = [x.__self__, x.__func__]
    elif is_a(x, types.FunctionType):
        inner = [c for c in x.__code__.co_consts if isinstance(c, types.CodeType)]  # comprehensions, lambdas
        parts = [x.__globals__.get(name) for code in (x.__code__, *inner) for name in code.co_names]
        parts += [cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType()]
        parts += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    elif is_a(x, types.BuiltinMethodType):
        parts = [x.__self__]
    else:
        parts = [*fields(x).values(), vars(type(x)).get("__call__")]
    return [g for part in parts for g in generators(part, depth - 1)]


def positions(own_generators: list) -> list[bytes]:
    """Where these generators stand."""
    return [pickle.dumps(g.get_state() if isinstance(g, torch.Generator) else g) for g in own_generators]


def _positions(own_generators: list) -> list[bytes]:
    """Where the common streams and these generators stand."""
    return [random_.fingerprint(), *positions(own_generators)]


def _compare(every: Any, some: Any, cut: Cut) -> Any:
    mine = slice(cut.first, cut.first + cut.rows)
    batch = len(cut.indices)
    if isinstance(every, (torch.Tensor, np.ndarray)):
        if every.ndim == 0 or len(every) != batch or not _equal(every[mine], some):
            return None
        return "rows" if isinstance(every, torch.Tensor) else "array"
    if type(every) is not type(some):
        return None
    if isinstance(every, (list, tuple)) and not hasattr(every, "_fields") and len(every) == batch != len(some):
        return "list" if _equal(list(every[mine]), list(some)) else None
    parts, others = children(every), children(some)
    if parts is None or others is None:
        counted = isinstance(every, numbers.Number) and not isinstance(every, bool)  # of the next batch it may differ
        return "same" if _equal(every, some) and not counted else None
    if len(parts) != len(others):
        return None
    specs = tuple(_compare(a, b, cut) for a, b in zip(parts, others, strict=True))
    return None if None in specs else specs


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        same: Any = (a == b) | ((a != a) & (b != b))
        return bool(same.all())
    parts, others = children(a), children(b)
    if parts is not None and others is not None:
        return type(a) is type(b) and len(parts) == len(others) and all(map(_equal, parts, others))
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def children(x: Any) -> list | None:
    """The parts of a container, or None."""
    if isinstance(x, UserDict):  # transformers' BatchEncoding
        x = x.data
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, (list, tuple)):
        return list(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [getattr(x, f.name) for f in dataclasses.fields(x)]
    return None


def _rebuilt(x: Any, parts: list) -> Any:
    if isinstance(x, (dict, UserDict)):
        made = copy.copy(x)
        made.update(zip(x, parts, strict=True))
        return made
    if isinstance(x, tuple):
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, list):
        return type(x)(parts)
    made = copy.copy(x)
    for f, part in zip(dataclasses.fields(x), parts, strict=True):
        object.__setattr__(made, f.name, part)
    return made


def default_spec(data: Any) -> Any:
    """The spec of what PyTorch's default collate makes: tensors are rows, lists of strings have one a sample."""
    if isinstance(data, torch.Tensor):
        return "rows"
    if isinstance(data, (list, tuple)) and data and all(isinstance(e, (str, bytes)) for e in data):
        return "list"
    parts = children(data)
    return "same" if parts is None else tuple(map(default_spec, parts))


class Compared(NamedTuple):
    """What all ranks have said of their parts of a batch."""

    fit: bool  # together: same kinds, same shapes but for the rows, of which each has its share
    failed: bool  # some could not be read
    wrote: bool  # reading wrote files
    remembers: bool  # reading showed that the data set has a memory, and some rank has read all


def compare(data: Any, spec: Spec | None, cut: Cut, wrote: bool) -> Compared:
    """What all ranks have got of a batch. ``spec``: None for the default collate's."""
    failed, remembered = isinstance(data, Failed), isinstance(data, Remembers)
    fits, mark = True, 0
    if isinstance(data, Unfit):
        fits = False
    elif not failed and not remembered and cut.rows:
        spec = default_spec(data) if spec is None else spec
        try:
            fits = all(len(part) == cut.rows for part in _parts_by_row(data, spec))
        except (TypeError, ValueError):  # it is made of other parts than the first batch
            fits = False
        mark = zlib.crc32(repr(_print(data, spec)).encode()) + 1
    every = ctx.world.allgather_alike(np.array([mark, fits, failed, wrote, remembered]))
    marks = set(every[:, 0].tolist()) - {0}
    some = [bool(column.any()) for column in every.T]
    return Compared(len(marks) <= 1 and bool(every[:, 1].all()), *some[2:])


def _parts_by_row(data: Any, spec: Spec) -> Iterator[Any]:
    """What must have one entry for each sample."""
    if spec in ("rows", "array", "list"):
        yield data
    elif not isinstance(spec, str):
        for part, of_part in zip(children(data) or [], spec, strict=True):
            yield from _parts_by_row(part, of_part)


def _print(data: Any, spec: Spec) -> Any:
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return str(data.dtype), tuple(data.shape[1:]) if spec in ("rows", "array") else tuple(data.shape)
    if spec == "same" and isinstance(data, (bool, str, bytes)):
        return data
    if isinstance(spec, str):
        return type(data).__name__
    parts = children(data)
    return (type(data).__name__, *map(_print, parts, spec)) if parts is not None and len(parts) == len(spec) else None


def with_template(data: Any, spec: Spec) -> Any:
    """A batch of which some ranks have no rows: they get empty ones of the first rank's kind."""
    templates = ctx.world.allgather(_emptied(data, spec) if ctx.rank == 0 else None)
    return templates[0] if isinstance(data, str) and data == NOTHING else data


def _emptied(data: Any, spec: Spec) -> Any:
    if spec in ("rows", "array"):
        return data[:0]
    if spec == "list":
        return type(data)()
    return data if spec == "same" else _rebuilt(data, list(map(_emptied, children(data) or [], spec)))


def to_batch(data: Any, spec: Spec, cut: Cut) -> Any:
    """The global batch from this rank's part of it (or, of a probed one, from all of it)."""
    if spec == "same":
        return data
    if spec == "rows":
        rows = data.narrow(0, *own(cut.offsets)) if cut.whole else data
        return Rows(rows, cut.offsets, 0)
    if spec in ("list", "array"):
        if cut.whole:
            return data
        parts = ctx.world.allgather(data)
        if spec == "array":
            return np.concatenate(parts)
        return type(data)(e for part in parts for e in part)
    return _rebuilt(data, [to_batch(p, s, cut) for p, s in zip(children(data) or [], spec, strict=True)])


def rows_in(batch: Any) -> list[Rows]:
    """All rows of a batch, in order."""
    if isinstance(batch, Rows):
        return [batch]
    return [rows for part in children(batch) or [] for rows in rows_in(part)]


def length(data: Any) -> int:
    """How many samples a plain batch seems to hold."""
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return len(data) if data.ndim else 1
    parts = children(data)
    return length(parts[0]) if parts else 1
