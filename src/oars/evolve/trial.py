"""Whether a network stays what it is when units leave: copies of it say so before anything is touched.

The copy that is cut has to give the same output as one in whose tensors the same units are zeros, in training and in
evaluation. Both copies hold weights drawn at random: a gate that is zero at the beginning would hide a difference.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from oars.evolve.cut import KEPT, Cut, cut_module, fill_value, kept_in, select, tensors_of

NEAR = {torch.float64: 1e-7, torch.float32: 1e-3}  # relative to the largest output
SEED = 20  # of the weights that are drawn


class Example(NamedTuple):
    """What a model was called with, a few rows of it; ``path`` is the module's name in the model, "" for itself."""

    path: str
    args: tuple
    kwargs: dict


class Unfit(Exception):
    """Why units cannot leave: a few words for the user."""


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy without the script's hooks, which are not to notice, and without what earlier cuts have noted."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for key, value in module.__dict__.items():
            if ("_hooks" in key and isinstance(value, dict)) or key == KEPT:
                memo[id(value)] = type(value)()
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise Unfit(f"the model cannot be copied ({brief(error)})") from None
    for module in made.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.__dict__["dropout"] = 0.0
        if "Dropout" in type(module).__name__ and isinstance(getattr(module, "p", None), float):
            module.__dict__["p"] = 0.0
    return made


def brief(error: BaseException) -> str:
    """An error in one short line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What the model prints, and what it draws, does not count."""
    generator = torch.default_generator
    before = generator.get_state()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(
                io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        generator.set_state(before)


class Still(TorchFunctionMode):
    """What is drawn for each unit is the same for all: masks and noise of two widths can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.rstrip("_").endswith(("dropout", "dropout1d", "dropout2d", "dropout3d")) and args:
            return args[0]
        if name in ("randn_like", "rand_like") and args:
            return torch.full_like(args[0], 0.5, **kwargs)
        if name == "scaled_dot_product_attention" and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def draw_weights(model: nn.Module) -> None:
    """Weights of ordinary size, the same each time."""
    generator = torch.Generator().manual_seed(SEED)
    seen: set[int] = set()

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    for name, tensor in tensors_of(model):
        if id(tensor) in seen or not tensor.is_floating_point():
            continue
        seen.add(id(tensor))
        key = name.rpartition(".")[2]
        if isinstance(tensor, nn.Parameter):
            if tensor.dim() > 1:
                value = drawn(tensor) / math.sqrt(max(1, tensor.numel() // tensor.shape[0]))
            else:
                value = 0.1 * drawn(tensor) + (0.0 if "bias" in key else 1.0)
        elif key == "running_mean":
            value = 0.1 * drawn(tensor)
        elif key == "running_var":
            value = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            continue
        tensor.data.copy_(value)


def zeroed(model: nn.Module, cut: Cut) -> None:
    """Zeros where units would leave."""
    for name, tensor in tensors_of(model):
        if name in cut.tensors:
            whole = torch.full_like(tensor.data, fill_value(name))
            left = torch.meshgrid(*[torch.arange(size) if indices is None else torch.tensor(indices)
                                    for size, indices in zip(tensor.shape, cut.tensors[name], strict=True)],
                                  indexing="ij")
            left = tuple(part.to(tensor.device) for part in left)
            whole[left] = tensor.data[left]
            tensor.data.copy_(whole)


def disagreement(model: nn.Module, examples: list[Example], cut: Cut) -> str:
    """Why the model would not be the same after this cut; "" if it would be."""
    with unheard(), torch.no_grad():
        full = plain_copy(model)
        draw_weights(full)
        small = copy.deepcopy(full)
        try:
            cut_module(small, cut)
        except (RuntimeError, IndexError, KeyError, AttributeError) as error:
            return f"its tensors cannot be cut ({brief(error)})"
        zeroed(full, cut)
        kept = dict(kept_in(small))
        for name, tensor in tensors_of(small):  # as the file of the small network would be made
            if name in cut.tensors and tensor.shape != select(dict(tensors_of(full))[name], cut.tensors[name]).shape:
                return f"{name} is shared with a layer that is cut in another way"
        if not kept:
            return "nothing would leave"
        for training in (True, False):
            full.train(training)
            small.train(training)
            for example in examples:
                why = compare(full.get_submodule(example.path), small.get_submodule(example.path), example, training)
                if why:
                    return why
    return ""


def compare(full: nn.Module, small: nn.Module, example: Example, training: bool) -> str:
    """Why two models that are to give the same do not; "" if they do."""
    dtype, why = torch.float64, ""
    try:
        wanted = _outputs(copy.deepcopy(full).double(), example, torch.float64)
    except Exception:  # it has a type of its own in it
        dtype = torch.float32
        try:
            wanted = _outputs(copy.deepcopy(full), example, None)
        except Exception as error:
            if training:
                return ""  # with these rows it only evaluates (one row has no statistics)
            return f"the model could not be called again ({brief(error)})"
    try:
        got = _outputs(copy.deepcopy(small).double() if dtype is torch.float64 else copy.deepcopy(small), example,
                       dtype if dtype is torch.float64 else None)
    except Exception as error:
        return f"the smaller model fails ({brief(error)})"
    if not wanted:
        return "its result has no tensors that could be compared"
    if [t.shape for t in wanted] != [t.shape for t in got]:
        return "its units are the model's output"
    for a, b in zip(wanted, got, strict=True):
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            return "the trial gives no finite numbers"
        largest = float(a.abs().max()) if a.numel() else 0.0
        if a.numel() and float((a - b).abs().max()) > NEAR[dtype] * max(largest, 1e-3):
            why = "the output would change: something in the model mixes its units (a norm over them, a fixed view)"
    return why


def _outputs(model: nn.Module, example: Example, dtype: torch.dtype | None) -> list[torch.Tensor]:
    def given(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(dtype, copy=True) if dtype is not None and x.is_floating_point() else x.clone()

    args, kwargs = tree_map(given, (example.args, example.kwargs))
    state = torch.default_generator.get_state()
    with Still():
        out = model(*args, **kwargs)
    torch.default_generator.set_state(state)
    return [t.double() for t in tree_leaves(_opened(out)) if isinstance(t, torch.Tensor) and t.numel()]


def _opened(out: Any) -> Any:
    """A result of a class of its own as what it holds."""
    held = getattr(out, "__dict__", None)
    known = isinstance(out, (torch.Tensor, dict, list, tuple))
    return {k: v for k, v in held.items() if isinstance(v, (torch.Tensor, list, tuple))} if held and not known else out
