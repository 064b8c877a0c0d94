"""What tensor operations do on rows: elementwise work, work along dimensions, sums and means, copies and reads.

A rule gets the operation and its arguments and returns the result; it raises ``Unsplit`` where own rows are not enough,
and then the arguments are gathered. Shapes and indexing are in ``shapes.py``, products and layers in ``layers.py``,
losses in ``losses.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from oars.adapt.torch.context import Offsets, ctx
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows.mirror import lend
from oars.adapt.torch.rows.size import BatchSize
from oars.adapt.torch.rows.tensor import (
    RULES,
    WITHOUT_ROWS,
    Rows,
    Unsplit,
    beside_rows,
    cut,
    gathered,
    whole,
    wrap,
)


def rule(*names: str) -> Callable[[Callable], Callable]:
    """Register a rule under these operation names: a function of the operation, its arguments and keyword arguments."""

    def register(f: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


# ---- elementwise --------------------------------------------------------------------------------------------------


def localizer(args: tuple, kwargs: dict, op: str) -> tuple[Callable[[Any], Any], Offsets, int]:
    """How to make the arguments of a broadcasting operation local, and how its result is cut.

    Returns (localize, offsets, dimension counted from the right). The rows with most dimensions lead; other rows
    that lie the same way join, those that do not are gathered; plain tensors that span the batch are cut.
    """
    rows = [a for a in (*args, *kwargs.values()) if isinstance(a, Rows)]
    if not rows:
        raise Unsplit
    lead = max(rows, key=lambda r: r.local.dim())
    offsets, right = lead.offsets, lead.dim_ - lead.local.dim()
    batch = offsets[-1]

    def localize(a: Any) -> Any:
        if isinstance(a, Rows):
            if a.offsets == offsets and a.dim_ - a.local.dim() == right:
                return a.local
            a = beside_rows(a, op)
        if isinstance(a, BatchSize):
            ctx.note("size")
        if isinstance(a, torch.Tensor) and a.dim() >= -right:
            size = a.shape[right]
            if size == batch and batch != 1:
                return cut(a, offsets, a.dim() + right)
            if size != 1:
                raise Unsplit  # a batch of one row spread over more, or an error that the plain operation will tell
        return a

    return localize, offsets, right


def pointwise(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Elementwise with broadcasting."""
    if kwargs.get("out") is not None:
        raise Unsplit
    op = func.__name__.strip("_")
    inplace = func.__name__.endswith("_") and not func.__name__.endswith("__") or func.__name__[:3] == "__i"
    inplace = inplace and func.__name__ != "__invert__"
    if inplace and not isinstance(args[0], Rows):
        raise Unsplit
    localize, offsets, right = localizer(args, kwargs, op)
    if inplace and (args[0].offsets != offsets or args[0].dim_ - args[0].local.dim() != right):
        raise Unsplit
    out = func(*map(localize, args), **{k: localize(v) for k, v in kwargs.items()})
    if inplace or kwargs.get("inplace"):
        return args[0]
    dims = out.dim() if isinstance(out, torch.Tensor) else out[0].dim()
    return wrap(out, offsets, dims + right)


def _pointwise_names() -> Iterable[str]:
    """PyTorch's own list of elementwise operations, and the Python spellings of them."""
    tagged = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else []
        if any(torch.Tag.pointwise in getattr(packet, o).tags for o in overloads):
            tagged.add(name)
    tagged -= {"max", "min", "native_dropout_backward"}
    more = """absolute arccos arccosh arcsin arcsinh arctan arctanh arctan2 divide multiply subtract negative fix
        float_power floor_divide greater greater_equal less less_equal not_equal isreal isclose square masked_fill
        nan_to_num conj resolve_conj resolve_neg real imag softplus logsigmoid tanhshrink softsign hardswish
        relu6 special_expit special_exp2 special_expm1 special_erf special_erfc special_erfinv
        special_log1p special_logit special_ndtr special_sinc special_round special_gammaln special_digamma
        special_psi special_polygamma special_xlogy special_i0 special_multigammaln
        hypot fmod remainder true_divide rsub lerp addcmul addcdiv where rdiv rpow
        rmul radd and or xor invert iand ior ixor lshift rshift rlshift rrshift rand ror rxor rtruediv truediv rsub
        rfloordiv floordiv rmod mod eq ne lt le gt ge iadd isub imul itruediv idiv ipow pow add sub mul
        fill zero""".split()
    for name in tagged | set(more):
        yield from (name, name + "_", f"__{name}__")


