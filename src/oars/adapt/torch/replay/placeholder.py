"""Stand-ins: tensors that have a shape and no values, for what is not computed while a script is played.

A batch that is not read, a model's result that is not computed, a gradient: each is a ``StandIn``, and so is whatever
the script makes of it. Small ones are worked on as ones and zeros (that is faster than to find shapes in PyTorch's
abstract way), large ones on the meta device. A plain tensor that should have been changed with such a value, or that an
optimizer step would have changed, is *stale*: what is made of it is a stand-in too. ``Playing``, a function mode, sees
to that.

When the snapshot's place is reached, the values that the snapshot has of the script's own variables are put in
(``fill``). A stand-in that got none refuses to be used: never a wrong number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from oars.adapt.replay.tape import Diverged, tape
from oars.adapt.torch.context import site
from oars.adapt.torch.rows.tensor import Rows

SMALL = 1 << 18  # elements
_RAW = torch._C.DisableTorchFunction
_register_hook = torch.Tensor.register_hook
stale: dict[int, weakref.ref] = {}  # by id: storages whose values are not what they should be
_remain = False  # whether there may be some, in a script that was played
unsure: dict[str, str] = {}  # file:line -> what cannot be known there


def may_remain() -> None:
    """The script is played: there will be some."""
    global _remain
    _remain = True


def remain() -> bool:
    """Whether the script may have some."""
    return _remain


class StandIn(torch.Tensor):
    """A tensor without values; ``value`` once it has some again."""

    value: torch.Tensor | None

    @staticmethod
    def __new__(cls: type, shape: Sequence[int], dtype: torch.dtype, device: Any = "cpu",
                requires_grad: bool = False) -> StandIn:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device,
                                                        requires_grad=requires_grad)
        made.value = None
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: object, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        return handle(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        if tape.playing:  # code that goes around PyTorch's overrides
            return _worked_out(func, args, kwargs or {})
        return func(*mapped(_filled, args), **mapped(_filled, kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        return like(self) if self.value is None else self.value.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.value is not None:
            return self.value.__reduce_ex__(protocol)
        return _again, (tuple(self.shape), str(self.dtype), str(self.device))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.value) if self.value is not None else f"tensor(..., size={tuple(self.shape)})"


def _again(shape: tuple, dtype: str, device: str) -> StandIn:
    return StandIn(shape, getattr(torch, dtype.removeprefix("torch.")), device)


def like(x: torch.Tensor, **other: Any) -> StandIn:
    """A stand-in of the same shape."""
    with _RAW():
        how = {"dtype": x.dtype, "device": x.device, **other}
        return StandIn(tuple(x.shape), **how)


def is_tainted(x: torch.Tensor) -> bool:
    """Whether a tensor's values are not to be had."""
    if isinstance(x, StandIn):
        return x.value is None
    return bool(stale) and id(_storage(x)) in stale


def _storage(x: torch.Tensor) -> Any:
    """What a tensor shares with its views and aliases (``x.data``, ``x.detach()``)."""
    try:
        with _RAW():
            return x.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse ones, and our own rows
        return None


def mark_stale(x: torch.Tensor) -> None:
    """From here on this plain tensor's values are wrong."""
    storage = None if isinstance(x, StandIn) else _storage(x)
    key = id(storage)
    if storage is not None and key not in stale:
        stale[key] = weakref.ref(storage, lambda _: stale.pop(key, None))


def fresh(x: torch.Tensor) -> None:
    """This plain tensor is right again."""
    storage = _storage(x)
    with _RAW():
        if storage is not None and x.numel() * x.element_size() >= storage.nbytes():
            stale.pop(id(storage), None)


def fill(x: torch.Tensor, value: torch.Tensor) -> bool:
    """Give a tensor of the played part its values; False if they do not fit."""
    with _RAW():
        if tuple(x.shape) != tuple(value.shape) or x.dtype != value.dtype:
            return False
        value = value.to(x.device)
    if isinstance(x, StandIn):
        x.value = value.clone()
        with _RAW():
            if x.requires_grad:
                _register_hook(x.value.requires_grad_(), _no_graph)
        return True
    with torch.no_grad(), _RAW():
        x.detach().copy_(value)
    fresh(x)
    return True


def value_of(x: object) -> Any:
    """What a stand-in that has got its values stands for."""
    return x.value if isinstance(x, StandIn) and x.value is not None else x


