"""``torch.compile``: what of it runs compiled."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from oars.adapt.torch.context import ctx

if TYPE_CHECKING:
    from collections.abc import Callable

_compile = torch.compile


def compile_(model: nn.Module | Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Replaces ``torch.compile``: a module's compiled code runs in split calls; a function of rows runs uncompiled."""
    if model is None:
        return lambda f: compile_(f, **kwargs)
    compiled = _compile(model, **kwargs)
    if isinstance(model, (nn.Module, type)):
        return compiled

    @functools.wraps(model)
    def call(*args: Any, **named: Any) -> Any:
        if ctx.plain:
            return compiled(*args, **named)
        ctx.record.notice(f"compiled function {getattr(model, '__name__', '?')} runs uncompiled: it works on the "
                          "global batch (compile the module instead, it then runs compiled on own rows)",
                          "compile the module instead of the function around it")
        return model(*args, **named)

    return call
