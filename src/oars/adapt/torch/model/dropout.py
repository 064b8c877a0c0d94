"""Dropout inside models.

A dropout mask of the global batch is drawn from the stream that all ranks share, and each rank keeps its rows.

So a run on N ranks drops the very units that one process would drop, and the stream stands where one process's would.
Drawing the whole mask costs a little more than drawing one's own part of it.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from oars.adapt.python import random
from oars.adapt.torch.context import Offsets, Split, ctx, empty_whole, mine, one_row, own, scaled
from oars.adapt.torch.rows import tensor as rows_
from oars.adapt.torch.rows.noise import drawing, expected, order_in_batch
from oars.adapt.torch.rows.sized import Sized
from oars.adapt.torch.rows.tensor import Rows, Unsplit, gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_plain = {name: getattr(F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")}


def _mask(name: str, shape: list[int], like: torch.Tensor, p: float, order: Sequence[int]) -> torch.Tensor:
    """What ``name`` would multiply a tensor of this global shape with."""
    for trace in ctx.traces:
        trace.see_streams()
    mask = _drawn(name, shape, like, p, order)
    now = random.state() if ctx.traces else {}
    for trace in ctx.traces:
        trace.streams = now  # a draw that split calls repeat
    return mask


def _drawn(name: str, shape: list[int], like: torch.Tensor, p: float, order: Sequence[int]) -> torch.Tensor:
    if name != "dropout":
        shape = shape[:2] + [1] * (len(shape) - 2)  # whole channels
        return torch.feature_dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p, True)
    return torch.dropout(empty_whole(shape, like, order).fill_(1), p, True)


def _note(dim: int, offsets: Offsets, order: Sequence[int] = ()) -> None:
    for trace in ctx.traces:
        trace.draws.append(("", dim, offsets, order))


def _on_rows(name: str, x: Rows, p: float, training: bool, inplace: bool) -> Rows:
    rows_.see(x)
    rows_.take_over_changes((x,))
    base = x.offsets
    if not training or p == 0:
        _note(x.dim_, base)
        return x
    if name != "dropout" and x.dim_ != 0:
        raise Unsplit
    shape = list(x.local.shape)
    shape[x.dim_] = base[-1]
    order = order_in_batch(x)
    _note(x.dim_, base, order)
    mask = mine(_mask(name, shape, x.local, p, order), base, x.dim_)
    if inplace:
        x.local.mul_(mask)
        return x
    return Rows(x.local * mask, base, x.dim_)


def _drop(name: str, args: tuple, kwargs: dict) -> Any:
    if ctx.again:
        args = (*args[:3], False)  # others that are made again may need the rows as they were
    try:
        return _on_rows(name, *args)
    except Unsplit:
        return gathered(_plain[name], args, kwargs)


def _in_split(name: str, x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
    split = ctx.split
    assert split is not None
    if split.draws is not None:
        _, dim, k, order = expected(split, "")
        order = order if one_row(split.offsets) else ()
    else:  # inside one of PyTorch's own composite layers: samples are outermost
        n = max(own(split.offsets)[1], 1)
        dim, k, order = 0, x.shape[0] // n, ()
        _note(0, scaled(split.offsets, k))
    if dim < 0:  # of something that has no rows
        return _plain[name](x, p, training, inplace)
    if not training or p == 0:
        return x
    offsets = scaled(split.offsets, k)
    shape = list(x.shape)
    shape[dim] = offsets[-1]
    mask = _mask(name, shape, x, p, order)
    mask = mask.narrow(dim, 0, k) if split.empty else mine(mask, offsets, dim)
    return x.mul_(mask) if inplace else x * mask


def patched(original: Callable[..., Any]) -> Any:
    """Around ``nn.functional``'s dropouts."""
    name = original.__name__

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if isinstance(input, Rows):
            return ctx.perform(_drop, name, (input, p, training, inplace), {}, "torch")
        if ctx.traces and ctx.split is None and not Sized.on:  # else it comes by a second time
            _note(-1, ())
        if ctx.split is None or torch.compiler.is_compiling():
            return original(input, p, training, inplace)
        return _in_split(name, input, p, training, inplace)

    dropout.__doc__ = original.__doc__
    dropout.__name__ = name
    return dropout


_attention = F.scaled_dot_product_attention


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
              enable_gqa: bool = False) -> torch.Tensor:
    """nn.functional's; with dropout, which its kernel draws inside, step by step as PyTorch does on CPUs."""
    if dropout_p == 0 or not (isinstance(query, Rows) or ctx.split) or torch.compiler.is_compiling():
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            scores = scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p, True) @ value


class _Again:
    """A checkpointed function: run again in backward, it must draw what it drew in its split call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.split = function, ctx.split
        self.drawn = ctx.split.drawn if ctx.split else 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.split is None or ctx.split is not None:
            return self.function(*args, **kwargs)
        ctx.split = Split(self.split.offsets, self.split.draws, self.split.empty)
        ctx.split.drawn = self.drawn
        try:
            with drawing(ctx.split):
                return self.function(*args, **kwargs)
        finally:
            ctx.split = None


_checkpoint = torch.utils.checkpoint.checkpoint


@functools.wraps(_checkpoint)
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces torch.utils.checkpoint.checkpoint."""
    rows = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Rows)]
    if any(isinstance(a, Rows) for a in args):
        kwargs["use_reentrant"] = False  # the other way is a custom function, which does not know rows
    for trace in ctx.traces:
        trace.held.update(map(id, rows))
    return _checkpoint(_Again(function), *args, **kwargs)
