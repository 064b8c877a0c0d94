"""What a run's state is made of, found without the script's help; and how it is put back.

Models that the script called, optimizers, schedulers and gradient scalers it made, what it asked to keep, and its own
variables: tensors (and models) that can be reached from the functions it is in and from the modules it is made of. All
have names, the same ones when the script is played to the same place: by these they are put back, in place.

A variable's tensor is taken if it is small, if it was changed since the first step, or made since then; data that lie
there from the beginning are not, nor is a large batch that has just been worked on.
"""

from __future__ import annotations

import gc
import os
import site
import sys
import sysconfig
import types
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import oars
from oars import kept
from oars.adapt.python.looking import fields, is_a, items, slots
from oars.adapt.replay.snapshot_file import Blob, Refused, decode, encode
from oars.adapt.replay.tape import LARGEST, Diverged
from oars.adapt.torch.replay import placeholder
from oars.adapt.torch.replay.progress import progress
from oars.adapt.torch.rows import tensor as rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.autograd.graph import Node
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

MANY = 10_000  # elements of a container that are looked at
SOME = 1 << 24  # bytes of one tensor of the last batch, or of its results, that is taken: most are not needed any more
MOST = 1 << 28  # bytes of variables in a snapshot, besides those of models
_FOREIGN = ("<frozen ", *(os.path.join(path, "") for path in {
    *sysconfig.get_paths().values(), *site.getsitepackages(), os.path.dirname(os.path.abspath(oars.__file__))}
    if path not in (sysconfig.get_path("data"), sysconfig.get_path("scripts"))))
_MODULE_OWN = {*nn.Module().__dict__, "_compiled_call_impl"}
_OPTIMIZER_OWN = {"defaults", "state", "param_groups"}
_known: dict[int, tuple[weakref.ref, int]] = {}  # large tensors that were there at the first step: their version then
_script_files: dict[str, bool] = {}


def _is_script(file: object) -> bool:
    if type(file) is not str:
        return False
    known = _script_files.get(file)
    if known is None:
        known = _script_files[file] = not file.startswith(_FOREIGN) and os.path.basename(file) != "<string>"
    return known


class Walk:
    """Names for everything that belongs to the state. ``tensors`` and ``attributes`` hold what was found."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[Any, Any, str]] = {}  # name -> tensor, the module that holds it, its name there
        self.variables: dict[str, Any] = {}
        self.attributes: dict[str, tuple[dict, str]] = {}  # name -> where the value lies
        self._seen: set[int] = set()
        self._held: list[Any] = []  # keeps ids unique while we look
        for module, k in _numbered(progress.modules):
            self._module(f"module {k}", module)
        for optimizer, k in _numbered(progress.made["optimizers"]):
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                self._tensor(f"optimizer {k}.{i}", p, None, "")
            self._attributes(f"optimizer {k}", optimizer.__dict__, _OPTIMIZER_OWN)
        for name, variables in _scopes():
            for key, value in variables:
                self._visit(f"{name}.{key}", value, 0)

    def _first(self, thing: object) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        self._held.append(thing)
        return True

    def _module(self, name: str, module: nn.Module) -> None:
        for path, part in module.named_modules():
            if not self._first(part):
                continue
            at = f"{name}.{path}" if path else name
            for own in (part._parameters, part._buffers):
                for key, tensor in own.items():
                    if tensor is not None:
                        self._tensor(f"{at}.{key}", tensor, part, key)
            self._attributes(at, part.__dict__, _MODULE_OWN)
            for key, value in part.__dict__.items():
                if key not in _MODULE_OWN:
                    self._visit(f"{at}.{key}", value, 8)

    def _tensor(self, name: str, tensor: object, holder: nn.Module | None, key: str) -> None:
        if self._first(tensor):
            self.tensors[name] = tensor, holder, key

    def _attributes(self, name: str, values: dict, but: set[str]) -> None:
        for key, value in values.items():
            if key not in but and not key.startswith("__") and _simple(value):
                self.attributes[f"{name}:{key}"] = values, key

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if value is None or is_a(value, bool, int, float, str, bytes, type, types.ModuleType) or depth > 12:
            return
        if is_a(value, torch.Tensor):
            if value.layout is torch.strided and self._first(value):  # sparse ones are data: graphs, one-hot features
                self.variables[name] = value
            return
        if is_a(value, nn.Module):
            self._module(name, value)
            return
        if not self._first(value):
            return
        for key, inner in _inside(value):
            self._visit(f"{name}{key}", inner, depth + 1)


def living() -> Walk:
    """What is there on every rank: not what the garbage collector has found on some, and will find on others."""
    gc.collect()
    return Walk()


def _inside(value: Any) -> Any:
    """What a container, an object of the script's own classes, or a function of its own holds."""
    if is_a(value, dict, list, tuple, deque):
        return items(value, MANY)
    if is_a(value, types.FunctionType):
        if _is_script(value.__code__.co_filename) and value.__closure__:
            names = value.__code__.co_freevars
            return [(f".{n}", c.cell_contents) for n, c in zip(names, value.__closure__, strict=True) if _full(c)]
        return ()
    if is_a(value, types.MethodType):
        return [(".self", value.__self__)]
    if is_a(value, types.GeneratorType):
        frame: Any = value.gi_frame
        seen = frame is not None and _is_script(frame.f_code.co_filename)
        return [(f".{k}", v) for k, v in frame.f_locals.items()] if seen else ()
    module = sys.modules.get(type(value).__module__)
    if _is_script(fields(module).get("__file__")):
        return [(f".{k}", v) for k, v in (*list(fields(value).items()), *slots(value))]
    return ()


