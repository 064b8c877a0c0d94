"""Operations that give a batch another shape in place: ``x.unsqueeze_(1)`` and the like.

The same object stands, from there on, for what the operation without the underscore gives.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from oars.adapt.torch.context import ctx, mine, offsets_of
from oars.adapt.torch.rows.tensor import RESHAPES, Rows, whole

if TYPE_CHECKING:
    from collections.abc import Callable

_OF_MEMORY = {"resize_", "resize_as_", "as_strided_"}  # they do not know of rows: done on the whole


def reshaped_in_place(name: str, func: Callable[..., Any], args: tuple, kwargs: dict) -> Rows:
    """``x.unsqueeze_(1)`` and the like: from here on ``x`` is what came out."""
    x = args[0]
    ctx.note("changes its shape")  # on plain own rows a model would do it to what the script has
    if name == "set_":
        out = args[1] if len(args) > 1 else kwargs.get("source", torch.empty(0, dtype=x.dtype))
        out = out if isinstance(out, Rows) else torch.empty(0, dtype=x.dtype).set_(*args[1:], **kwargs)
    elif name in _OF_MEMORY:
        out = whole(x, name).detach().clone()
        func(out, *(whole(a, name) if isinstance(a, Rows) else a for a in args[1:]), **kwargs)
    else:
        out = getattr(torch.Tensor, name[:-1])(*args, **kwargs)
    if not isinstance(out, Rows):
        if not out.dim():
            raise RuntimeError(f"oars: a batch cannot become a single number in place: use {name} without _")
        out = ctx.perform(_cut_anew, None, (out,), {})
    x.local, x.offsets, x.dim_, x.mirror, x.era = out.local, out.offsets, out.dim_, out.mirror, out.era
    x.made, x.version = out.made, out.version
    if x.made is not None and x.made.entry is not None:
        x.made.entry.outs[x.made.place] = weakref.ref(x)
    return x


def _cut_anew(func: None, args: tuple, kwargs: dict) -> Rows:
    (full,) = args
    if full.requires_grad:
        ctx.gradients.enter(full)
    offsets = offsets_of(full.shape[0])
    return Rows(mine(full, offsets, 0), offsets, 0)


for _name in ("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "set_", *_OF_MEMORY):
    RESHAPES[_name] = partial(reshaped_in_place, _name)
