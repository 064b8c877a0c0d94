"""What ``torch.distributions`` does with rows: arguments are validated and broadcast against each other.

Validation asks whether all elements are valid: a combine, and nothing by which rows meet. In a call on own rows each
rank validates its own.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch

import oars
from oars.adapt.torch.context import ctx
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows.ops import localizer, rule
from oars.adapt.torch.rows.tensor import RULES, Rows, Unsplit, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

_HOME = os.path.join(os.path.dirname(torch.__file__), "distributions", "")
_OURS = os.path.join(os.path.dirname(oars.__file__), "")
_all_of_batch = RULES["all"]


def _truth(x: Rows) -> torch.Tensor:
    """Whether all elements are true, on every rank."""
    wrong = collectives.allreduce(x.local.logical_not().sum())  # (none, where a rank has no rows)
    return wrong == 0


def _validates() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_HOME)


@rule("_is_all_true")
def is_all_true(func: Callable[..., Any], args: tuple, kwargs: dict) -> torch.Tensor:
    """Only distributions ask this, of what they validate."""
    if ctx.separate or not isinstance(args[0], Rows):
        raise Unsplit
    return _truth(args[0])


@rule("all")
def all_(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """As ever, but for a distribution that validates."""
    if ctx.traces and not ctx.separate and len(args) == 1 and not kwargs and _validates():
        return _truth(args[0])
    return _all_of_batch(func, args, kwargs)


@rule("broadcast_tensors")
def broadcast_tensors(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Each as large as all together: rows with rows, and what spans no batch for own rows alone."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    localize, offsets, right = localizer(tuple(tensors), kwargs, "broadcast_tensors")
    out = func(*map(localize, tensors))
    return wrap(tuple(out), offsets, out[0].dim() + right)