RULES.update(dict.fromkeys(_pointwise_names(), pointwise))


@rule("bucketize")
def bucketize(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Each number by itself; the boundaries are not rows."""
    x, *rest = args
    if not isinstance(x, Rows) or any(isinstance(a, Rows) for a in (*rest, *kwargs.values())) or "out" in kwargs:
        raise Unsplit
    return wrap(func(x.local, *rest, **kwargs), x.offsets, x.dim_)


@rule("relu", "relu_", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu", "selu_", "celu", "celu_", "gelu", "silu",
      "mish", "hardtanh", "hardtanh_", "hardsigmoid", "hardswish", "threshold", "threshold_", "hardshrink",
      "softshrink", "sigmoid", "tanh")
def activation(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Elementwise, with ``inplace`` as an argument in torch.nn.functional."""
    x = args[0] if args else kwargs["input"]
    if not isinstance(x, Rows):
        raise Unsplit
    rest = args[1:] if args else ()
    out = func(x.local, *rest, **{k: v for k, v in kwargs.items() if k != "input"})
    if out is x.local or func.__name__.endswith("_"):
        return x
    return Rows(out, x.offsets, x.dim_)


@rule("where")
def where(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Elementwise choice; with a condition alone it lists places, which needs the whole."""
    if len(args) == 1:
        raise Unsplit
    return pointwise(func, args, kwargs)


# ---- along dimensions ---------------------------------------------------------------------------------------------

# name -> (position of dim, its default, whether the result keeps the dimension)
ALONG: dict[str, tuple[int, Any, bool]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp",
                     "special_softmax", "special_log_softmax", "_softmax", "cumsum_", "cumprod_"), (1, None, True)),
    **dict.fromkeys(("sort", "argsort", "glu"), (1, -1, True)),
    **dict.fromkeys(("topk",), (2, -1, True)),
    **dict.fromkeys(("flip",), (1, None, True)),
    **dict.fromkeys(("roll",), (2, None, True)),
    **dict.fromkeys(("normalize",), (2, 1, True)),
    **dict.fromkeys(("gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "scatter_", "scatter_add_",
                     "index_fill", "index_fill_"), (1, None, True)),
    **dict.fromkeys(("argmax", "argmin", "max", "min", "median", "nanmedian", "mode", "logsumexp", "var", "std",
                     "var_mean", "std_mean", "sum", "mean", "prod", "amax", "amin", "any", "all", "nansum", "nanmean",
                     "count_nonzero", "aminmax"), (1, None, False)),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "quantile", "nanquantile"), (2, None, False)),
    **dict.fromkeys(("kthvalue",), (2, -1, False)),
    **dict.fromkeys(("cosine_similarity",), (2, 1, False)),
}
_SOFT = ("softmax", "log_softmax", "softmin")
_BATCH: dict[str, Callable] = {}  # name -> what to do when the batch's dimension is among those combined


def dims_of(x: Rows, args: tuple, kwargs: dict, position: int, default: int | None) -> tuple[int, ...] | None:
    """The dimensions an operation works along (normalised), or None for all."""
    dim = kwargs.get("dim", kwargs.get("axis", kwargs.get("dims")))
    if dim is None and len(args) > position and not isinstance(args[position], (torch.dtype, bool)):
        dim = args[position]
        if isinstance(dim, torch.Tensor) or (isinstance(dim, (tuple, list)) and not dim):
            raise Unsplit
        if isinstance(dim, int) and len(args) > position + 1 and all(type(a) is int for a in args[position:]):
            dim = tuple(args[position:])  # x.flip(1, 2)
    dim = default if dim is None else dim
    if dim is None:
        return None
    n = x.local.dim()
    return tuple(d % n for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def along(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Work along given dimensions that treats all others independently."""
    name = func.__name__
    base = name.rstrip("_") if not name.startswith("_") else name
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Rows) or kwargs.get("out") is not None:
        raise Unsplit
    if base in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return pointwise(func, args, kwargs)
    position, default, keeps = ALONG[name]
    if default is None and base in _SOFT:
        default = 0 if x.local.dim() in (0, 1, 3) else 1  # as PyTorch has it, and warns
    dims = dims_of(x, args, kwargs, position, default)
    if dims is None or x.dim_ in dims:
        if base in _BATCH:
            return _BATCH[base](func, args, kwargs, x, dims)
        raise Unsplit
    if base in ("quantile", "nanquantile") and isinstance(args[1], torch.Tensor) and args[1].dim():
        raise Unsplit
    if base == "cosine_similarity":
        if not all(isinstance(a, Rows) and a.offsets == x.offsets and a.dim_ == x.dim_
                   and a.local.dim() == x.local.dim() for a in args[:2]):
            raise Unsplit
    local = [_beside(a, x) for a in args]
    out = func(*local, **{k: _beside(v, x) for k, v in kwargs.items()})
    if name.endswith("_") and not name.startswith("_"):
        return x
    left = out.dim() if isinstance(out, torch.Tensor) else out[0].dim()
    keeps = keeps or left == x.local.dim()
    dim = x.dim_ if keeps else x.dim_ - sum(d < x.dim_ for d in dims)
    return wrap(out, x.offsets, dim)


def _beside(a: Any, x: Rows) -> Any:
    """An argument that lies beside ``x`` (an index, a source): its rows for these rows."""
    if isinstance(a, Rows):
        if a.offsets == x.offsets and a.dim_ == x.dim_ and a.local.dim() == x.local.dim():
            return a.local
        raise Unsplit
    if isinstance(a, torch.Tensor) and a.dim() == x.local.dim() and a.dim() > 1:
        if a.shape[x.dim_] == x.offsets[-1]:
            return cut(a, x.offsets, x.dim_)
        raise Unsplit
    return a


RULES.update(dict.fromkeys(ALONG, along))


def batch_rule(*names: str) -> Callable[[Callable], Callable]:
    """Register what a reduction over the batch's dimension does."""

    def register(f: Callable) -> Callable:
        _BATCH.update(dict.fromkeys(names, f))
        return f

    return register


@batch_rule("sum", "mean", "nansum", "count_nonzero")
def total(func: Callable[..., Any], args: tuple, kwargs: dict, x: Rows, dims: tuple | None) -> torch.Tensor:
    """Sums over the batch: own part, then over ranks. A mean divides by the global count."""
    ctx.note("combine")
    local, name = x.local, func.__name__
    if name != "mean":
        return collectives.Sum.apply(func(local, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"}))
    dtype = kwargs.get("dtype") or next((a for a in args[1:] if isinstance(a, torch.dtype)), None) or local.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise Unsplit  # as on one process: an error
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    every = tuple(range(local.dim())) if dims is None else dims
    keepdim = kwargs.get("keepdim", len(args) > 2 and args[2] is True)
    count = 1
    for d in every:
        count *= x.offsets[-1] if d == x.dim_ else local.shape[d]
    return (collectives.Sum.apply(local.sum(every, keepdim=keepdim, dtype=wide)) / count).to(dtype)


@batch_rule("max", "min", "amax", "amin", "any", "all")
def extreme(func: Callable[..., Any], args: tuple, kwargs: dict, x: Rows, dims: tuple | None) -> torch.Tensor:
    """Largest, smallest, any, all: each rank's own, then over ranks."""
    name = func.__name__
    if (name in ("max", "min") and dims is not None) or (x.local.requires_grad and torch.is_grad_enabled()):
        raise Unsplit
    ctx.note("combine")
    have = [b > a for a, b in zip(x.offsets, x.offsets[1:], strict=False)]
    if not any(have):
        raise Unsplit
    starts = tuple(sum(have[:r]) for r in range(ctx.size + 1))
    rest = {k: v for k, v in kwargs.items() if k != "input"}
    if have[ctx.rank]:
        part = func(x.local, *args[1:], **rest).unsqueeze(0)
    else:
        one = x.local.new_zeros([1 if d == x.dim_ else s for d, s in enumerate(x.local.shape)])
        part = func(one, *args[1:], **rest).unsqueeze(0)[:0]
    parts = collectives.Gather.apply(part, starts, 0)
    return getattr(parts, {"max": "amax", "min": "amin"}.get(name, name))(0)


@batch_rule("norm", "linalg_vector_norm", "linalg_norm")
def norm(func: Callable[..., Any], args: tuple, kwargs: dict, x: Rows, dims: tuple | None) -> torch.Tensor:
    """The 2-norm over the whole batch from every rank's own squares."""
    p = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    if func.__name__ == "linalg_norm" and p in (2, 2.0) and x.local.dim() == 2:
        raise Unsplit  # a matrix's largest singular value
    if dims is not None or p not in (None, 2, 2.0, "fro") or set(kwargs) - {"p", "ord", "input"} or len(args) > 2:
        raise Unsplit
    ctx.note("combine")
    return collectives.Sum.apply(x.local.square().sum()).sqrt()


# ---- copies, casts, moves, reads ----------------------------------------------------------------------------------


@rule("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
      "type_as", "contiguous", "clone", "detach", "pin_memory", "cfloat", "cdouble", "alias", "requires_grad_",
      "detach_", "share_memory_", "retain_grad", "positive", "__pos__", "zeros_like", "ones_like", "full_like",
      "empty_like", "heaviside", "nan_to_num", "triu", "tril", "zero_", "fill_", "view_as_real",
      "view_as_complex")
def own_rows(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The same on own rows; other rows among the arguments (``x.to(y)``) only say of what kind."""
    x = args[0] if args else kwargs["input"]
    if not isinstance(x, Rows):
        if func.__name__ in ("to", "type_as"):
            return func(x, *[a.local if isinstance(a, Rows) else a for a in args[1:]], **kwargs)
        raise Unsplit
    if func.__name__ in ("triu", "tril") and x.dim_ >= x.local.dim() - 2:
        raise Unsplit
    rest = [a.local if isinstance(a, Rows) else a for a in args[1:]]
    kwargs = {k: v for k, v in kwargs.items() if k != "input"}
    if kwargs.get("memory_format") is torch.channels_last and x.local.dim() != 4:
        raise Unsplit
    out = func(x.local, *rest, **kwargs)
    if out is x.local:
        return x
    return Rows(out, x.offsets, x.dim_) if isinstance(out, torch.Tensor) else out


@rule("type")
def type_(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """``x.type()`` names the kind; ``x.type(t)`` casts."""
    out = func(args[0].local, *args[1:], **kwargs)
    return Rows(out, args[0].offsets, args[0].dim_) if isinstance(out, torch.Tensor) else out


@rule("is_floating_point", "is_complex", "element_size", "get_device", "is_signed", "is_contiguous", "is_pinned",
      "is_inference", "is_conj", "is_neg", "is_shared", "dense_dim", "ndimension", "dim", "new_tensor", "new",
      "result_type", "has_names", "is_coalesced", "__hash__", "is_distributed", "can_cast", "is_tensor")
def of_own(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The answer is that of own rows."""
    if func.__name__ == "__hash__":
        return id(args[0])
    local = [a.local if isinstance(a, Rows) else a for a in args]
    return func(*local, **{k: v.local if isinstance(v, Rows) else v for k, v in kwargs.items()})


@rule("size")
def size(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Global, as ``shape``."""
    shape = args[0].shape
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


@rule("__len__")
def length(func: Callable[..., Any], args: tuple, kwargs: dict) -> int:
    """Global."""
    if args[0].dim_ == 0:
        ctx.note("size")  # len() cannot return a BatchSize
        return args[0].offsets[-1]
    return len(args[0].local)


@rule("numel", "nelement")
def numel(func: Callable[..., Any], args: tuple, kwargs: dict) -> int:
    """Global."""
    ctx.note("size")
    x = args[0]
    count = x.offsets[-1]
    for d, s in enumerate(x.local.shape):
        count *= 1 if d == x.dim_ else s
    return count


@rule("stride")
def stride(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """As a contiguous global tensor has them where the local one is contiguous."""
    x = args[0]
    return torch.empty(x.shape, device="meta").stride(*args[1:], **kwargs)


@rule("__deepcopy__")
def deepcopy(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """See Rows."""
    return Rows.__deepcopy__(*args)


@rule("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "tolist", "numpy", "__array__",
      "__repr__", "__format__", "__str__", "__contains__", "equal", "allclose", "is_nonzero")
def read(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The script reads values: the global ones."""
    ctx.note("read")
    out = gathered(func, args, kwargs)
    return lend(args[0], out) if func.__name__ == "numpy" else out


@rule("__iter__", "unbind")
def iterate(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Row by row on the whole; along other dimensions on own rows."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.local.dim()
    if dim == x.dim_:
        return func(whole(x, "iteration"), *args[1:], **kwargs)
    new = x.dim_ - (dim < x.dim_)
    parts = [Rows(p, x.offsets, new) for p in x.local.unbind(dim)]
    return iter(parts) if func.__name__ == "__iter__" else tuple(parts)


_SAFE = (own_rows, type_, of_own, size, length, numel, stride, deepcopy)
WITHOUT_ROWS.update(("register_hook", "backward"), (n for n, r in RULES.items() if r in _SAFE))
