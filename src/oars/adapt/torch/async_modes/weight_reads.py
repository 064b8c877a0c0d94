"""Weights that are read, or kept twice, while ranks are on their own.

Reads: ranks meet, and average, where the values of weights leave PyTorch (``numpy``, ``item``, ``print``) or are copied
(``deepcopy``, ``pickle``, ``torch.jit``, ``torch.export``), not only where a module's ``state_dict`` is asked for.

Copies: a script that keeps a running average of its weights, or a copy that it puts back, has each rank's own of it.
Where a module that is evaluated or saved came to differ between ranks, all go on from the mean. A running average is
linear: the mean of the ranks' is the running average of their means. So with an optimizer's state, which is each rank's
own, where it steps with gradients of all ranks again (a model that is trained in ``eval()``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from oars.adapt.torch.backward.flat_buffers import Weights, digest_of, weights_of
from oars.adapt.torch.context import ctx


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


def of_tensor(inner: Callable) -> Callable:
    """Around what reads a tensor's values: ranks meet before weights are read."""
    @functools.wraps(inner)
    def read(*args: object, **kwargs: object) -> Any:
        if ctx.separate and args and ctx.phases.storages.hold(args[0]):
            ctx.phases.read()
        return inner(*args, **kwargs)

    return read


def of_modules(inner: Callable) -> Callable:
    """Around what copies a module's weights."""
    @functools.wraps(inner)
    def read(*args: object, **kwargs: object) -> Any:
        if ctx.separate and args and isinstance(args[0], nn.Module):
            ctx.phases.read()
        return inner(*args, **kwargs)

    return read


def of_module(module: nn.Module) -> dict[Any, torch.Tensor]:
    """What a module has that may differ between ranks."""
    return dict(enumerate({id(t): t for t in (*module.parameters(), *module.buffers())}.values()))


def of_state(optimizer: Optimizer) -> dict[Any, torch.Tensor]:
    """What an optimizer has that may differ between ranks, besides its weights."""
    return {(i, name): value for i, p in enumerate(weights_of(optimizer))
            for name, value in optimizer.state.get(p, {}).items() if isinstance(value, torch.Tensor)}


def unlike(tensors: dict[Any, torch.Tensor]) -> Weights:
    """Those of these tensors that all ranks have, but not the same, to the bit."""
    gathered = ctx.world.allgather({key: digest_of(t) for key, t in tensors.items() if not is_lazy(t) and not t.is_meta
                                and t.layout is torch.strided and (t.is_floating_point() or t.is_complex())})
    return Weights([t for key, t in tensors.items() if all(key in of for of in gathered)
                    and any(of[key] != gathered[0][key] for of in gathered)])
