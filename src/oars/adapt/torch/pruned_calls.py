"""``--prune`` where the script meets PyTorch: its models' calls, its loaders, and what it saves and loads.

These layers lie around all others (``seams.py``). Files keep the script's own shapes: ``state_dict`` fills what was cut
with zeros, ``load_state_dict`` cuts what has these shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from oars.adapt.torch.context import ctx
from oars.evolve import cut, schedule
from oars.evolve.cut import Kept


def module_call(inner: Callable[..., Any]) -> Any:
    """Around ``nn.Module.__call__``: which modules the script calls itself, and with what."""
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        pruner = ctx.pruner
        # ``ctx.busy``: rows that were lost with a rank are being made again.
        if pruner is None or pruner.inside or ctx.trying or ctx.busy or not ctx.in_step:
            return inner(self, *args, **kwargs)
        pruner.called(self, args, kwargs)
        pruner.inside += 1
        try:
            return inner(self, *args, **kwargs)
        finally:
            pruner.inside -= 1

    return functools.wraps(inner)(call)


def loader_iter(inner: Callable[..., Any]) -> Any:
    """Around ``DataLoader.__iter__``: a pass begins."""
    def begin(self: DataLoader) -> Any:
        out = inner(self)
        if ctx.pruner is not None and ctx.in_step:
            try:
                length = len(self)
            except TypeError:
                length = None
            ctx.pruner.latest = ctx.pruner.passes[out] = schedule.Pass(length)
        return out

    return functools.wraps(inner)(begin)


def iter_next(inner: Callable[..., Any]) -> Any:
    """Around a loader's ``__next__``: a batch of a pass."""
    def next_(self: Any) -> Any:
        data = inner(self)
        if ctx.pruner is not None and ctx.in_step:
            ctx.pruner.schedule.clock.batch(ctx.pruner.passes.get(self, ctx.pruner.latest))
        return data

    return functools.wraps(inner)(next_)


def state_dict(inner: Callable[..., Any]) -> Any:
    """Around ``nn.Module.state_dict``: in the script's own shapes."""
    def give(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        pruner = ctx.pruner
        if pruner is not None and not ctx.trying:
            pruner.take_back()
            pruner.asked += pruner.main is not None
        held = inner(self, *args, **kwargs)
        if pruner is None or kwargs.get("keep_vars") or args[2:]:
            return held
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for key, kept in cut.kept_of(self).items():
            value = held.get(prefix + key)
            if isinstance(value, torch.Tensor) and tuple(value.shape) != kept[0]:
                made = held[prefix + key] = cut.filled(value, kept, cut.fill_value(key))
                pruner.lent.append((made, made._version, cut.tensor_of(self, key), kept[1]))
        return held

    return functools.wraps(inner)(give)


def load_state_dict(inner: Callable[..., Any]) -> Any:
    """Around ``nn.Module.load_state_dict``: what has the script's own shapes is cut."""
    def load(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if ctx.pruner is not None:
            ctx.pruner.take_back()
        kept = cut.kept_in(self)
        if kept and isinstance(state_dict, Mapping):
            small = {name: cut.select(state_dict[name], dims) for name, (shape, dims) in kept.items()
                     if isinstance(state_dict.get(name), torch.Tensor) and tuple(state_dict[name].shape) == shape}
            if small:
                metadata = getattr(state_dict, "_metadata", None)
                state_dict = type(state_dict)({**state_dict, **small})  # type: ignore[call-arg]
                if metadata is not None:
                    state_dict._metadata = metadata  # type: ignore[attr-defined]
        return inner(self, state_dict, *args, **kwargs)

    return functools.wraps(inner)(load)


def optimizer_state_dict(inner: Callable[..., Any]) -> Any:
    """Around ``Optimizer.state_dict``: in the script's own shapes."""
    def give(self: Optimizer) -> Any:
        held = inner(self)
        return {**held, "state": _of_parameters(self, held["state"], lambda value, shape, kept: cut.filled(
            value, kept) if value.shape == shape else value)} if ctx.pruner is not None and "state" in held else held

    return functools.wraps(inner)(give)


def optimizer_load_state_dict(inner: Callable[..., Any]) -> Any:
    """Around ``Optimizer.load_state_dict``: what has the script's own shapes is cut."""
    def load(self: Optimizer, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if ctx.pruner is not None and "state" in state_dict:
            state_dict = {**state_dict, "state": _of_parameters(
                self, state_dict["state"], lambda value, shape, kept: cut.select(value, kept[1])
                if tuple(value.shape) == kept[0] else value)}
        return inner(self, state_dict, *args, **kwargs)

    return functools.wraps(inner)(load)


def _of_parameters(optimizer: Optimizer, state: Mapping[Any, Any],
                   change: Callable[[torch.Tensor, torch.Size, Kept], torch.Tensor]) -> dict[Any, Any]:
    """An optimizer's state by its parameters' numbers, with the tensors of those that were cut changed."""
    made = dict(state)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(params):
        kept = ctx.pruner.kept.get(p) if ctx.pruner is not None else None
        if kept is not None and isinstance(made.get(number), dict):
            made[number] = {key: change(value, p.shape, kept) if isinstance(value, torch.Tensor) and value.dim()
                            else value for key, value in made[number].items()}
    return made


def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """A hook behind every optimizer's step, after the step's record was written."""
    if ctx.in_step and ctx.pruner is not None and not ctx.trying:
        ctx.pruner.stepped(optimizer)
