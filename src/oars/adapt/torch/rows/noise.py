"""Noise that models draw themselves: ``randn_like``, ``rand(len(x), 1)``, ``bernoulli``, ``rsample``, stochastic depth.

As with dropout's masks, the numbers are those of the whole batch, drawn from the stream that all ranks share, and each
rank keeps its rows: so a run on N ranks draws the very numbers of one process.

On rows, ``drawn`` is the rule. While a call is traced, what is drawn with the batch's size becomes rows
(``watched``), and each draw is noted, in its turn. In a call on plain own rows, ``drawing`` makes the same draws, in
the same turn; a call that draws anything else is made again, traced. A draw that nothing here knows is seen by where
the streams stand, and then the model is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from oars.adapt.python import random
from oars.adapt.torch.context import (
    Draw,
    Offsets,
    Split,
    Woven,
    ctx,
    empty_whole,
    mine,
    offsets_of,
    one_row,
    order_of,
    own,
    scaled,
)
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows.ops import rule
from oars.adapt.torch.rows.size import BatchSize, sized
from oars.adapt.torch.rows.tensor import Otherwise, Rows, Unsplit

LIKE = ("randn_like", "rand_like", "randint_like", "normal_", "uniform_", "random_", "exponential_", "bernoulli_",
        "cauchy_", "log_normal_", "geometric_")
BY_VALUE = ("bernoulli", "normal")  # one number each, whatever the value: those of other rows need not be known
OF_SIZE = ("randn", "rand", "randint", "normal")
EMPTY = ("empty", "new_empty")  # to be filled in place
DRAWS = frozenset((*LIKE, *BY_VALUE, *OF_SIZE))
WATCHED = DRAWS | set(EMPTY)


@rule(*LIKE, *BY_VALUE)
def drawn(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Drawn for the whole batch from the stream that all ranks share, then cut: the numbers one process would get."""
    given: list[Any] = [a for a in args if isinstance(a, torch.Tensor)]
    if not given or any(isinstance(a, torch.Tensor) for a in kwargs.values()):
        raise Unsplit  # (an initialiser of the same name hands on all by names)
    lead = given[0]
    if not all(isinstance(a, Rows) and a.offsets == lead.offsets and a.dim_ == lead.dim_
               and a.local.shape == lead.local.shape for a in given):
        raise Unsplit
    args, kwargs = tree_map(lambda a: a.local if isinstance(a, Rows) else a, (args, kwargs))
    order = order_in_batch(lead)
    with noted(func.__name__, lead.dim_, lead.offsets, order):
        out = _own_part(func, args, kwargs, lead.dim_, lead.offsets, order)
    return lead if func.__name__.endswith("_") else Rows(out, lead.offsets, lead.dim_)


def order_in_batch(x: Rows) -> Sequence[int]:
    """How the dimensions of the batch lie in memory. A rank with a single row cannot know: the one with most tells."""
    base = ctx.traces[0].offsets if ctx.traces else x.offsets.base if isinstance(x.offsets, Woven) else x.offsets
    order = order_of(x.local)
    if ctx.separate or not one_row(base):
        return order
    orders: list[Any] = [order]
    collectives.unless_spoilt(lambda: orders.append(ctx.world.allgather_alike(np.array(order))))
    shares = [b - a for a, b in zip(base, base[1:], strict=False)]
    return order if len(orders) == 1 else orders[1][shares.index(max(shares))].tolist()


@contextmanager
def noted(name: str, dim: int, offsets: Offsets, order: Sequence[int] = ()) -> Iterator[None]:
    """Around a draw that calls on plain own rows repeat, in its turn."""
    for trace in ctx.traces:
        trace.see_streams()
    yield
    now = random.state() if ctx.traces else {}
    for trace in ctx.traces:
        trace.streams = now
        trace.draws.append((name, dim, offsets, order))


