"""What is looked at in every operation of a model that is being traced: sizes that come from the batch's, values that
its code reads, random numbers that it draws."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from oars.adapt.torch.context import ctx, of_the_script
from oars.adapt.torch.rows import noise
from oars.adapt.torch.rows.size import BatchSize, sized
from oars.adapt.torch.rows.tensor import Rows

_READS = {"item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "__array__", "equal", "allclose",
          "is_nonzero", "__contains__"}


class Sized(TorchFunctionMode):
    """While a model is traced: remembers which plain tensors got their size from the batch's."""

    on = False  # whether the next operation comes through here first

    def __enter__(self) -> Any:
        Sized.on = True
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        Sized.on = False
        super().__exit__(*args)

    def __torch_function__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        Sized.on = False
        name = getattr(func, "__name__", "")
        try:
            draws = noise.watched if ctx.traces and name in noise.WATCHED else None
            out = draws(func, args, kwargs or {}) if draws else func(*args, **(kwargs or {}))
        finally:
            Sized.on = True
        if not ctx.traces:  # what is done here is not the model's (Keras looks at shapes)
            return out
        if kwargs and kwargs.get("generator") is not None:
            ctx.note("random")
        if name in _READS and not any(isinstance(a, Rows) for a in args) and _by_the_script():
            ctx.note("read")  # a counter, say, that decides what is done
        given = tree_leaves((args, kwargs))
        if any(isinstance(a, BatchSize) or (isinstance(a, torch.Tensor) and a in sized) for a in given):
            for o in tree_leaves(out):
                if isinstance(o, torch.Tensor) and not isinstance(o, Rows):
                    sized[o] = True
                    if not any(s % ctx.traces[0].rows == 0 for s in o.shape):
                        ctx.note("size")  # what is left of the batch's size is a value
            if name in ("__len__", "numel", "nelement"):
                ctx.note("size")
            return _noticed(out)
        return out


def _by_the_script() -> bool:
    """Whether a value is read by the model's own code, not by PyTorch's nor by ours."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith("adapt/torch/replay/reads.py"):
        frame = frame.f_back
    return frame is not None and of_the_script(frame.f_code.co_filename)


def _noticed(size: Any) -> Any:
    """A size that is the batch's, asked of a plain tensor."""
    if isinstance(size, torch.Size):
        return torch.Size(map(_noticed, size))
    return BatchSize(size) if type(size) is int and size and size % ctx.traces[0].rows == 0 else size
