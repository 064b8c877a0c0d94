"""Dropout: the mask of the global batch is drawn from the stream that all ranks share, and each rank keeps its rows.

So a run on N ranks drops the very units that one process would drop, and the stream stands where one process's would.
Drawing the whole mask costs a little more than drawing one's own part of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from oars.adapt.torch.context import ctx, own, scaled
from oars.adapt.torch.rows import Rows, Unsplit, gathered

_plain = {name: getattr(F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")}


def _mask(name: str, shape: list[int], like: torch.Tensor, p: float) -> torch.Tensor:
    """What ``name`` would multiply a tensor of this global shape with."""
    if name != "dropout":
        shape = shape[:2] + [1] * (len(shape) - 2)  # whole channels
    return _plain[name](torch.ones(shape, dtype=like.dtype, device=like.device), p, True)


def _on_rows(name: str, x: Rows, p: float, training: bool, inplace: bool) -> Rows:
    base = x.offsets
    for trace in ctx.traces:
        trace.draws.append((x.dim_, base))
    if not training or p == 0:
        return x
    if name != "dropout" and x.dim_ != 0:
        raise Unsplit
    shape = list(x.local.shape)
    shape[x.dim_] = base[-1]
    mask = _mask(name, shape, x.local, p).narrow(x.dim_, *own(base))
    if inplace:
        x.local.mul_(mask)
        return x
    return Rows(x.local * mask, base, x.dim_)


def _in_split(name: str, x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
    split = ctx.split
    assert split is not None
    if split.draws is not None:
        dim, k = split.draws[split.drawn]
        split.drawn += 1
    else:  # inside one of PyTorch's own composite layers: samples are outermost
        n = max(own(split.offsets)[1], 1)
        dim, k = 0, x.shape[0] // n
    if not training or p == 0:
        return x
    offsets = scaled(split.offsets, k)
    shape = list(x.shape)
    shape[dim] = offsets[-1]
    mask = _mask(name, shape, x, p)
    mask = mask.narrow(dim, 0, k) if split.empty else mask.narrow(dim, *own(offsets))
    return x.mul_(mask) if inplace else x * mask


def _patched(name: str) -> Any:
    original = _plain[name]

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if isinstance(input, Rows):
            try:
                return _on_rows(name, input, p, training, inplace)
            except Unsplit:
                return gathered(original, (input, p, training, inplace), {})
        if ctx.split is None or torch.compiler.is_compiling():
            return original(input, p, training, inplace)
        return _in_split(name, input, p, training, inplace)

    dropout.__doc__ = original.__doc__
    dropout.__name__ = name
    return dropout


def install() -> None:
    """Patch nn.functional's dropouts."""
    for name in _plain:
        setattr(F, name, _patched(name))