def _no_graph(grad: torch.Tensor) -> None:
    raise Diverged("the script needs a gradient of a tensor from before the snapshot: a snapshot holds the values of "
                   "tensors, not their graphs")


# ---- operations -----------------------------------------------------------------------------------------------------


class Playing(TorchFunctionMode):
    """Sends operations on stale tensors the way of stand-ins; after the snapshot's place, refuses them."""

    def __torch_function__(self, func: Callable[..., Any], types: object, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if stale and not tape.busy and any(map(is_tainted, _tensors(args, kwargs))):
            return handle(func, args, kwargs)
        return func(*args, **kwargs)


def leave_mode(mode: Playing) -> None:
    """Take the mode off PyTorch's stack, from under any that the script has put on it since."""
    above = []
    while torch._C._len_torch_function_stack():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += [b for b in a if isinstance(b, torch.Tensor)]
    return found


def handle(func: Any, args: tuple, kwargs: dict) -> Any:
    """Any operation with a tainted argument."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(name, func.__self__.__name__, func, args)
    if name in _METADATA:
        with _RAW():
            return func(*args, **kwargs)
    if _overwrites(name, args, kwargs):
        fresh(args[0])
        return func(*args, **kwargs)
    if not tape.playing:
        return _afterwards(func, args, kwargs)
    rule = RULES.get(name)
    if rule is not None:
        return rule(func, args, kwargs)
    if name in _INPLACE or (name.endswith("_") and not name.endswith("__")):
        return _in_place(func, name, args, kwargs)
    return _worked_out(func, args, kwargs)


def _overwrites(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a plain tensor gets all its values anew, from good ones."""
    return (name in ("zero_", "fill_", "copy_") and not isinstance(args[0], StandIn)
            and not any(map(is_tainted, _tensors(args[1:], kwargs))))


def _in_place(func: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    if name in _DRAWING:
        _worked_out(func, args, kwargs)  # for what it draws
    for target in _tensors(args if name.startswith("_amp") else args[:1], {}):  # GradScaler's change all they are given
        mark_stale(target)
    return None if name == "__setitem__" else x


def _worked_out(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """What comes out, in shapes."""
    name = getattr(func, "__name__", str(func))
    tensors = _tensors(args, kwargs)
    lead = next((t for t in tensors if is_tainted(t)), tensors[0] if tensors else None)
    with _RAW():
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        device: Any = kwargs.get("device") or (lead.device if lead is not None else "cpu")
        small = sum(t.numel() for t in tensors) <= SMALL
    if name in _CHOOSING or (name == "__getitem__" and any(t.dtype == torch.bool for t in tensors[1:])):
        unsure.setdefault(site(), f"how many {name.strip('_')} chose is not known")
        small = True
    by_shape = name in _BY_SHAPE
    out: Any = None
    for real in (True,) if small or by_shape or name in _DRAWING else (False, True):
        try:
            out = _run(func, args, kwargs, real)
            break
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            if real:
                what = str(error).partition("\n")[0]
                raise Diverged(f"{name} at {site()} cannot be skipped: {what}") from None
    if kwargs.get("out") is not None:
        mark_stale(kwargs["out"])
        return kwargs["out"]
    if by_shape:
        return out  # what depends on a shape alone is right
    return mapped(lambda o: _wrapped(o, device, grad), out)


def _run(func: Callable[..., Any], args: tuple, kwargs: dict, real: bool) -> Any:
    if not real and "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    change = _held if real else _meta
    tape.busy += 1
    try:
        with torch.no_grad():
            return func(*mapped(change, args), **mapped(change, {k: v for k, v in kwargs.items() if k != "out"}))
    finally:
        tape.busy -= 1


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every tensor in its lists, tuples and dicts changed. PyTorch's own takes ten times as long."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([mapped(change, v) for v in value])
    if isinstance(value, tuple):  # PyTorch's named results, and the script's
        parts = [mapped(change, v) for v in value]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    return {k: mapped(change, v) for k, v in value.items()} if kind is dict else value


def _wrapped(x: torch.Tensor, device: torch.device | str, grad: bool) -> StandIn:
    return StandIn(tuple(x.shape), x.dtype, device, grad and (x.is_floating_point() or x.is_complex()))


def _held(x: torch.Tensor) -> Any:
    """Values to work on: ones, and zeros where they may be indices."""
    if not is_tainted(x) and not isinstance(x, Rows):
        return x.value if isinstance(x, StandIn) else x
    with _RAW():
        shape, dtype, device = tuple(x.shape), x.dtype, x.device
    whole = dtype not in (torch.bool,) and not dtype.is_floating_point and not dtype.is_complex
    return (torch.zeros if whole else torch.ones)(shape, dtype=dtype, device=device)


def _meta(x: torch.Tensor) -> Any:
    with _RAW():
        return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")


# ---- what is not worked out by shapes -------------------------------------------------------------------------------


def _attribute(kind: str, name: str, func: Callable[..., Any], args: tuple) -> Any:
    x = args[0]
    if name in ("data", "T", "mT", "H", "mH", "real", "imag") and is_tainted(x):
        if not tape.playing:
            return _afterwards(func, args, {})
        if kind == "__set__":
            return mark_stale(x)
        return like(x) if name == "data" else _worked_out(func, args, {})
    if isinstance(x, StandIn) and x.value is not None and kind == "__get__":
        return func(x.value)
    with _RAW():
        return func(*args)


def _afterwards(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The snapshot's place is behind us."""
    return func(*mapped(_filled, args), **mapped(_filled, kwargs))


def _filled(x: torch.Tensor) -> Any:
    if isinstance(x, StandIn) and x.value is not None:
        return x.value
    if is_tainted(x):
        raise Diverged(f"{site()} uses a tensor made before the snapshot that the snapshot does not have: keep what "
                       "holds it with oars.keep (docs/snapshots.md)")
    return x


def _moved(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """``to``, ``cpu``, ``cuda``: dtype and device as they come."""
    x = args[0]
    with _RAW():
        device, dtype, requires_grad = x.device, x.dtype, x.requires_grad
    if func.__name__ != "to":
        device = torch.device("cpu") if func.__name__ == "cpu" else torch.device("cuda", torch.cuda.current_device())
    else:
        for given in (*args[1:], kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")):
            if isinstance(given, torch.dtype):
                dtype = given
            elif isinstance(given, torch.Tensor):
                device, dtype = given.device, given.dtype
            elif isinstance(given, (str, torch.device)) or (isinstance(given, int) and not isinstance(given, bool)):
                device = torch.device(given)
    return StandIn(tuple(x.shape), dtype, device, requires_grad and torch.is_grad_enabled())


def _copied(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A stale tensor is copied as it is, so that copies of models stay models."""
    tape.busy += 1
    try:
        made = func(*args, **kwargs)
    finally:
        tape.busy -= 1
    mark_stale(made)
    return made


def _handle(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    from torch.utils.hooks import RemovableHandle

    return RemovableHandle({})


def _pass(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    with _RAW():
        return func(*args, **kwargs)


RULES: dict[str, Any] = {
    "to": _moved, "cpu": _moved, "cuda": _moved,
    "detach": lambda func, args, kwargs: like(args[0]),
    "clone": lambda func, args, kwargs: like(args[0], requires_grad=args[0].requires_grad and torch.is_grad_enabled()),
    "contiguous": lambda func, args, kwargs: args[0] if isinstance(args[0], StandIn) else like(args[0]),
    "__deepcopy__": _copied, "register_hook": _handle, "register_post_accumulate_grad_hook": _handle,
    "retain_grad": lambda func, args, kwargs: None, "pin_memory": lambda func, args, kwargs: args[0],
    "share_memory_": lambda func, args, kwargs: args[0], "data_ptr": lambda func, args, kwargs: 0,
    "requires_grad_": _pass, "__reduce_ex__": _pass, "__hash__": _pass, "__repr__": _pass,
}
_METADATA = {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_signed",
             "is_contiguous", "element_size", "storage_offset", "get_device", "__len__", "is_tensor", "is_same_size",
             "_is_view", "has_names", "is_inference", "is_pinned", "__dir__"}
_INPLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__iand__",
            "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imod__", "__ifloordiv__"}
_CHOOSING = {"nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "argwhere", "nonzero_static"}
_BY_SHAPE = {"rand_like", "randn_like", "randint_like", "zeros_like", "ones_like", "full_like", "empty_like",
             "new_zeros", "new_ones", "new_full", "new_empty"}
_DRAWING = {"bernoulli", "multinomial", "normal", "poisson", "binomial", "dropout", "feature_dropout", "alpha_dropout",
            "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu", "gumbel_softmax", "bernoulli_",
            "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_",
            "_standard_gamma", "_sample_dirichlet", "native_dropout"}