def _full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _scopes() -> list[tuple[str, list]]:
    """The variables of the script's modules, and of those of its functions that are running."""
    found: list[tuple[str, list]] = []
    for name, module in list(sys.modules.items()):
        if _is_script(fields(module).get("__file__")):
            found.append((name, [(k, v) for k, v in list(fields(module).items()) if not k.startswith("__")]))
    frames = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _is_script(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            frames.append((frame.f_code.co_name, list(frame.f_locals.items())))
        frame = frame.f_back
    return sorted(found) + [(f"{i} {name}()", variables) for i, (name, variables) in enumerate(reversed(frames))]


def _numbered(things: Mapping[Any, int]) -> list[tuple[Any, int]]:
    return sorted(things.items(), key=lambda pair: pair[1])


def _simple(value: Any, depth: int = 0) -> bool:
    """Whether a value is plain data that a snapshot can hold and compare."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if depth > 3 or type(value) not in (list, tuple, dict, set) or len(value) > 1000:
        return False
    return all(_simple(v, depth + 1) for v in (value.values() if isinstance(value, dict) else value)) and (
        not isinstance(value, dict) or all(type(k) in (str, int) for k in value))


# ---- taking ---------------------------------------------------------------------------------------------------------


def remember() -> None:
    """At the first step: which large tensors are there, data for the most part."""
    for tensor in Walk().variables.values():
        if tensor.nbytes > LARGEST:
            _known[id(tensor)] = weakref.ref(tensor), tensor._version


def to_be_differentiated() -> bool:
    """Whether a variable has a graph that no backward has gone through: a snapshot could not hold that."""
    for tensor in living().variables.values():
        node = getattr(tensor, "local", tensor).grad_fn
        if node is not None and _is_live(node):
            return True
    return False


def _is_live(node: Node | None) -> bool:
    """Backward frees what a graph has saved: the first node that has saved something tells."""
    seen: set[Any] = set()
    stack = [node]
    while stack and len(seen) < 1000:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    saved = getattr(node, name)
                except RuntimeError:  # "Trying to backward through the graph a second time"
                    return False
                if isinstance(saved, torch.Tensor) or (name == "saved_tensors" and saved):
                    return True
        stack += [n for n, _ in node.next_functions]
    return False


def take(at: str, voice: bool) -> tuple[dict[str, Any], list[Blob]]:
    """The state, at a boundary of kind ``at``; all ranks take part, only the voice copies anything."""
    blobs: list[Blob] = []

    def convert(value: object) -> Any:
        if isinstance(value, rows.Rows):
            value = rows.whole(value, "snapshot").detach()
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise Refused(f"a {value.layout} tensor in the state cannot be held in a snapshot")
            if not voice:
                return {"$tensor": None}
            blobs.append(_blob(value))
            return {"$tensor": [len(blobs) - 1, str(value.device)]}
        for kind, tag in ((torch.dtype, "$dtype"), (torch.device, "$device")):
            if isinstance(value, kind):
                return {tag: str(value).removeprefix("torch.")}
        return {"$tuple": list(value)} if isinstance(value, torch.Size) else None

    def put(value: object, name: str) -> Any:
        return encode(value, blobs, name, convert)

    walk = living()
    state: dict[str, Any] = {"tensors": {name: put(t.detach(), name) for name, (t, _, _) in walk.tensors.items()}}
    room = MOST + sum(t.nbytes for t, _, _ in walk.tensors.values())  # (only the voice has copies)
    state["left out"] = []
    variables = {}
    state["rows"] = {name: t.dim_ for name, t in walk.variables.items() if isinstance(t, rows.Rows)}
    for name, tensor in walk.variables.items():
        if not _wanted(tensor, at) or tensor.nbytes > room:
            state["left out"].append(name)
            continue
        room -= tensor.nbytes
        variables[name] = put(tensor.detach(), name)
    state["variables"] = variables
    state["attributes"] = {name: put(values[key], name) for name, (values, key) in walk.attributes.items()}
    state["optimizers"] = {
        str(k): _optimizer(o, f"optimizer {k}", put) for o, k in _numbered(progress.made["optimizers"])}
    for kind in ("schedulers", "scalers"):
        state[kind] = {str(k): _state_dict(x, put) for x, k in _numbered(progress.made[kind])}
    state["kept"] = [put(s, f"oars.keep({type(o).__name__})") for o, s in zip(kept.kept, kept.states(), strict=True)]
    return state, blobs


def _wanted(tensor: torch.Tensor, at: str) -> bool:
    if isinstance(tensor, placeholder.StandIn) and tensor.value is None:
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.nbytes <= LARGEST:
        return True
    if tensor.grad_fn is not None or (at == "b" and progress.in_last_batch(tensor)):
        return tensor.nbytes <= SOME
    known: Any = _known.get(id(tensor))
    return known is None or known[0]() is not tensor or known[1] != tensor._version


def _blob(tensor: torch.Tensor) -> Blob:
    copied = tensor.detach().to("cpu", copy=True).contiguous()
    flat = copied.reshape(-1)
    data = (flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)).numpy()
    return Blob("torch", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _optimizer(optimizer: Optimizer, name: str, put: Callable[[object, str], Any]) -> dict[str, Any]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    late = progress.backwards > progress.at_step.get(optimizer, 0)  # gradients that its next step may yet use
    return {
        "groups": [{k: put(v, f"{name}'s {k}") for k, v in group.items() if k != "params"}
                   for group in optimizer.param_groups],
        "shapes": [list(p.shape) for p in params],
        "state": [put(dict(optimizer.state[p]), f"{name}'s state") if p in optimizer.state else None for p in params],
        "named": {k: put(v, f"{name}'s state") for k, v in optimizer.state.items() if isinstance(k, str)},
        "grads": [put(p.grad.to_dense(), "a gradient") if late and p.grad is not None else None for p in params],
    }


def _state_dict(thing: LRScheduler | torch.amp.GradScaler, put: Callable[[object, str], Any]) -> dict[str, Any]:
    """A scheduler's or scaler's state; what is not plain data in it (functions) the script made anew."""
    held = {}
    for key, value in thing.state_dict().items():
        try:
            held[key] = put(value, key)
        except Refused:
            pass
    return held


# ---- putting back ---------------------------------------------------------------------------------------------------


def put_back(state: dict[str, Any], blobs: list[Blob]) -> None:
    """Put the state in, in place; Diverged where the script has built something else."""

    def build(tag: str, inner: Any) -> Any:
        if tag == "$tensor":
            return _tensor(blobs[inner[0]]).to(inner[1])
        return getattr(torch, inner) if tag == "$dtype" else torch.device(inner)

    def get(value: object) -> Any:
        return decode(value, blobs, build)

    walk = living()
    for name, coded in state["tensors"].items():
        _put_tensor(name, get(coded), walk)
    for name, coded in state["variables"].items():
        if name in walk.variables:
            placeholder.fill(walk.variables[name], get(coded))
    for name, coded in state["attributes"].items():
        if name in walk.attributes:
            values, key = walk.attributes[name]
            if (value := get(coded)) != values[key]:
                values[key] = value
    for optimizer, k in _numbered(progress.made["optimizers"]):
        if str(k) in state["optimizers"]:
            _put_optimizer(optimizer, state["optimizers"][str(k)], get)
    for kind in ("schedulers", "scalers"):
        for thing, k in _numbered(progress.made[kind]):
            if held := state[kind].get(str(k)):
                thing.load_state_dict({**thing.state_dict(), **{key: get(v) for key, v in held.items()}})
    for scaler in progress.made["scalers"]:
        for tensor in (scaler._scale, scaler._growth_tracker):
            if tensor is not None:
                placeholder.fresh(tensor)
    if len(kept.kept) < len(state["kept"]):
        raise Diverged(f"it kept {len(state['kept'])} objects with oars.keep the first time, and {len(kept.kept)} now")
    kept.restore([get(s) for s in state["kept"]])


def _tensor(blob: Blob) -> torch.Tensor:
    dtype = getattr(torch, blob.dtype)
    if not blob.data.size:
        return torch.empty(blob.shape, dtype=dtype)
    return torch.from_numpy(blob.data.copy()).view(dtype).reshape(blob.shape)


def _put_tensor(name: str, value: torch.Tensor, walk: Walk) -> None:
    there, holder, key = walk.tensors.get(name, (None, None, ""))
    if isinstance(there, placeholder.StandIn) and holder is not None:  # of a copy of a model made while playing
        _put_new(there, holder, key, value)
        return
    if there is not None and placeholder.fill(there, value):
        return
    owner = holder if holder is not None else _owner(name, walk)
    leaf = name.rpartition(".")[2]
    if owner is not None and leaf not in owner._parameters:  # a buffer that was made, or grew, in a call
        owner._buffers[leaf] = value
        return
    what = "is not there now" if there is None else f"has the shape {tuple(there.shape)} now, {tuple(value.shape)} then"
    raise Diverged(f"{name} {what}")


def _put_new(there: torch.Tensor, holder: nn.Module, key: str, value: torch.Tensor) -> None:
    if key in holder._buffers:
        holder._buffers[key] = value
        return
    new = holder._parameters[key] = nn.Parameter(value, there.requires_grad)
    for optimizer in progress.made["optimizers"]:
        for group in optimizer.param_groups:
            group["params"] = [new if p is there else p for p in group["params"]]


def _owner(name: str, walk: Walk) -> Any:
    """The module that a tensor named like this would belong to."""
    prefix = name.rpartition(".")[0]
    holders = (holder for n, (_, holder, _) in walk.tensors.items() if n.rpartition(".")[0] == prefix)
    return next((holder for holder in holders if holder is not None), None)


def _put_optimizer(optimizer: Optimizer, held: dict[str, Any], get: Callable[[object], Any]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if [list(p.shape) for p in params] != held["shapes"] or len(optimizer.param_groups) != len(held["groups"]):
        raise Diverged(f"{type(optimizer).__name__} has other parameters than the first time")
    for group, values in zip(optimizer.param_groups, held["groups"], strict=True):
        for key, coded in values.items():
            value = get(coded)
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                placeholder.fill(group[key], value)
            else:
                group[key] = value
    for p, coded, grad in zip(params, held["state"], held["grads"], strict=True):
        if coded is not None:
            optimizer.state[p] = get(coded)
        elif p in optimizer.state:
            del optimizer.state[p]
        p.grad = None if grad is None else get(grad)
    for key, coded in held["named"].items():
        optimizer.state[key] = get(coded)

