"""Units leave tensors, and come back as zeros.

A tensor that was cut remembers what it was: its module's ``_oars_kept`` holds, under the tensor's name, the script's
own shape and, for each dimension, which indices are left (None: all). This travels with copies of the module.

A cut keeps the parameter objects: hooks, optimizer groups and the script's own lists stay valid. ``p.data = smaller``
alone leaves autograd with the old shape while the last loss lives; a change of the type in between makes it look again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

Dims = tuple[tuple[int, ...] | None, ...]  # which indices are left along each dimension; None: all
Kept = tuple[tuple[int, ...], Dims]  # the script's own shape, and what is left of it
KEPT = "_oars_kept"


class Cut:
    """What leaves one model: by the names of its tensors, and the attributes of its modules that tell widths."""

    def __init__(self, tensors: dict[str, Dims], attributes: dict[str, dict[str, Any]]) -> None:
        self.tensors, self.attributes = tensors, attributes


def select(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
    """What is left of a tensor, as a new one."""
    out = tensor.detach()
    for dim, indices in enumerate(dims):
        if indices is not None:
            out = out.index_select(dim, torch.tensor(indices, device=out.device))
    return out.clone(memory_format=torch.contiguous_format) if out is tensor else out.contiguous()


def filled(tensor: torch.Tensor, kept: Kept, value: float = 0.0) -> torch.Tensor:
    """A tensor in the script's own shape: ``value`` stands where units are gone."""
    shape, dims = kept
    out = tensor.new_full(shape, value)
    out[_grid(shape, dims)] = tensor.detach()
    return out


def _grid(shape: tuple[int, ...], dims: Dims) -> tuple[torch.Tensor, ...]:
    left = [torch.tensor(range(size) if part is None else part) for size, part in zip(shape, dims, strict=True)]
    return tuple(indices.view([-1 if d == dim else 1 for d in range(len(shape))]) for dim, indices in enumerate(left))


def fill_value(name: str) -> float:
    """What stands in the script's shape for a unit that is gone: it must not divide by nothing."""
    return 1.0 if name.rpartition(".")[2] == "running_var" else 0.0


def kept_of(module: nn.Module) -> dict[str, Kept]:
    """What was cut of a module's own tensors."""
    return module.__dict__.get(KEPT, {})


def tensor_of(module: nn.Module, key: str) -> torch.Tensor:
    """A module's own parameter or buffer."""
    found: Any = module._parameters.get(key)
    held: Any = module._buffers.get(key)
    return held if found is None else found


def cut_module(model: nn.Module, cut: Cut) -> dict[int, tuple[torch.Tensor, Kept, Dims]]:
    """Cut a model in place; its tensors that were cut, by their ids, with what is left of the script's shape and of the
    shape before this cut."""
    done: dict[int, tuple[torch.Tensor, Kept, Dims]] = {}
    for name, dims in cut.tensors.items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = tensor_of(module, key)
        if id(tensor) not in done:
            shape, before = kept_of(module).get(key) or (tuple(tensor.shape), (None,) * tensor.dim())
            done[id(tensor)] = tensor, (shape, _after(before, dims)), dims
            shrink(tensor, dims)
        module.__dict__.setdefault(KEPT, {})[key] = done[id(tensor)][1]
    for path, values in cut.attributes.items():
        module = model.get_submodule(path)
        for key, value in values.items():
            setattr(module, key, value)
    return done


def _after(before: Dims, dims: Dims) -> Dims:
    return tuple(now if old is None else old if now is None else tuple(old[i] for i in now)
                 for old, now in zip(before, dims, strict=True))


@torch.no_grad()
def shrink(tensor: torch.Tensor, dims: Dims) -> None:
    """Cut one tensor, and its gradient, in place."""
    grad = tensor.grad if tensor.is_leaf else None
    new = select(tensor.data, dims)
    if grad is not None:
        tensor.grad = None
    if tensor.requires_grad:
        tensor.data = new.to(torch.float64 if new.dtype is not torch.float64 else torch.float32)
    tensor.data = new
    if grad is not None:
        tensor.grad = select(grad, dims)


def cut_state(optimizer: torch.optim.Optimizer, done: Mapping[int, tuple[torch.Tensor, Kept, Dims]],
              shapes: Mapping[int, torch.Size]) -> None:
    """Cut what an optimizer holds for these parameters, which had ``shapes`` before."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) in done and p in optimizer.state:
                held = optimizer.state[p]
                for key, value in held.items():
                    if isinstance(value, torch.Tensor) and value.shape == shapes[id(p)]:
                        held[key] = select(value, done[id(p)][2])


def foreign_state(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer holds for a weight that has neither the weight's shape nor is one number; "" if nothing."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in (optimizer.state[p] if p in optimizer.state else {}).items():
                if isinstance(value, (list, tuple, dict)) and value or (
                        isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != p.shape):
                    return str(key)
    return ""


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def kept_in(model: nn.Module) -> dict[str, Kept]:
    """What was cut of all tensors of a model, by their names."""
    return {f"{path}.{key}" if path else key: kept
            for path, module in model.named_modules() for key, kept in kept_of(module).items()}


# ---- a network of the script's own, made small ----------------------------------------------------------------------


def fit_to(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """``oars.evolve.fit``."""
    weights = state["state"] if set(state) == {"state", "attributes"} else state
    tensors = dict(tensors_of(model))
    for name, value in weights.items():
        tensor = tensors.get(name)
        if isinstance(value, torch.Tensor) and tensor is not None and tensor.shape != value.shape:
            if tensor.dim() != value.dim():
                raise ValueError(f"{name} has {value.dim()} dimensions in the state and {tensor.dim()} in the model: "
                                 "this state is of another network")
            shrink(tensor, tuple(tuple(range(size)) for size in value.shape) if all(
                a <= b for a, b in zip(value.shape, tensor.shape, strict=True)) else _no_smaller(name, tensor, value))
    attributes = state.get("attributes") if weights is not state else None
    for path, part in model.named_modules():
        for key, size in (attributes.get(path, {}) if attributes is not None else _sizes(part)).items():
            part.__dict__[key] = tuple(size) if isinstance(size, list) else size
    model.load_state_dict(weights)
    return model


def _no_smaller(name: str, tensor: torch.Tensor, value: torch.Tensor) -> Dims:
    raise ValueError(f"{name} is {tuple(value.shape)} in the state and {tuple(tensor.shape)} in the model, which has "
                     "to be the larger one")


def _sizes(module: nn.Module) -> dict[str, Any]:
    """The attributes in which layers of PyTorch tell their widths, by the shapes of their tensors."""
    weight: Any = module._parameters.get("weight")
    if isinstance(module, nn.Linear):
        return {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    if isinstance(module, nn.modules.conv._ConvNd):
        out, inside = (1, 0) if module.transposed else (0, 1)
        if module.groups > 1 and module.groups == module.in_channels:
            return {"groups": weight.shape[0], "in_channels": weight.shape[0], "out_channels": weight.shape[out]}
        return {"out_channels": weight.shape[out] * (module.groups if module.transposed else 1),
                "in_channels": weight.shape[inside] * (1 if module.transposed else module.groups)}
    if isinstance(module, nn.modules.batchnorm._NormBase):
        held = weight if weight is not None else module._buffers.get("running_mean")
        return {"num_features": held.shape[0]} if held is not None else {}
    return {}
