"""Tensors between ranks, with autograd.

The one convention of all backward passes here: of a tensor that all ranks hold alike, the true gradient is the *mean*
of the ranks' gradients; of rows, a rank holds N times the true gradient of its own. So gradients of parameters are
averaged at the end, exact for what came through rows and for what every rank computed alike (weight penalties), and
the backward of a sum over ranks is a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes

from oars.adapt.torch.context import Offsets, Woven, ctx, mine
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}
_COMPLEX = {torch.complex64, torch.complex128}


def allreduce(x: torch.Tensor) -> torch.Tensor:
    """A new tensor: ``x`` summed over all ranks; in a local phase, what this rank's rows make one expect of that."""
    if ctx.separate:
        return ctx.phases.estimate.allreduce(x)
    if x.dtype in _COMPLEX:
        return torch.view_as_complex(allreduce(torch.view_as_real(x)))
    if x.is_cuda and x.dtype not in _WIDER and ctx.nccl() is not None:
        return ctx.nccl().allreduce(x.detach().clone(memory_format=torch.contiguous_format))
    buffer = x.detach().to("cpu", _WIDER.get(x.dtype, x.dtype), memory_format=torch.contiguous_format, copy=True)
    unless_spoilt(ctx.world.allreduce, buffer.numpy())
    return buffer.to(x.device, x.dtype)


def mean(x: torch.Tensor) -> torch.Tensor:
    """A new tensor: the mean of all ranks' ``x``; in a local phase, this rank's own."""
    if ctx.separate:
        return ctx.phases.estimate.mean(x)
    return allreduce(x) / ctx.size


def unless_spoilt(collective: Callable[..., Any], *args: Any) -> None:
    """In a backward during which a rank was lost: no messages any more; it only runs to its end, for what is above."""
    ctx.sharing.crossed |= ctx.going_back
    if ctx.spoilt:
        return
    try:
        collective(*args)
    except RankLost:
        if not ctx.going_back:
            raise
        ctx.spoilt = True


def allgather(x: torch.Tensor, offsets: Offsets, dim: int) -> torch.Tensor:
    """Every rank's rows of ``x`` joined along ``dim``; rank r holds offsets[r+1]-offsets[r] of them."""
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        return _joined(x, offsets, dim)


def _joined(x: torch.Tensor, offsets: Offsets, dim: int) -> torch.Tensor:
    rows = x.detach().movedim(dim, 0).to("cpu").contiguous()
    if rows.dim() and rows.stride(-1) != 1:  # a single row counts as contiguous with any stride
        rows = rows.clone(memory_format=torch.contiguous_format)
    shape, dtype = rows.shape[1:], rows.dtype
    width = rows.element_size() * int(np.prod(shape, dtype=np.int64))
    counts = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    whole = torch.empty((offsets[-1], *shape), dtype=dtype)
    if width and len(whole):
        unless_spoilt(ctx.world.allgather_rows, _bytes(rows, width), counts, _bytes(whole, width))
    if isinstance(offsets, Woven):
        blocks = [part.unflatten(0, (offsets.outer, -1, offsets.inner)) for part in whole.split(counts) if len(part)]
        whole = torch.cat(blocks, 1).flatten(0, 2)
    layout = suggest_memory_format(x) if x.dim() in (4, 5) else torch.contiguous_format  # images may have channels last
    if dim or layout is not torch.contiguous_format:
        whole = whole.movedim(0, dim).clone(memory_format=layout)
    return whole.to(x.device)


def _bytes(rows: torch.Tensor, width: int) -> np.ndarray:
    return rows.reshape(-1).view(torch.uint8).reshape(len(rows), width).numpy()


class Sum(torch.autograd.Function):
    """Sum over ranks; its backward is the same."""

    @staticmethod
    def forward(context: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return allreduce(x)

    @staticmethod
    def backward(context: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Sum.apply(grad)


class Mean(torch.autograd.Function):
    """Mean over ranks; its backward is the same."""

    @staticmethod
    def forward(context: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return mean(x)

    @staticmethod
    def backward(context: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Mean.apply(grad)


class Alike(torch.autograd.Function):
    """What all ranks hold alike, as it is; backward gives every rank the true gradient, for hooks that look at it."""

    @staticmethod
    def forward(context: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Mean.apply(grad)


class Times(torch.autograd.Function):
    """``x`` as it is; backward gives ``factor`` times the gradient: true ones to who is not linear in them."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad * context.factor, None


class Gather(torch.autograd.Function):
    """Rows become the whole tensor on every rank; backward sums over ranks and keeps own rows."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, offsets: Offsets, dim: int) -> torch.Tensor:
        context.offsets, context.dim = offsets, dim
        return allgather(x, offsets, dim)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return mine(Sum.apply(grad), context.offsets, context.dim), None, None


# The graph nodes that these leave behind.
ACROSS = tuple(f._backward_cls for f in (Sum, Mean, Alike, Gather))  # type: ignore[attr-defined]
JOINED = Gather._backward_cls  # type: ignore[attr-defined]
_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def leaves_behind(results: list, inputs: list) -> Iterator[torch.Tensor]:
    """The leaves that ``results`` were made of beside ``inputs``."""
    seen: set[Any] = {x.grad_fn for x in inputs if isinstance(x, torch.Tensor)}
    given = {id(x) for x in inputs}
    stack: list[Any] = [x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn not in (None, *seen)]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                if type(node) is not _LEAF:
                    stack.append(node)
                elif id(node.variable) not in given:
                    yield node.variable