def _own_part(func: Callable[..., Any], args: tuple, kwargs: dict, dim: int, offsets: Offsets, order: Sequence[int],
              rows: int = 0) -> Any:
    """What ``func`` draws for these own rows; ``rows``: of a stand-in, on a rank that has none."""
    name, given = func.__name__, [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    by_value = name in BY_VALUE
    if len(given) > 1 and not by_value:
        raise Unsplit  # a probability for each
    if by_value and (isinstance(offsets, Woven) or (
            torch.is_grad_enabled() and any(a.requires_grad for a in given))):
        raise Unsplit

    def spread(a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return a
        shape = list(a.shape)
        shape[dim] = offsets[-1]
        full = empty_whole(shape, a, order)
        if by_value:
            full.fill_(0.5)
            _cut(full, dim, offsets, rows).copy_(a)
        return full

    args_, kwargs = tree_map(spread, (args, kwargs))
    out = _cut(func(*args_, **kwargs), dim, offsets, rows)
    return args[0].copy_(out) if name.endswith("_") else out.clone()


def _cut(full: torch.Tensor, dim: int, offsets: Offsets, rows: int) -> torch.Tensor:
    return full.narrow(dim, 0, rows) if rows else mine(full, offsets, dim)


def watched(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """An operation of a model that is being traced, which draws: with the batch's size it gives rows."""
    name, leaves = func.__name__, tree_leaves((args, kwargs))
    if any(isinstance(a, Rows) for a in leaves) or kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return func(*args, **kwargs)
    base = ctx.traces[0].offsets
    at = [d for d, s in enumerate(_size(name, args, kwargs)) if isinstance(s, BatchSize)]
    if len(at) == 1 and sum(isinstance(a, BatchSize) for a in leaves) == 1 and not kwargs.get("requires_grad"):
        size = int.__int__(_size(name, args, kwargs)[at[0]])
        if size and size % base[-1] == 0:
            offsets = scaled(base, size // base[-1])
            with nullcontext() if name in EMPTY else noted(name, at[0], offsets):
                out = func(*args, **kwargs)
            rows = Rows(mine(out, offsets, at[0]).clone(), offsets, at[0])
            if offsets == offsets_of(offsets[-1]):
                lineage.begin_anew(rows, out)  # a model may keep it
            return rows
    alike = not any(isinstance(a, BatchSize) or (isinstance(a, torch.Tensor) and a in sized) for a in leaves)
    if alike and name in DRAWS and not name.endswith("_"):  # all ranks draw the same, of something that has no rows
        with noted(name, -1, ()):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _size(name: str, args: tuple, kwargs: dict) -> Any:
    """The size that is asked for, if one is."""
    if name not in OF_SIZE and name not in EMPTY:
        return ()
    found = kwargs["size"] if "size" in kwargs else next((a for a in args if isinstance(a, (tuple, list))), None)
    if found is None and name not in ("randint", "normal"):
        found = [a for a in args if isinstance(a, int)]
    return () if found is None else found


def _with_size(args: tuple, kwargs: dict, dim: int, length: int) -> tuple[tuple, dict]:
    """The same arguments, with this length along a dimension."""
    def longer(size: Any) -> list:
        return [length if d == dim else s for d, s in enumerate(size)]

    if "size" in kwargs:
        return args, {**kwargs, "size": longer(kwargs["size"])}
    at = next((i for i, a in enumerate(args) if isinstance(a, (tuple, list))), None)
    if at is not None:
        return (*args[:at], longer(args[at]), *args[at + 1:]), kwargs
    return tuple(longer(args)), kwargs


def drawing(split: Split, noisy: bool = True) -> AbstractContextManager[Any]:
    """While a call on plain own rows is made, of a model that draws, if only now and then."""
    return _Drawing(split) if noisy else nullcontext()


class _Drawing(TorchFunctionMode):
    """Takes hold of what is drawn."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in DRAWS or ctx.split is not self._split:
            return func(*args, **(kwargs or {}))
        return self._draw(name, func, args, kwargs or {})

    def _draw(self, name: str, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        split = self._split
        draw = expected(split, name)
        if draw.dim < 0:
            return func(*args, **kwargs)
        offsets = scaled(split.offsets, draw.rows)
        stand_in = draw.rows if split.empty else 0
        own_rows = stand_in or own(offsets)[1]
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        size = list(tensors[0].shape) if tensors else list(_size(name, args, kwargs))
        if len(size) <= draw.dim or size[draw.dim] != own_rows:
            raise Otherwise
        try:
            if tensors:
                order = draw.order if one_row(split.offsets) else ()
                return _own_part(func, args, kwargs, draw.dim, offsets, order, stand_in)
            args, kwargs = _with_size(args, kwargs, draw.dim, offsets[-1])
            return _cut(func(*args, **kwargs), draw.dim, offsets, stand_in).clone()
        except Unsplit:
            raise Otherwise from None


def expected(split: Split, name: str) -> Draw:
    """The draw whose turn it is, if it is of this name; else the call does something else than when it was traced."""
    draws = split.draws or []
    if split.drawn == len(draws) or draws[split.drawn].name != name:
        raise Otherwise
    split.drawn += 1
    return draws[split.drawn - 1]
