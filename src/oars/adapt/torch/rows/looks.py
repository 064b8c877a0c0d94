"""Operations that may fail on one rank alone, by the values of its rows, and errors that one rank alone may have met.

Most operations fail by the shapes and kinds of what they are given, which all ranks have alike. Those that look at the
values of rows (an index, a class, a probability, a zero that whole numbers are divided by) end with a short meeting if
they have none of their own: only then the script goes on, so that an error is raised where it came up, on all ranks. In
a model's call on plain own rows there is one such meeting at its end, if any operation of it looks.
"""

from __future__ import annotations

from typing import Any

import torch

from oars.adapt.torch.context import ctx
from oars.adapt.torch.rows import collectives
from oars.engine.dissent import Whole

LOOKS = {"gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "index_fill",
         "index_fill_", "take_along_dim", "embedding", "embedding_bag", "one_hot", "repeat_interleave", "__getitem__",
         "__setitem__", "cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss",
         "binary_cross_entropy", "max_unpool1d", "max_unpool2d", "max_unpool3d", "floor_divide", "remainder", "fmod",
         "floor_divide_", "remainder_", "fmod_", "__floordiv__", "__rfloordiv__", "__ifloordiv__", "__mod__",
         "__rmod__", "__imod__", "div", "div_", "divide"}


def looks(name: str, args: tuple, out: Any) -> bool:
    """Whether this call looks at values: ``x[2:5, None]`` and fractions that are divided do not."""
    if name in ("__getitem__", "__setitem__"):
        return any(isinstance(a, (torch.Tensor, list)) for a in (args[1] if isinstance(args[1], tuple) else args[1:2]))
    if "div" in name or "mod" in name or name.startswith("remainder"):
        return not out.dtype.is_floating_point
    return True


def look_after() -> None:
    """An operation that looks at the values of its rows has gone well here: so it must have everywhere, before the
    script goes on."""
    for trace in ctx.traces:
        trace.sure = False
    if not ctx.separate:
        collectives.unless_spoilt(ctx.world.confirm)


def together(error: Exception, inner: bool = False) -> BaseException:
    """An error that perhaps this rank alone has met: returns where all are to do the operation on the whole batch, or
    to raise what is returned."""
    if ctx.separate or not ctx.in_step or ctx.going_back:  # (a backward fails as a whole; recomputing ends by errors)
        raise error
    try:
        raise ctx.world.dissent(error)
    except Whole as all_:
        if inner and not all_.inner:
            raise
        return all_.error
