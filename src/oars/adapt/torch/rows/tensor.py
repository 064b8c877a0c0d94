"""Rows: a tensor with the global shape of which this rank holds its own rows.

Operations are caught before autograd (``__torch_function__``): each has a rule (``RULES``) that says what to do on
own rows, and what has no rule is gathered, then done on the plain whole tensor. Autograd sees only plain local tensors
and the few functions of ``collectives.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from oars import debug
from oars.adapt.python.clock import perf_counter
from oars.adapt.torch.context import Offsets, ctx, mine, site, tiny
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows.looks import LOOKS, look_after, looks, together
from oars.adapt.torch.rows.mirror import Mirror, give_back, lend, recent
from oars.adapt.torch.rows.size import BatchSize, sized
from oars.engine.dissent import Whole
from oars.engine.world import RankLost

RULES: dict[str, Callable] = {}  # operation name -> rule(func, args, kwargs); filled by the other files here
FUNCTIONAL: dict[str, Callable] = {}  # the same for torch.nn.functional's own, whose arguments differ from torch's
RESHAPES: dict[str, Callable] = {}  # operations that give their first argument another shape; filled by reshapes.py
WITHOUT_ROWS: set[str] = set()  # operations that are safe on a rank without rows; others gather when there is one
# What takes time: a step without any of it on own rows alone was not split.
WORK = {"linear", "matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__", "addmm", "baddbmm", "einsum", "cdist",
        "lstm", "gru", "rnn_tanh", "rnn_relu", "embedding", "embedding_bag", "scaled_dot_product_attention",
        "multi_head_attention_forward", *(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3))}
DRAWS = {"bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like", "multinomial", "normal_", "uniform_",
         "random_", "exponential_", "cauchy_", "geometric_", "log_normal_", "rrelu", "rrelu_", "poisson", "normal",
         "dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "gumbel_softmax"}


_transforming = torch._C._are_functorch_transforms_active  # inside torch.func.grad, vmap, …, which know no rows


class Unsplit(Exception):
    """Raised by a rule that cannot work on own rows: gather instead."""


class Otherwise(Exception):
    """A call on plain own rows does something else than when it was watched: it is done again, watched."""


class Rows(torch.Tensor):
    """A global tensor cut along ``dim``: rank r holds rows offsets[r]..offsets[r+1] as ``local``."""

    __slots__ = ("local", "offsets", "dim_", "mirror", "made", "version", "era")  # none is in ``vars(x)``
    local: torch.Tensor
    offsets: Offsets
    dim_: int
    mirror: Mirror | None
    made: Any  # how, see recovery/lineage.py
    version: int  # of local, as it was made
    era: int

    @staticmethod
    def __new__(cls: type, local: torch.Tensor, offsets: Offsets, dim: int = 0) -> Rows:
        shape = list(local.shape)
        shape[dim] = offsets[-1]
        rows: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        rows.local, rows.offsets, rows.dim_, rows.mirror = local, offsets, dim, None
        rows.made, rows.version, rows.era = None, local._version, ctx.era
        ctx.sharing.rows_made |= local.requires_grad
        for trace in ctx.traces:
            trace.made.append(weakref.ref(rows))
            trace.known.add(id(rows))
        return rows

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        shape = list(self.local.shape)
        if not ctx.traces:
            shape[self.dim_] = self.offsets[-1]
            return torch.Size(shape)
        shape[self.dim_] = BatchSize(self.offsets[-1])
        return torch.Size(shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "call")
        see(args, kwargs)
        if not ctx.in_step and (name != "__get__" or func.__self__.__name__ in _DERIVED):
            return gathered(func, args, kwargs)
        if name in RESHAPES and args and type(args[0]) is Rows:
            return RESHAPES[name](func, args, kwargs)
        if _transforming() and name not in _OF_SHAPE and not (
                name in ("__get__", "__set__") and func.__self__.__name__ not in _DERIVED):
            return gathered(func, args, kwargs)
        if name == "__get__" or name == "__set__":
            attribute = func.__self__.__name__
            if name == "__get__" and attribute in _DERIVED:
                return ctx.perform(_derived, func, args, kwargs)
            return _attribute(name, attribute, func, args)
        if ctx.busy:
            return operate(func, args, kwargs)
        draws = "torch" if name in DRAWS else ""
        if not changes(name):
            return ctx.perform(operate, func, args, kwargs, draws)
        out = ctx.perform(change, func, args, kwargs, draws)
        return None if name == "__setitem__" else out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Reached only by code that goes around __torch_function__ (C++ extensions and the like), below autograd.
        def plain(a: Any) -> Any:
            if isinstance(a, Rows):
                if a.local.requires_grad and torch.is_grad_enabled():
                    raise RuntimeError(f"oars: {func} bypasses PyTorch's overrides on a tensor that needs gradients")
                return whole(a, str(func))
            return a

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        ctx.note("read")
        array = lend(self, whole(self, "__array__").numpy())
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **how: Any) -> Any:
        ctx.note("read")
        full = whole(self, "__dlpack__").detach()
        if self.mirror is not None:  # other libraries may write into it
            lend(self, self.mirror.full)
        return full.__dlpack__(**how)

    def __dir__(self) -> list[str]:
        return sorted({*dir(torch.empty(0)), *vars(self)})

    def __deepcopy__(self, memo: dict) -> Rows:
        if not self.local.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                               "protocol at the moment.")
        return ctx.perform(_copied, None, (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = whole(self, "pickle")
        return plain.detach().requires_grad_(plain.requires_grad).__reduce_ex__(protocol)


Rows.__name__ = Rows.__qualname__ = "Tensor"  # what a script that prints or compares types should see
Rows.__module__ = "torch"


def see(*args: Any) -> None:
    """Rows that a model has not been given, nor made (another module's attribute, a variable around it), are rows in
    its calls on plain own rows, too."""
    if ctx.split is not None:
        raise Otherwise
    if ctx.traces:
        for a in tree_leaves(args):
            if isinstance(a, Rows):
                for trace in ctx.traces:
                    if id(a) not in trace.known:
                        trace.events.append("rows from elsewhere")


def operate(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """An operation on rows: by its rule, or gathered."""
    name = getattr(func, "__name__", "call")
    if kwargs:
        args, kwargs = _by_torchs_names(name, args, kwargs)
    grad, joined = torch.is_grad_enabled(), False
    take_over_changes(args)
    for a in args:
        if grad and isinstance(a, torch.Tensor) and not isinstance(a, Rows) and a.requires_grad:
            joined |= ctx.gradients.enter(a)
    if joined and ctx.separate:  # without messages, backward cannot tell its own rows' part from a part of every rank
        return gathered(func, args, kwargs)
    rule = None
    if getattr(func, "__module__", None) == "torch.nn.functional":
        rule = FUNCTIONAL.get(name)
    rule = rule or RULES.get(name)
    if rule is None or (name not in WITHOUT_ROWS and any(
            isinstance(a, Rows) and tiny(a.offsets) for a in (*args, *kwargs.values()))):
        return gathered(func, args, kwargs)
    around, dissents = ctx.place, ctx.world.dissents
    ctx.operations += 1
    ctx.place = ctx.performed, ctx.operations
    try:
        out = rule(func, args, kwargs)
        if name in WORK:
            ctx.worked()
        if ctx.sharing.counting:
            ctx.sharing.operation(name, args, out)
        # What gives no rows has ended with a message.
        if name in LOOKS and (type(out) is Rows or out is None) and looks(name, args, out):
            look_after()
        return out
    except (Unsplit, KeyError):  # KeyError: a rule did not find an argument under its name
        pass
    except (RankLost, Otherwise):
        raise
    except Whole as others:
        if not others.inner:
            raise
    except Exception as error:
        if ctx.world.dissents != dissents:  # of an operation that this one is made of
            raise
        if not (type(error) is IndexError and str(error) in _NO_ARGUMENT):
            together(error, inner=True)
    finally:
        ctx.place = around
    return gathered(func, args, kwargs)


_NO_ARGUMENT = ("tuple index out of range", "list index out of range")  # it is not where the rule looks for it


def _by_torchs_names(name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments as the rules look for them: PyTorch also knows some by NumPy's names, and the first by its own."""
    kwargs = {{"axis": "dim", "keepdims": "keepdim"}.get(k, k): v for k, v in kwargs.items()}
    if not args and "input" in kwargs and name not in ("where", "searchsorted"):
        args = (kwargs.pop("input"),)
    return args, kwargs


def change(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """An operation that changes its first argument in place; gives that where it returns nothing."""
    out = operate(func, args, kwargs)
    give_back(args[0])
    return args[0] if out is None else out


def to_dlpack(inner: Callable[..., Any]) -> Any:
    """Around ``torch.utils.dlpack.to_dlpack``, which asks for the memory of a tensor that has none here."""
    return lambda tensor: tensor.__dlpack__() if isinstance(tensor, Rows) else inner(tensor)


def change_whole(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The same, on the whole batch."""
    out = gathered(func, args, kwargs)
    return args[0] if out is None else out


def take_over_changes(args: tuple | list) -> None:
    """Take over, before ``args`` are used, what the script changed in views of any whole."""
    for mirror in recent:
        mirror.take_over()
    for a in args:
        if isinstance(a, Rows) and a.mirror is not None:
            a.mirror.take_over()
            if a.mirror.lent is not None:  # looked through where it is used itself: many are kept, and used no more
                a.mirror.take_over_lent()


def wrap(out: Any, offsets: Offsets, dim: int) -> Any:
    """Tensors in ``out`` (a tensor, or a tuple or named tuple of them) become rows cut along ``dim``."""
    if isinstance(out, torch.Tensor):
        return Rows(out, offsets, dim)
    if isinstance(out, tuple):
        parts = [wrap(o, offsets, dim) for o in out]
        return type(out)(parts) if type(out) is not tuple else tuple(parts)
    if isinstance(out, list):
        return [wrap(o, offsets, dim) for o in out]
    return out


def whole(x: Rows, op: str) -> torch.Tensor:
    """The plain global tensor on every rank; ``op`` is named in the summary if this costs much."""
    if _transforming():  # it is a constant to every transform under way
        with temporarily_clear_interpreter_stack():
            return whole(x, op)
    if not ctx.in_step and (where := ctx.world.out_of_reach()):
        if x.mirror is not None and x.mirror.local is x.local and x.mirror.fresh():
            return x.mirror.full
        ctx.world.refuse(op, where)
    return _whole(op, (x,), {}) if ctx.busy else ctx.perform(_whole, op, (x,), {})


def beside_rows(x: Rows, op: str) -> torch.Tensor:
    """The whole of ``x``, for a rule that works with it on own rows of something else."""
    if ctx.separate and x.local.requires_grad and torch.is_grad_enabled():
        raise Unsplit  # its gradient comes from all ranks' rows, of which own ones tell nothing: all of it on each rank
    return whole(x, op)


def _whole(op: str, args: tuple, kwargs: dict) -> torch.Tensor:
    (x,) = args
    ctx.note(f"gather {op}")
    tracked = x.local.requires_grad and torch.is_grad_enabled()
    take_over_changes(args)
    if not tracked and x.mirror is not None and x.mirror.local is x.local and x.mirror.fresh():
        return x.mirror.full
    began = perf_counter()
    out = collectives.Gather.apply(x.local, x.offsets, x.dim_)
    if not tracked:
        x.mirror = Mirror(out, x.local, x.dim_, x.offsets)
        recent.append(x.mirror)
    seconds = perf_counter() - began
    ctx.sharing.gathered(out.nbytes)
    ctx.record.gather(f"{site()} {op}", seconds, out.nbytes)
    if debug.on:
        debug.say(f"gathered for {op} at {site()}: {out.nbytes} bytes in {seconds:.6f} s")
    return out


def stand_in(local: torch.Tensor, dim: int) -> torch.Tensor:
    """One row of zeros for a rank without rows: models need not know how to treat none."""
    shape = list(local.shape)
    shape[dim] = 1
    return local.new_zeros(shape) + local.sum() * 0 if local.requires_grad else local.new_zeros(shape)


def cut(x: torch.Tensor, offsets: Offsets, dim: int) -> torch.Tensor:
    """This rank's rows of a plain tensor that all ranks hold alike."""
    # Made inside a traced model: fine on plain local rows only if its size is the batch's and all its rows are alike.
    if ctx.traces and (x not in sized or (x.stride(dim) != 0 and not _alike(x.detach(), dim))):
        ctx.note("made rows")
    return mine(x, offsets, dim)


def _alike(x: torch.Tensor, dim: int) -> bool:
    return bool((x == x.narrow(dim, 0, 1)).all())


def gathered(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Do ``func`` on plain whole tensors; write back what it changed in place."""
    __tracebackhide__ = True  # what it raises is the script's
    changed: list[tuple[Rows, torch.Tensor]] = []

    def plain(a: Any) -> Any:
        if not isinstance(a, Rows):
            return a
        full = whole(a, func.__name__.strip("_"))
        if inplace and full.requires_grad:
            full = full.clone()  # PyTorch lets nobody change a custom function's result in place
        changed.append((a, full))
        return full

    inplace = changes(func.__name__)
    if not inplace and kwargs.get("out") is None:
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))
    args, kwargs = tree_map(plain, args), tree_map(plain, kwargs)
    versions = [full._version for _, full in changed]
    out = func(*args, **kwargs)
    for (rows, full), version in zip(changed, versions, strict=True):
        if full._version != version:
            _write_back(rows, full)
            out = rows if out is full else out
    return out


def _write_back(rows: Rows, full: torch.Tensor) -> None:
    part = mine(full, rows.offsets, rows.dim_)
    if part.requires_grad or rows.local.requires_grad:
        rows.local = part
    else:
        rows.local.copy_(part)  # in place: other rows may be views of the same memory
        if rows.mirror is not None and rows.mirror.full is full:
            rows.mirror.versions = full._version, rows.local._version  # both have it


_INPLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__iand__",
            "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imod__", "__ifloordiv__"}
def changes(name: str) -> bool:
    """Whether an operation of this name changes its first argument in place."""
    return (name.endswith("_") and not name.endswith("__")) or name in _INPLACE


_OF_SHAPE = {"size", "dim", "ndimension", "numel", "nelement", "__len__", "__hash__", "is_floating_point", "is_complex"}
_DERIVED = {"data", "real", "imag", "T", "mT", "mH", "H"}  # attributes that are rows again


def _copied(func: None, args: tuple, kwargs: dict) -> Any:
    (x,) = args
    return Rows(x.local.detach().clone().requires_grad_(x.local.requires_grad), x.offsets, x.dim_)


def _derived(func: Any, args: tuple, kwargs: dict) -> Any:
    return _attribute("__get__", func.__self__.__name__, func, args)


_SAME = {"dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "is_cuda", "is_cpu", "is_sparse", "name",
         "is_quantized", "is_meta", "is_mkldnn", "is_nested", "is_mps", "is_xpu", "itemsize", "output_nr", "_version",
         "retains_grad", "is_sparse_csr", "_backward_hooks", "is_xla", "is_mtia", "is_ipu", "is_vulkan", "is_maia",
         "_grad_fn", "volatile", "grad_dtype", "_post_accumulate_grad_hooks"}


_looked_at: WeakIdKeyDictionary = WeakIdKeyDictionary()  # own rows -> their gradient, made the true one, and by what


def _true_grad(local: torch.Tensor) -> torch.Tensor:
    """The gradient of own rows, itself and no copy: the script may change it (``x.grad.zero_()``)."""
    grad: Any = local.grad
    if grad.requires_grad:
        return grad / ctx.size
    if _looked_at.get(local, (None,))[0] is not grad:
        grad.detach().div_(ctx.size)
        _looked_at[local] = grad, ctx.size
    return grad


def before_backward() -> None:
    """What adds to the gradients of rows adds N times their own (see collectives.py)."""
    for local, (grad, size) in _looked_at.items():
        if local.grad is grad:
            grad.detach().mul_(size)
    _looked_at.clear()


def _attribute(kind: str, name: str, func: Callable[..., Any], args: tuple) -> Any:
    """``x.name`` and ``x.name = value`` of rows."""
    x = args[0]
    if kind == "__set__":
        value = args[1]
        if name == "data":
            if isinstance(value, Rows):
                x.local.data = value.local
            elif value.shape != x.shape:
                RESHAPES["set_"](torch.Tensor.set_, (x, value), {})
            else:
                x.local.data = cut(value, x.offsets, x.dim_)
        elif name == "grad":
            part = value.local if isinstance(value, Rows) else value
            if part is value is not None:
                part = cut(value, x.offsets, x.dim_)
            x.local.grad = None if part is None else part * ctx.size
        elif name in _SAME:
            func(x.local, value)
        else:
            raise AttributeError(f"oars: cannot set .{name} of a batch")
        return None
    if name in _SAME:
        return func(x.local)
    if name == "ndim":
        return x.local.dim()
    if name == "shape":
        return x.shape
    if name == "nbytes":
        return x.numel() * x.local.element_size()
    if name in ("grad", "_grad"):
        return None if x.local.grad is None else Rows(_true_grad(x.local), x.offsets, x.dim_)
    if name in ("data", "real", "imag"):
        return Rows(func(x.local), x.offsets, x.dim_)
    if name == "T" and x.local.dim() == 2 or name in ("mT", "mH", "H"):
        last = x.local.dim() - 1
        return Rows(func(x.local), x.offsets, {last: last - 1, last - 1: last}.get(x.dim_, x.dim_))
    if name == "_base":
        return None
    return func(whole(x, name))
