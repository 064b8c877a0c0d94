"""Units come to layers, and the network stays what it is: new ones are drawn as PyTorch draws them, and what reads them
has zeros for them at first, so the output changes by nothing.

A layer grows only if a trial shows this, as before a cut.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from typing import Any

import torch
from torch import nn

from oars.evolve.cut import shrink, tensor_of, tensors_of
from oars.evolve.graph import ROOTS, Group, Net
from oars.evolve.trial import Example, Unfit, brief, compare, draw_weights, plain_copy, unheard


class Growth:
    """What comes to one model: the new part of each tensor by its name, with the dimension along which it is joined;
    and the attributes of its modules that tell widths."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[int, torch.Tensor]] = {}
        self.attributes: dict[str, dict[str, Any]] = {}


def growth(net: Net, group: Group, width: int, seed: int) -> Growth | str:
    """What a group needs to have ``width`` units; or why it cannot grow."""
    made, more = Growth(), width - group.units
    modules = dict(net.model.named_modules())
    draw = torch.Generator().manual_seed(seed)
    for member in group.members:
        module = modules.get(member.layer)
        each = len(member.indices) // group.units
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for key, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                tensor = tensor_of(module, key)
                if tensor is not None:
                    made.parts[f"{member.layer}.{key}"] = 0, torch.full((more,), value, dtype=tensor.dtype)
            made.attributes[member.layer] = {"num_features": width}
        elif isinstance(module, ROOTS) and not getattr(module, "transposed", False) and getattr(
                module, "groups", 1) == 1:
            weight = tensor_of(module, "weight")
            name = f"{member.layer}.weight" if member.layer else "weight"
            if name in made.parts:
                return "it reads itself"
            if member.out:
                shape = (more, *weight.shape[1:])
                bound = 1 / math.sqrt(math.prod(shape[1:]))
                made.parts[name] = 0, ((2 * torch.rand(shape, generator=draw) - 1) * bound).to(weight.dtype)
                if module.bias is not None:
                    made.parts[name[:-6] + "bias"] = 0, ((2 * torch.rand(more, generator=draw) - 1) * bound).to(
                        weight.dtype)
                made.attributes[member.layer] = {
                    "out_features" if isinstance(module, nn.Linear) else "out_channels": width}
            else:
                made.parts[name] = 1, torch.zeros((weight.shape[0], more * each, *weight.shape[2:]), dtype=weight.dtype)
                made.attributes[member.layer] = {"in_features" if isinstance(module, nn.Linear) else "in_channels":
                                                 weight.shape[1] + more * each}
        elif module is not None and any(True for _ in module.parameters(recurse=False)):
            return f"{type(module).__name__} is behind it"
    why = _trial(net.model, net.examples, made)
    return why or made


def widened(model: nn.Module, examples: list[Example], widths: dict[str, int]) -> tuple[list[Growth], dict[str, str]]:
    """What a model needs for the layers of these patterns to have these widths, one layer after the other; and of each
    layer that cannot have it why. The model itself is left as it is."""
    copied = plain_copy(model)
    net = Net(copied, examples, lambda weight: True)
    found: list[Growth] = []
    reasons: dict[str, str] = {}
    try:
        roots = list(net.groups(*net.ghost()))
        for number, root in enumerate(roots):
            width = next((wide for pattern, wide in widths.items() if fnmatch.fnmatchcase(root, pattern)), 0)
            if not width:
                reasons[root] = "no pattern names it"
                continue
            group = net.groups(*net.ghost())[root]
            if group.units >= width:
                reasons[root] = f"it has {group.units} units"
                continue
            change = growth(net, group, width, number)
            if isinstance(change, str):
                reasons[root] = change
                continue
            join(copied, change, [])
            found.append(change)
    except Unfit as why:
        reasons[type(model).__name__] = str(why)
    return found, reasons


def _trial(model: nn.Module, examples: list[Example], change: Growth) -> str:
    with unheard(), torch.no_grad():
        small = plain_copy(model)
        draw_weights(small)
        large = copy.deepcopy(small)
        try:
            join(large, change, [])
        except (RuntimeError, AttributeError) as error:
            return f"it cannot grow ({brief(error)})"
        for training in (True, False):
            small.train(training)
            large.train(training)
            for example in examples:
                if why := compare(small.get_submodule(example.path), large.get_submodule(example.path), example,
                                   training):
                    return why
    return ""


@torch.no_grad()
def join(model: nn.Module, change: Growth, optimizers: list[torch.optim.Optimizer]) -> None:
    """Let a model grow in place, with its optimizers' state: a new weight has the mean second moment, and no past."""
    tensors = dict(tensors_of(model))
    for name, (dim, part) in change.parts.items():
        tensor = tensors[name]
        shape = tensor.shape
        part = part.to(tensor.device)
        for optimizer in optimizers:
            held = optimizer.state[tensor] if tensor in optimizer.state else {}
            for key, value in list(held.items()):
                if isinstance(value, torch.Tensor) and value.shape == shape:
                    new = torch.full_like(part, value.mean().item() if key == "exp_avg_sq" else 0.0, dtype=value.dtype)
                    held[key] = torch.cat([value, new], dim)
        replace(tensor, torch.cat([tensor.data, part], dim))
    for path, values in change.attributes.items():
        part_of = model.get_submodule(path)
        for key, size in values.items():
            setattr(part_of, key, size)


def replace(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Put a tensor of another shape in a parameter's place; it has no gradient then."""
    tensor.grad = None
    tensor.data = new
    shrink(tensor, (None,) * tensor.dim())
