"""Training without ``torch._dynamo``, as long as nothing is compiled.

PyTorch imports its compiler when the first optimizer is made: to keep it out of ``zero_grad`` and the like, and to tell
it where ``step`` begins. That takes a rank longer than PyTorch's own import. While nobody else has imported the
compiler, nothing is compiled, and there is nothing to keep out and nobody to tell.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import optim
from torch.optim.optimizer import Optimizer

from oars.adapt.python import patching
from oars.adapt.python.imports import when_imported

if TYPE_CHECKING:
    from types import ModuleType

_COMPILER = "torch._dynamo"
_KEPT_OUT = "__dynamo_disable"  # where PyTorch remembers the function that it made of another, to keep the compiler out


def put_off() -> None:
    """To be called before others patch optimizers."""
    functions = [made.__wrapped__ for made in vars(Optimizer).values() if _made_in(made, "torch._compile")]
    for function in functions:
        patching.put(function, _KEPT_OUT, function)

    def keep_out(compiler: ModuleType) -> None:
        for function in functions:
            patching.remove(function, _KEPT_OUT)  # made by PyTorch, when it is called next

    when_imported(_COMPILER, keep_out)
    for kind in vars(optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            step: Any = vars(kind).get("step")
            if _made_in(step, "torch.optim.optimizer"):
                patching.put(kind, "step", _unless_compiled(step))


def _made_in(function: Callable[..., Any], module: str) -> bool:
    """Whether a decorator of this module has made the function of another."""
    return isinstance(function, FunctionType) and hasattr(function, "__wrapped__") and (
        function.__globals__["__name__"] == module)


def _unless_compiled(step: Any) -> Callable:
    """What PyTorch makes of a ``step``, without a word to the compiler where there is none."""
    plain = step.__wrapped__

    @functools.wraps(plain)
    def stepping(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return stepping
