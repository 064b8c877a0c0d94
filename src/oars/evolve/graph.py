"""Which units of a network leave together, and which are worth least.

A *ghost*, a copy of the model whose tensors hold 0, 1, 2, …, is cut by torch-pruning, which finds through autograd what
belongs together. What is left in the ghost are indices. A set of layers is cut only if a trial (``trial.py``) says that
the network stays what it is; if it does not, halves of the set are tried, down to single layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from oars.evolve.cut import Cut, Dims, kept_of, tensor_of, tensors_of
from oars.evolve.trial import Example, Unfit, brief, disagreement, plain_copy, unheard

ROOTS = (nn.Linear, nn.modules.conv._ConvNd)
FEWEST = 9  # units: a layer of fewer is left alone


class Member(NamedTuple):
    """A layer whose tensors lose something with a group's units; ``roots`` are the units, ``indices`` what goes."""

    layer: str
    out: bool
    indices: torch.Tensor
    roots: torch.Tensor


class Group(NamedTuple):
    """Units that leave together with what reads them."""

    root: str
    units: int
    members: list[Member]
    classes: list[list[int]]  # units that only leave together


class Net:
    """A model with examples of its calls, and what is known of its layers."""

    def __init__(self, model: nn.Module, examples: list[Example], trained: Callable[[torch.Tensor], bool]) -> None:
        self.model, self.examples, self.trained = model, examples, trained
        self.reasons: dict[str, str] = {}  # of each layer: why it is left alone; "" if it can be cut
        self.roots: list[str] = []  # the layers that can be cut
        self.widths: dict[str, int] = {}  # of these, at the beginning

    # -- what can be cut

    def examine(self) -> None:
        """Find which layers can be cut."""
        layers = {name: m for name, m in self.model.named_modules() if isinstance(m, ROOTS)}
        self.reasons = dict.fromkeys(layers, "it does not lead to the result")
        try:
            groups = self.groups(*self.ghost())
        except Unfit as why:
            self.reasons = dict.fromkeys(layers, str(why))
            return
        chosen: dict[str, list[int]] = {}
        for root, group in groups.items():
            frozen = not self.trained(layers[root].weight)
            if _first_width(layers[root]) < FEWEST or frozen:
                self.reasons[root] = "it is not trained" if frozen else f"it has only {group.units} units"
                continue
            if len(group.classes) > 1:
                first = [unit for one in group.classes[:max(1, len(group.classes) // 4)] for unit in one]
                chosen[root] = sorted(first)
            else:
                self.reasons[root] = "its units only leave together"
        self.reasons.update(self._sift(chosen))
        self.roots = [root for root in chosen if not self.reasons[root]]
        self.widths = {root: _first_width(layers[root]) for root in self.roots}
        for root, group in groups.items():  # layers whose units leave with another's
            for member in group.members:
                if member.out and member.layer in layers and member.layer not in groups:
                    self.reasons[member.layer] = self.reasons[root] and f"it goes with {root}: {self.reasons[root]}"

    def _sift(self, chosen: Mapping[str, list[int]]) -> dict[str, str]:
        """For each root with the units to take out: why not, or ""."""
        if not chosen:
            return {}
        try:
            why = disagreement(self.model, self.examples, self.cut(chosen))
        except Unfit as reason:
            why = str(reason)
        if not why or len(chosen) == 1:
            return dict.fromkeys(chosen, why)
        names = list(chosen)
        half = len(names) // 2
        found = {**self._sift({n: chosen[n] for n in names[:half]}), **self._sift({n: chosen[n] for n in names[half:]})}
        good = {n: chosen[n] for n in names if not found[n]}
        if len(good) == len(chosen) and why:  # each half can, both cannot
            return dict.fromkeys(chosen, why)
        return found

    # -- a cut

    def choose(self, wanted: Callable[[int], int], worth: Callable[[str], torch.Tensor | None],
               norms: bool = False) -> Cut | None:
        """The cut after which each layer has ``wanted(its first width)`` units, those of most ``worth`` (of a tensor's
        elements, by its name; with ``norms`` those of BatchNorm count too); None if there is nothing to cut. What
        cannot be cut any more gets a reason."""
        groups = self.groups(*self.ghost())
        chosen = {}
        for root in self.roots:
            group = groups[root]
            away = least(group, wanted(self.widths[root]), self._scores(group, worth, norms))
            if away:
                chosen[root] = away
        if not chosen:
            return None
        found = self._sift(chosen)
        for root, why in found.items():
            if why:
                self.reasons[root] = why
                self.roots.remove(root)
        good = {root: units for root, units in chosen.items() if not found[root]}
        return self.cut(good) if good else None

    def _scores(self, group: Group, worth: Callable[[str], torch.Tensor | None], norms: bool) -> torch.Tensor:
        scores = torch.zeros(group.units, dtype=torch.float64)
        modules = dict(self.model.named_modules())
        for member in group.members:
            module = modules.get(member.layer)
            if norms and isinstance(module, nn.modules.batchnorm._NormBase):
                for key in ("weight", "bias"):
                    elements = worth(f"{member.layer}.{key}")
                    if elements is not None and elements.shape[0] > int(member.indices.max()):
                        scores.index_add_(0, member.roots, elements.double().cpu()[member.indices])
                continue
            if not isinstance(module, ROOTS):
                continue
            elements = worth(f"{member.layer}.weight" if member.layer else "weight")
            if elements is None:
                continue
            dim = 0 if member.out != bool(getattr(module, "transposed", False)) else 1
            if elements.shape[dim] <= int(member.indices.max()):
                continue  # grouped: the other side has noted it
            sums = elements.transpose(0, dim).flatten(1).double().sum(1).cpu()
            if member.out and module.bias is not None:
                bias = worth(f"{member.layer}.bias" if member.layer else "bias")
                if bias is not None and bias.shape == sums.shape:
                    sums = sums + bias.double().cpu()
            scores.index_add_(0, member.roots, sums[member.indices])
        return scores

    def cut(self, chosen: Mapping[str, list[int]]) -> Cut:
        """What leaves the model's tensors if these units of these layers leave; Unfit if nobody can tell."""
        ghost, graph = self.ghost()
        modules = dict(ghost.named_modules())
        shapes = {name: tuple(t.shape) for name, t in tensors_of(ghost)}
        numbered: set[int] = set()
        for _, tensor in tensors_of(ghost):
            if tensor.is_floating_point() and id(tensor) not in numbered:
                numbered.add(id(tensor))
                tensor.data = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
        before = {path: _widths(module) for path, module in modules.items()}
        try:
            with torch.no_grad(), unheard():
                for root, units in chosen.items():
                    module = modules[root]
                    pruner = graph.get_pruner_of_module(module)
                    group = graph.get_pruning_group(module, pruner.prune_out_channels, list(units))
                    if not graph.check_pruning_group(group):
                        raise Unfit("nothing would be left of a layer")
                    group.prune()
        except Unfit:
            raise
        except Exception as error:
            raise Unfit(f"it cannot be cut ({brief(error)})") from None
        tensors = {}
        for name, tensor in tensors_of(ghost):
            if tuple(tensor.shape) != shapes.get(name):
                if name not in shapes:
                    raise Unfit(f"{name} would be new")
                tensors[name] = _dims(name, tensor.data, shapes[name])
        attributes = {}
        for path, module in ghost.named_modules():
            changed = {k: v for k, v in _widths(module).items() if before[path].get(k) != v}
            if changed:
                attributes[path] = changed
        return Cut(tensors, attributes)

    # -- the graph

    def ghost(self) -> tuple[nn.Module, Any]:
        """A copy of the model, and its graph."""
        import torch_pruning

        ghost = plain_copy(self.model)
        for parameter in ghost.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
        example = next(e for e in self.examples if not e.path)
        args, kwargs = copy.deepcopy((example.args, example.kwargs))

        def results(out: Any) -> list[torch.Tensor]:
            return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.grad_fn is not None]

        try:
            with unheard(), torch.enable_grad():
                graph = torch_pruning.DependencyGraph().build_dependency(
                    ghost, example_inputs=example.args, forward_fn=lambda model, _: model(*args, **kwargs),
                    output_transform=results, verbose=False)
        except Exception as error:
            raise Unfit(f"torch-pruning cannot follow the model ({brief(error)})") from None
        return ghost, graph

    def groups(self, ghost: nn.Module, graph: Any) -> dict[str, Group]:
        """What leaves together, by the layers that units leave."""
        names = {module: name for name, module in ghost.named_modules()}
        found: dict[str, Group] = {}
        try:
            with unheard():
                every = list(graph.get_all_groups(root_module_types=ROOTS))
                taken: set[str] = set()
                for each in every:
                    if names[each[0].dep.target.module] in taken:
                        continue  # its units leave with another layer's
                    root, fn = each[0].dep.target.module, each[0].dep.handler
                    units = graph.get_out_channels(root)
                    members = [Member(names[item.dep.target.module], "out" in item.dep.handler.__name__,
                                      torch.tensor(item.idxs), torch.tensor(item.root_idxs or item.idxs))
                               for item in each if item.dep.target.module in names]
                    taken.update(member.layer for member in members if member.out)
                    found[names[root]] = Group(names[root], units, members, _classes(graph, root, fn, units))
        except Exception as error:
            raise Unfit(f"torch-pruning cannot follow the model ({brief(error)})") from None
        return found


def _first_width(layer: nn.Module) -> int:
    """How many units the script has given a layer."""
    shape, _ = kept_of(layer).get("weight") or (tensor_of(layer, "weight").shape, ())
    return shape[1 if getattr(layer, "transposed", False) else 0]


def least(group: Group, wanted: int, scores: torch.Tensor) -> list[int]:
    """The units of least worth, so many that at least ``wanted`` are left."""
    worth = [(sum(float(scores[unit]) for unit in one), one) for one in group.classes]
    away: list[int] = []
    for _, one in sorted(worth, key=lambda pair: (pair[0], pair[1][0])):
        if group.units - len(away) - len(one) >= wanted:
            away += one
    return sorted(away)


def _classes(graph: Any, root: nn.Module, fn: Any, units: int) -> list[list[int]]:
    """Which units of a layer only leave together: for most layers, each by itself."""
    def with_(unit: int) -> list[int]:
        items = graph.get_pruning_group(root, fn, [unit])
        return sorted({i for item in items if item.dep.target.module is root and "out" in item.dep.handler.__name__
                       for i in item.idxs})

    if all(with_(unit) == [unit] for unit in {0, units // 2, units - 1}):
        return [[unit] for unit in range(units)]
    classes, seen = [], set()
    for unit in range(units):
        if unit not in seen:
            classes.append(with_(unit))
            seen.update(classes[-1])
    return classes


def _widths(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if type(v) is int or (
        type(v) is tuple and all(type(part) is int for part in v))}


def _dims(name: str, left: torch.Tensor, shape: tuple[int, ...]) -> Dims:
    """The indices that are left along each dimension, from the numbers of the elements that are left."""
    numbers = left.long()
    if numbers.dim() != len(shape):
        raise Unfit(f"{name} would have another number of dimensions")
    dims: list[tuple[int, ...] | None] = []
    stride = 1
    for dim in reversed(range(len(shape))):
        along = (numbers // stride % shape[dim]).transpose(0, dim).reshape(numbers.shape[dim], -1)
        line = along[:, 0]
        if not bool((along == line[:, None]).all()):
            raise Unfit(f"{name} would not be cut along its dimensions")
        indices = tuple(line.tolist())
        dims.insert(0, None if indices == tuple(range(shape[dim])) else indices)
        stride *= shape[dim]
    return tuple(dims)


class Counter(TorchFunctionMode):
    """Counts the multiply-adds of products and convolutions."""

    def __init__(self) -> None:
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        if name == "linear":
            self.count += out.numel() * given[1].shape[-1]
        elif name.startswith("conv_transpose"):
            self.count += given[0].numel() * given[1][0].numel()
        elif name.startswith("conv") and len(given) > 1 and isinstance(out, torch.Tensor):
            self.count += out.numel() * given[1][0].numel()
        elif name in ("matmul", "rmatmul", "mm", "bmm", "mv"):
            self.count += out.numel() * given[0].shape[-1]
        elif name in ("addmm", "baddbmm", "addmv"):
            self.count += out.numel() * given[1].shape[-1]
        elif name == "scaled_dot_product_attention":
            self.count += 2 * given[0].numel() * given[1].shape[-2]
        elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            weights = next(x for x in args if isinstance(x, (list, tuple)) and len(x) > 2)
            self.count += given[0].numel() // given[0].shape[-1] * sum(w.numel() for w in weights if w.dim() == 2)
        return out


def operations(model: nn.Module, example: Example) -> int | None:
    """Multiply-adds of one sample's forward; None if nobody can count them."""
    rows = next((t.shape[0] for t in tree_leaves((example.args, example.kwargs))
                 if isinstance(t, torch.Tensor) and t.dim()), 1)
    try:
        made = plain_copy(model).eval()
        args, kwargs = copy.deepcopy((example.args, example.kwargs))
        with unheard(), torch.no_grad(), Counter() as counter:
            made(*args, **kwargs)
    except Exception:
        return None
    return counter.count // max(1, rows)
