"""What views, joins and indexing do on rows: where the batch's dimension goes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from oars.adapt.torch.context import Offsets, Woven, ctx, own, scaled
from oars.adapt.torch.rows.ops import of_own, rule
from oars.adapt.torch.rows.places import by_place
from oars.adapt.torch.rows.size import BatchSize
from oars.adapt.torch.rows.tensor import Rows, Unsplit, cut

if TYPE_CHECKING:
    from collections.abc import Callable


def _sizes(args: tuple) -> list:
    """``x.view(2, 3)`` and ``x.view((2, 3))``."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else list(args)


def reshaped(x: Rows, target: list) -> Rows:
    """Rows with another shape, if every rank's share still is one block of rows of some dimension of it."""
    shape = [int.__int__(s) for s in x.shape]
    batch, dim, offsets = shape[x.dim_], x.dim_, x.offsets
    goal = [int.__int__(t) for t in target]
    if goal.count(-1) == 1:
        known = -prod(goal)
        if known == 0:
            raise Unsplit
        goal[goal.index(-1)] = prod(shape) // known
    if prod(goal) != prod(shape) or batch == 0:
        raise Unsplit
    left, row = prod(shape[:dim]), prod(shape[dim + 1:])
    if isinstance(offsets, Woven):
        return _rewoven(x, offsets, goal, left, row)
    before = 1
    for e, length in enumerate(goal):
        step = prod(goal[e + 1:])
        if before == left and step and length * step == batch * row and all(o * row % step == 0 for o in offsets):
            if ctx.traces and not isinstance(target[e], BatchSize) and target[e] != -1:
                ctx.note("fixed size")  # reshape(100, -1): right for the global batch only
            new = tuple(o * row // step for o in offsets)
            local = list(goal)
            local[e] = own(new)[1]
            return Rows(x.local.reshape(local), new, e)
        outer = left // before
        if (before * outer == left and outer > 1 and length % (outer * batch) == 0
                and length // (outer * batch) * step == row and not ctx.alone):  # dimensions before the batch join it
            if ctx.traces and not isinstance(target[e], BatchSize) and target[e] != -1:
                ctx.note("fixed size")
            woven = Woven(offsets, outer, length // (outer * batch))
            return Rows(x.local.reshape([*goal[:e], own(woven)[1], *goal[e + 1:]]), woven, e)
        before *= length
    raise Unsplit


def _rewoven(x: Rows, offsets: Woven, goal: list[int], left: int, row: int) -> Rows:
    """Woven rows with other dimensions behind them, or what they were made of."""
    before = 1
    for e, length in enumerate(goal):
        step = prod(goal[e + 1:])
        if before == left and length == offsets[-1] and step == row:
            return Rows(x.local.reshape([*goal[:e], own(offsets)[1], *goal[e + 1:]]), offsets, e)
        if before == left and goal[e:e + 2] == [offsets.outer, offsets.base[-1]]:
            local = [*goal[:e + 1], own(offsets.base)[1], *goal[e + 2:]]
            return Rows(x.local.reshape(local), offsets.base, e + 1)
        before *= length
    raise Unsplit


@rule("view", "reshape")
def view(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Shapes are global."""
    x = args[0]
    if not isinstance(x, Rows):
        raise Unsplit
    if len(args) == 2 and isinstance(args[1], torch.dtype):
        if x.dim_ == x.local.dim() - 1:
            raise Unsplit
        return Rows(x.local.view(args[1]), x.offsets, x.dim_)
    return reshaped(x, _sizes(args[1:]) if len(args) > 1 else list(kwargs.get("shape", kwargs.get("size", ()))))


@rule("view_as", "reshape_as")
def view_as(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """As another tensor's global shape."""
    if not isinstance(args[0], Rows):
        return func(args[0], torch.empty(args[1].shape, device="meta"))
    return reshaped(args[0], list(args[1].shape))


@rule("flatten")
def flatten(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Joins a range of dimensions into one."""
    x = args[0] if args else kwargs["input"]
    n = x.local.dim()
    start = (args[1] if len(args) > 1 else kwargs.get("start_dim", 0)) % n
    end = (args[2] if len(args) > 2 else kwargs.get("end_dim", -1)) % n
    shape = list(x.shape)
    return reshaped(x, [*shape[:start], -1 if start <= x.dim_ <= end else prod(shape[start:end + 1]), *shape[end + 1:]])


@rule("ravel")
def ravel(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """All dimensions into one."""
    return reshaped(args[0], [-1])


@rule("unflatten")
def unflatten(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """One dimension into several."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % x.local.dim()
    sizes = list(args[2] if len(args) > 2 else kwargs["sizes"])
    shape = list(x.shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = int.__int__(shape[dim]) // -prod(sizes)
    return reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1:]])


@rule("unsqueeze", "unsqueeze_")
def unsqueeze(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A new dimension of size one."""
    x = args[0] if args else kwargs["input"]
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % (x.local.dim() + 1)
    if func.__name__.endswith("_"):
        raise Unsplit
    return Rows(x.local.unsqueeze(dim), x.offsets, x.dim_ + (dim <= x.dim_))


@rule("squeeze")
def squeeze(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Drops dimensions of size one, never the batch's unless the global batch is one."""
    x = args[0] if args else kwargs["input"]
    n = x.local.dim()
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    named = range(n) if dims is None else [d % n for d in (dims if isinstance(dims, (tuple, list)) else (dims,))]
    if x.dim_ in named and x.offsets[-1] == 1:
        raise Unsplit
    gone = [d for d in named if d != x.dim_ and x.local.shape[d] == 1]
    out = x.local.squeeze(tuple(gone)) if gone else x.local
    if ctx.traces and dims is None:
        ctx.note("fixed size")  # on one own row it would drop the batch's dimension too
    return Rows(out, x.offsets, x.dim_ - sum(d < x.dim_ for d in gone))


@rule("permute")
def permute(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Dimensions in another order."""
    x = args[0]
    dims = [d % x.local.dim() for d in _sizes(args[1:] or (kwargs["dims"],))]
    return Rows(x.local.permute(dims), x.offsets, dims.index(x.dim_))


@rule("transpose", "swapaxes", "swapdims")
def transpose(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Two dimensions change places."""
    x = args[0] if args else kwargs["input"]
    n = x.local.dim()
    a, b = (d % n for d in (*args[1:], *kwargs.values()))  # (dim0 and dim1, or axis0 and axis1)
    return Rows(x.local.transpose(a, b), x.offsets, {a: b, b: a}.get(x.dim_, x.dim_))


@rule("t", "adjoint")
def t(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A matrix transposed."""
    x = args[0] if args else kwargs["input"]
    if x.local.dim() != 2:
        raise Unsplit
    return Rows(x.local.t(), x.offsets, 1 - x.dim_)


@rule("movedim", "moveaxis")
def movedim(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Through permute: ask PyTorch where each dimension goes."""
    x = args[0]
    marks = torch.empty([d + 2 for d in range(x.local.dim())], device="meta")
    order = [s - 2 for s in func(marks, *args[1:], **kwargs).shape]
    return Rows(x.local.permute(order), x.offsets, order.index(x.dim_))


@rule("expand", "expand_as", "broadcast_to")
def expand(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Spreads dimensions of size one; the batch stays as it is."""
    x = args[0]
    if not isinstance(x, Rows):
        if func.__name__ == "expand_as":
            return x.expand(args[1].shape)
        raise Unsplit
    sizes = list(args[1].shape) if func.__name__ == "expand_as" else _sizes(args[1:] or (kwargs["size"],))
    at = x.dim_ + len(sizes) - x.local.dim()
    if sizes[at] != -1 and int.__int__(sizes[at]) != x.offsets[-1]:
        raise Unsplit
    if ctx.traces and not isinstance(sizes[at], BatchSize) and sizes[at] != -1:
        ctx.note("fixed size")
    sizes[at] = -1
    return Rows(x.local.expand([int.__int__(s) for s in sizes]), x.offsets, at)


@rule("repeat", "tile")
def repeat(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Copies along other dimensions."""
    x = args[0]
    times = _sizes(args[1:] or tuple(kwargs.values()))  # (dims, or repeats)
    if func.__name__ == "tile":
        times = [1] * (x.local.dim() - len(times)) + times
    at = x.dim_ + len(times) - x.local.dim()
    if times[at] != 1:
        raise Unsplit
    return Rows(x.local.repeat(*times), x.offsets, at)


@rule("repeat_interleave")
def repeat_interleave(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Each row k times, or along another dimension."""
    x = args[0]
    times = args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(x, Rows) or not isinstance(times, int) or dim is None:
        raise Unsplit
    dim %= x.local.dim()
    offsets = scaled(x.offsets, times) if dim == x.dim_ else x.offsets
    return Rows(x.local.repeat_interleave(times, dim), offsets, x.dim_)


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def new(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Rows, if it is as long as the batch where the batch is: ``x.new_zeros(x.shape)``."""
    x, *sizes = args
    filled = func.__name__ == "new_full"
    size = list(sizes[0]) if sizes and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
    batch = size[x.dim_] if len(size) > x.dim_ and not (filled and size is sizes) else None
    if batch is None or int.__int__(batch) != x.offsets[-1] or (ctx.traces and not isinstance(batch, BatchSize)):
        return of_own(func, args, kwargs)
    size = [int.__int__(s) for s in size]
    size[x.dim_] = own(x.offsets)[1]
    return Rows(func(x.local, size, *(sizes[1:] if size is not sizes and filled else ()), **kwargs), x.offsets, x.dim_)


@rule("chunk", "split", "tensor_split", "split_with_sizes", "narrow", "select", "diff", "unsafe_chunk",
      "unsafe_split", "narrow_copy")
def parts(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Pieces along a dimension other than the batch's."""
    x = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    if not isinstance(x, Rows) or any(isinstance(a, Rows) for a in args[1:]):
        raise Unsplit
    place = {"narrow": 1, "select": 1, "narrow_copy": 1}.get(func.__name__, 2)
    default = -1 if func.__name__ == "diff" else 0
    dim = (args[place] if len(args) > place else kwargs.get("dim", default)) % x.local.dim()
    if dim == x.dim_:
        raise Unsplit
    kwargs = {k: v for k, v in kwargs.items() if k not in ("tensor", "input")}
    if any(isinstance(a, torch.Tensor) for a in (*args[1:], *kwargs.values())):
        raise Unsplit  # what diff begins or ends with has rows, too
    out = func(x.local, *args[1:], **kwargs)
    new = x.dim_ - (func.__name__ == "select" and dim < x.dim_)
    return Rows(out, x.offsets, new) if isinstance(out, torch.Tensor) else tuple(Rows(o, x.offsets, new) for o in out)


@rule("cat", "concat", "concatenate", "stack")
def join(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Side by side along another dimension; along the batch's dimension order would be lost, so that gathers."""
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    lead = next(a for a in tensors if isinstance(a, Rows))
    stacking = func.__name__ == "stack"
    if not stacking:  # an empty list of numbers goes with everything: so do caches of keys and values begin
        tensors = [a for a in tensors if isinstance(a, Rows) or a.dim() != 1 or a.numel() or lead.local.dim() == 1]
    dim %= lead.local.dim() + stacking
    if kwargs.get("out") is not None or (dim == lead.dim_ and not stacking):
        raise Unsplit
    local = []
    for a in tensors:
        if isinstance(a, Rows):
            if a.offsets != lead.offsets or a.dim_ != lead.dim_:
                raise Unsplit
            local.append(a.local)
        elif a.dim() == lead.local.dim() and a.shape[lead.dim_] == lead.offsets[-1]:
            local.append(cut(a, lead.offsets, lead.dim_))
        else:
            raise Unsplit
    return Rows(func(local, dim), lead.offsets, lead.dim_ + (stacking and dim <= lead.dim_))


# ---- indexing -----------------------------------------------------------------------------------------------------


def _spans(x: Rows, index: Any) -> list:
    """The index with ``...`` written out, so that entries line up with dimensions (None adds one)."""
    entries = list(index) if isinstance(index, tuple) else [index]

    def takes(e: Any) -> int:
        if e is None:
            return 0
        is_mask = isinstance(e, torch.Tensor) and e.dtype in (torch.bool, torch.uint8)
        return e.dim() if is_mask else 1

    used = sum(takes(e) for e in entries if e is not Ellipsis)
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    fill: list = [slice(None)] * (x.local.dim() - used)
    return entries[:at] + fill + entries[at + 1:]


def _local_index(x: Rows, index: Any) -> tuple[tuple, int]:
    """An index that takes all of the batch, made local, and the result's batch dimension."""
    entries = _spans(x, index)
    if any(isinstance(e, (bool, Rows)) or (isinstance(e, torch.Tensor) and e.dtype in (torch.bool, torch.uint8))
           for e in entries):
        raise Unsplit
    dim, new, advanced = 0, 0, [e for e in entries if isinstance(e, (torch.Tensor, list)) or hasattr(e, "__array__")]
    if advanced:
        # One index tensor beside the batch's dimension keeps its place; more of them may move to the front.
        if len(advanced) > 1 or any(isinstance(e, int) for e in entries):
            raise Unsplit
    place = None
    for e in entries:
        if e is None:
            new += 1
            continue
        if dim == x.dim_:
            if e != slice(None) if isinstance(e, slice) else True:
                raise Unsplit
            place = new
        if isinstance(e, slice):
            new += 1
        elif not isinstance(e, int) or isinstance(e, bool):
            new += torch.as_tensor(e).dim()
        dim += 1
    if place is None:
        raise Unsplit
    return tuple(entries), place


def _masked(x: Rows, mask: Rows) -> Rows:
    """``x[mask]``: every rank keeps its own; how many that are, all must know."""
    if mask.offsets != x.offsets or x.dim_ or mask.dim_ or isinstance(x.offsets, Woven):
        raise Unsplit
    ctx.note("combine")
    kept = x.local[mask.local]
    counts = ctx.world.allgather(len(kept))
    offsets: Offsets = tuple(sum(counts[:r]) for r in range(ctx.size + 1))
    return Rows(kept, offsets, 0)


@rule("__getitem__")
def getitem(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Indexing that takes all of the batch, picks one entry a row, or masks it; the rest gathers."""
    x, index = args
    if not isinstance(x, Rows):
        if isinstance(index, Rows) and index.dim_ == 0 and index.dtype == torch.long:
            return Rows(x[index.local], index.offsets, 0)  # a table looked up by row
        raise Unsplit
    if isinstance(index, Rows) and index.dtype == torch.bool:
        return _masked(x, index)
    placed = by_place(x, _spans(x, index))
    if placed is not None:
        return placed
    entries, place = _local_index(x, index)
    return Rows(x.local[entries], x.offsets, place)


@rule("__setitem__")
def setitem(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Writing into all rows, or under a mask; the rest gathers, writes and cuts again."""
    x, index, value = args
    if not isinstance(x, Rows):
        raise Unsplit
    if isinstance(index, Rows) and index.dtype == torch.bool:
        if index.offsets != x.offsets or x.dim_ or index.dim_:
            raise Unsplit
        if isinstance(value, torch.Tensor) and value.dim():
            raise Unsplit
        x.local[index.local] = value
        return None
    entries, place = _local_index(x, index)
    target = x.local[entries]
    if isinstance(value, Rows):
        right = place - target.dim()
        if value.offsets != x.offsets or value.dim_ - value.local.dim() != right:
            raise Unsplit
        value = value.local
    elif isinstance(value, torch.Tensor) and value.dim() >= target.dim() - place:
        at = value.dim() + place - target.dim()
        if value.shape[at] == x.offsets[-1] and value.shape[at] != 1:
            value = cut(value, x.offsets, at)
    x.local[entries] = value
    return None


@rule("take_along_dim")
def take_along(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """As gather, with the dimension last."""
    x, index = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is None or not isinstance(x, Rows) or dim % x.local.dim() == x.dim_:
        raise Unsplit
    if isinstance(index, Rows):
        if index.offsets != x.offsets or index.dim_ != x.dim_:
            raise Unsplit
        return Rows(torch.take_along_dim(x.local, index.local, dim), x.offsets, x.dim_)
    return Rows(torch.take_along_dim(x.local, cut(index, x.offsets, x.dim_), dim), x.offsets, x.dim_)

