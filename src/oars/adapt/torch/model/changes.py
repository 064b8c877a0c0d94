"""What a script changes in a module, by an attribute or a hook: the modules it is in are traced again."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from oars.adapt.torch.context import ctx
from oars.adapt.torch.rows.size import BatchSize
from oars.adapt.torch.rows.tensor import Rows

if TYPE_CHECKING:
    from collections.abc import Callable

_setattr = nn.Module.__setattr__
_PLAIN_VALUES = (bool, int, float, str, tuple, type(None))
_marks: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # modules whose mode has ever changed


def setattr_(self: nn.Module, name: str, value: Any) -> None:
    """Replaces ``nn.Module.__setattr__``: a switch that is thrown may change how the module treats its rows."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, Rows) and not isinstance(self.__dict__.get(name), Rows):
            ctx.changes += not (ctx.depth or ctx.plain)
        if value.requires_grad and not isinstance(value, (nn.Parameter, Rows)):
            ctx.gradients.enter(value)  # a leaf that is no parameter, used in split calls unseen
    elif isinstance(value, (BatchSize, torch.Size)) and ctx.traces:
        ctx.note("size")
    else:
        old = self.__dict__.get(name, self)
        if old is not value and not (type(old) is type(value) and isinstance(value, _PLAIN_VALUES) and old == value):
            if name == "training":
                ctx.mode ^= _mark(self)
            if ctx.depth or ctx.plain:
                ctx.note("changes itself")
            elif name != "training":
                ctx.changes += 1
    _setattr(self, name, value)


def _mark(module: nn.Module) -> int:
    """A module's bit in ``ctx.mode``: after ``eval()`` and ``train()`` what was found before is found again."""
    if module not in _marks:
        _marks[module] = 1 << ctx.marked
        ctx.marked += 1
    return _marks[module]


def register_hook(register: Callable[..., Any]) -> Any:
    """Around ``nn.Module``'s ``register_*_hook``: a module with other hooks is traced again."""
    @functools.wraps(register)
    def call(*args: Any, **kwargs: Any) -> Any:
        ctx.changes += 1
        return register(*args, **kwargs)

    return call
