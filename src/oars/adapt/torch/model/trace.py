"""What is looked at while a module's call is traced, and what tells one kind of call from another."""

from __future__ import annotations

import enum
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all

from oars.adapt.python import random
from oars.adapt.python.looking import fields, is_a
from oars.adapt.python.patching import replaced
from oars.adapt.torch.batches.collate import generators, positions
from oars.adapt.torch.batches.memory import OF_EVERY_MODULE
from oars.adapt.torch.context import Offsets, ctx
from oars.adapt.torch.rows.size import BatchSize
from oars.adapt.torch.rows.sized import Sized
from oars.adapt.torch.rows.tensor import Rows

if TYPE_CHECKING:
    from typing import TextIO

_VALUES = (bool, str, int, float)
_numbers = itertools.count(1)


class Trace:
    """What happened in a call that is being watched."""

    def __init__(self, offsets: Offsets) -> None:
        self.events: list[str] = []  # whatever was not row-by-row work
        self.made: list[Any] = []  # weak references to all rows made
        self.known: set[int] = set()  # the rows given and made, by their ids
        self.held: set[int] = set()  # those that PyTorch keeps until the backward, for what it computes again
        self.offsets, self.rows = offsets, offsets[-1]  # of the batch
        self.worked = False  # on own rows
        self.weights: dict[int, int] = {}  # sizes of the weights that modules inside used on own rows alone
        self.sure = True  # no operation looked at the values of its rows, so that it could fail on one rank alone
        self.new_leaves = False  # weights were used that are no parameters, and were not known
        self.draws: list[tuple[str, int, Offsets, Sequence[int]]] = []  # that split calls repeat, as ``Split.draws``
        self.streams = random.state()
        self.number = next(_numbers)
        self.work = ctx.sharing.work()  # what was counted before
        self.inner: list[Any] = []  # the verdicts of modules inside, which ranks have not agreed about yet

    def see_streams(self) -> None:
        """Note draws from the common streams that no rule made: what is decided by them may differ next time."""
        now = random.state()
        if not random.alike(now, self.streams):
            self.events.append("random")
            self.streams = now

    def keeps(self, handed: list, since: int = 0) -> bool:
        """Whether rows that were made (``since`` so many) are still there, other than those that are handed on."""
        known = {id(x) for x in handed} | self.held
        return any(r is not None and id(r) not in known for r in (ref() for ref in self.made[since:]))

    def gathers(self) -> list[str]:
        """What had to be gathered."""
        return [e for e in self.events if e.startswith("gather")]

    def splits_more_than(self, other: Trace) -> bool:
        """Whether more of the weights were used on own rows alone than in another call."""
        return sum(self.weights.values()) > sum(other.weights.values())

    def mostly_split(self, module: nn.Module) -> bool:
        """Whether most of a module's weights were used on own rows alone, whatever met behind them: a similarity of
        all rows with all, a loss that looks at the batch."""
        return 2 * sum(self.weights.values()) >= sum(p.numel() for p in module.parameters()) > 0


class _Output:
    """Standard output while a model is traced: what it prints of its batch must be of the whole one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        ctx.note("prints")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def watching(module: nn.Module, first: bool) -> Iterator[None]:
    """While ``module`` is called on rows; ``first`` if no call around it is being traced."""
    own = _generators(module)
    before = positions(own)
    with _outermost() if first else nullcontext():
        yield
    if positions(own) != before:
        ctx.note("own random")


@contextmanager
def _outermost() -> Iterator[None]:
    logarithms = {name: _of_float(getattr(math, name)) for name in ("log", "log2", "log10")}  # they read the digits
    with replaced(math, **logarithms), Sized(), redirect_stdout(_Output(sys.stdout)):  # type: ignore[type-var]
        yield


def _of_float(function: Callable[..., Any]) -> Any:
    return lambda x, *base: function(float(x) if isinstance(x, BatchSize) else x, *base)


def _generators(module: nn.Module) -> list:
    """The script's own random generators that a module may draw from. The common streams are looked at anyway."""
    written = [c for c in type(module).__mro__ if not c.__module__.startswith(("torch.", "builtins"))]
    own = (value for name, value in vars(module).items() if name not in OF_EVERY_MODULE)
    parts = [*own, *(f for c in written for f in vars(c).values())]
    return [g for part in parts for g in generators(part)]


def batch_dim(leaf: torch.Tensor, offsets: Offsets, side: int) -> int | None:
    """Which dimension of a plain tensor is the batch; ``side``: the second one goes before the first."""
    for dim in (1, 0) if side else (0,):
        if leaf.dim() > dim and int.__int__(leaf.shape[dim]) == offsets[-1]:  # (no use of the size by the model)
            return dim
    return None


def kind_of(leaf: Any, offsets: Offsets, side: int = 0) -> Any:
    """What tells one argument from another: calls with arguments of other kinds are traced by themselves."""
    if isinstance(leaf, Rows):
        return (leaf.dim_, leaf.local.dim())
    if isinstance(leaf, torch.Tensor):
        return (batch_dim(leaf, offsets, side), leaf.dim(), "plain")
    if leaf is None or isinstance(leaf, (*_VALUES, enum.Enum, torch.dtype)):
        return leaf
    if isinstance(leaf, np.generic):
        return leaf.item()
    function = leaf.__func__ if is_a(leaf, types.MethodType) else leaf
    if is_a(function, types.FunctionType):
        return function.__code__
    return (type(leaf), *((k, v) for k, v in list(fields(leaf).items()) if is_a(v, *_VALUES)))


def nests(module: nn.Module, args: tuple, kwargs: dict) -> bool:
    """PyTorch's encoder may leave padding out when it is evaluated, and give zeros for it, if all rows of the batch
    are padded at their ends. Not under a script's own function mode (a default device)."""
    return (isinstance(module, nn.TransformerEncoder) and not module.training and bool(module.use_nested_tensor)
            and (args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")) is not None
            and torch._C._len_torch_function_stack() == Sized.on
            and not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())))


def hooks_of_all_modules() -> bool:
    """Whether hooks of all modules are to see the global batch."""
    return bool(hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks)
