"""Weights that are read, or kept twice, while ranks are on their own.

Reads: ranks meet, and average, where the values of weights leave PyTorch (``numpy``, ``item``, ``print``) or are copied
(``deepcopy``, ``pickle``), not only where a module's ``state_dict`` is asked for.

Copies: a script that keeps a running average of its weights, or a copy that it puts back, has each rank's own of it.
Where a module that is evaluated or saved came to differ between ranks, all go on from the mean. A running average is
linear: the mean of the ranks' is the running average of their means.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from oars.adapt.torch.buckets import Weights, real, weights_of
from oars.adapt.torch.context import ctx

_VALUES = ("numpy", "tolist", "item", "cpu", "__float__", "__int__")
_WHOLE = ("__repr__", "__deepcopy__", "__reduce_ex__")


class Storages:
    """Where the weights lie that optimizers step; an address is not used for anything else while it is here."""

    def __init__(self) -> None:
        self._at: dict[int, torch.Tensor] = {}

    def see(self, optimizers: Iterable[Optimizer]) -> None:
        """These optimizers' weights are read, if any are."""
        self._at = {p.untyped_storage()._cdata: p.detach() for o in optimizers for p in weights_of(o)}

    def hold(self, tensor: Any) -> bool:
        """Whether a tensor is a weight, or a part or another view of one."""
        return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.untyped_storage()._cdata in self._at


def watch_reads(meet: Callable[[], None], storages: Storages) -> None:
    """``meet`` before the values of weights are read, if ranks are apart."""
    def reading(inner: Callable) -> Callable:
        @functools.wraps(inner)
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if ctx.apart and storages.hold(self):
                meet()
            return inner(self, *args, **kwargs)

        return read

    for kind, names in ((torch.Tensor, _VALUES), (nn.Parameter, _WHOLE)):
        for name in names:
            setattr(kind, name, reading(getattr(kind, name)))


def changeable(module: nn.Module) -> list[torch.Tensor]:
    """What could be averaged of a module."""
    every = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    return [t for t in every if not is_lazy(t) and not t.is_meta and t.layout is torch.strided
            and (t.is_floating_point() or t.is_complex())]


def unlike(tensors: list[torch.Tensor]) -> Weights:
    """Those of these tensors, of which all ranks have as many, that are not the same on all ranks, to the bit."""
    told = ctx.world.allgather([_digest(t) for t in tensors])
    return Weights([t for t, *sums in zip(tensors, *told, strict=False) if len(set(sums)) > 1])


def _digest(tensor: torch.Tensor) -> int:
    flat = real(tensor.detach()).to("cpu").reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
