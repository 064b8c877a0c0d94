"""What products and torch.nn.functional's layers do on rows.

Layers that take the batch first treat samples independently: they run on own rows as they are. Batch normalisation and
dropout have their own modules (``model/batchnorm.py``, ``model/dropout.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from oars.adapt.torch.context import Split, ctx, scaled
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows.ops import rule
from oars.adapt.torch.rows.tensor import FUNCTIONAL, RULES, Rows, Unsplit, beside_rows, cut, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# name -> number of dimensions a batched input has (without the batch it has one less: then dimension 0 is another)
BATCHED = {
    **{f"conv{d}d": d + 2 for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": d + 2 for d in (1, 2, 3)},
    **{f"{kind}_pool{d}d": d + 2 for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp") for d in (1, 2, 3)},
    **{f"max_pool{d}d_with_indices": d + 2 for d in (1, 2, 3)},
    **{f"max_unpool{d}d": d + 2 for d in (1, 2, 3)},
    "pixel_shuffle": 4, "pixel_unshuffle": 4, "grid_sample": 4, "channel_shuffle": 4, "local_response_norm": 4,
    "fold": 3,
}
ANY_RANK = ("group_norm", "instance_norm", "interpolate", "upsample", "prelu", "bilinear")


def _first(args: tuple, kwargs: dict) -> tuple[Rows, tuple, dict]:
    """The input, given by place or by name."""
    if args:
        return args[0], args[1:], kwargs
    kwargs = dict(kwargs)
    return kwargs.pop("input"), (), kwargs


def batch_first(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Samples along dimension 0, each treated by itself."""
    x, rest, kwargs = _first(args, kwargs)
    name = func.__name__
    if not isinstance(x, Rows) or x.dim_ != 0:
        raise Unsplit
    if name in BATCHED and x.local.dim() != BATCHED[name]:
        raise Unsplit
    if name == "instance_norm" and len(rest) > 0 and rest[0] is not None:
        raise Unsplit  # running statistics are means over the batch
    if name == "instance_norm" and kwargs.get("running_mean") is not None:
        raise Unsplit
    beside = {"bilinear", "grid_sample", "max_unpool1d", "max_unpool2d", "max_unpool3d"}
    local = [_same(a, x) if name in beside else _never(a) for a in rest]
    return wrap(func(x.local, *local, **{k: _never(v) for k, v in kwargs.items()}), x.offsets, 0)


def _same(a: Any, x: Rows) -> Any:
    if isinstance(a, Rows):
        if a.offsets != x.offsets or a.dim_ != x.dim_:
            raise Unsplit
        return a.local
    if isinstance(a, torch.Tensor) and a.dim() == x.local.dim() and a.shape[0] == x.offsets[-1]:
        return cut(a, x.offsets, 0)
    return a


def _never(a: Any) -> Any:
    if isinstance(a, Rows):
        raise Unsplit  # weights that depend on the batch
    return a


RULES.update(dict.fromkeys((*BATCHED, *ANY_RANK), batch_first))
for _name in ("group_norm", "instance_norm", "batch_norm", "layer_norm", "embedding", "unfold"):
    RULES.pop(_name, None)  # torch's own of these names take other arguments: only nn.functional's have rules
FUNCTIONAL.update(dict.fromkeys(("group_norm", "instance_norm"), batch_first))


def _unfold(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    x, rest, kwargs = _first(args, kwargs)
    if x.dim_ or x.local.dim() != 4:
        raise Unsplit
    return Rows(func(x.local, *rest, **kwargs), x.offsets, 0)


def _window(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    x, dim = args[0], args[1] % args[0].local.dim()
    if dim == x.dim_:
        raise Unsplit
    return Rows(func(x.local, *args[1:]), x.offsets, x.dim_)


FUNCTIONAL["unfold"] = _unfold
RULES["unfold"] = _window


@rule("linear")
def linear(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Every position by itself."""
    x, rest, kwargs = _first(args, kwargs)
    if not isinstance(x, Rows) or x.dim_ == x.local.dim() - 1:
        raise Unsplit
    return Rows(func(x.local, *map(_never, rest), **{k: _never(v) for k, v in kwargs.items()}), x.offsets, x.dim_)


@rule("pad")
def pad(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Pads the last dimensions."""
    x, rest, kwargs = _first(args, kwargs)
    width = rest[0] if rest else kwargs["pad"]
    mode = rest[1] if len(rest) > 1 else kwargs.get("mode", "constant")
    if x.dim_ >= x.local.dim() - len(width) // 2 or (mode != "constant" and x.dim_ != 0):
        raise Unsplit
    return Rows(func(x.local, *rest, **kwargs), x.offsets, x.dim_)


def _over_last(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Normalisation over the last dimensions."""
    x, rest, kwargs = _first(args, kwargs)
    shape = rest[0] if rest else kwargs["normalized_shape"]
    if not isinstance(x, Rows) or x.dim_ >= x.local.dim() - len(shape):
        raise Unsplit
    return Rows(func(x.local, *map(_never, rest), **{k: _never(v) for k, v in kwargs.items()}), x.offsets, x.dim_)


FUNCTIONAL["layer_norm"] = FUNCTIONAL["rms_norm"] = RULES["rms_norm"] = _over_last


def _embedding(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A table looked up by entry."""
    x, rest, kwargs = _first(args, kwargs)
    if not isinstance(x, Rows) or _minds_others(rest, kwargs, 2):
        raise Unsplit
    return Rows(func(x.local, *map(_never, rest), **kwargs), x.offsets, x.dim_)


def _minds_others(rest: tuple, kwargs: dict, at: int) -> bool:
    """Whether all entries that the batch looks up are counted, or normalised in place."""
    max_norm = rest[at] if len(rest) > at else kwargs.get("max_norm")
    return max_norm is not None or bool(rest[at + 2] if len(rest) > at + 2 else kwargs.get("scale_grad_by_freq"))


def _embedding_bag(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """One bag a row when the input is a matrix; with offsets, bags are ragged."""
    x, rest, kwargs = _first(args, kwargs)
    if not isinstance(x, Rows) or x.local.dim() != 2 or x.dim_ or _minds_others(rest, kwargs, 2):
        raise Unsplit
    kwargs = {k: _same(v, x) for k, v in kwargs.items()}
    return Rows(func(x.local, *map(_never, rest), **kwargs), x.offsets, 0)


FUNCTIONAL["embedding"], FUNCTIONAL["embedding_bag"] = _embedding, _embedding_bag


@rule("one_hot")
def one_hot(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Row by row once the number of classes is given."""
    x, rest, kwargs = _first(args, kwargs)
    classes = rest[0] if rest else kwargs.get("num_classes", -1)
    if classes == -1:
        classes = int(x.max()) + 1
    return Rows(func(x.local, classes), x.offsets, x.dim_)


# ---- products -----------------------------------------------------------------------------------------------------


@rule("matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__")
def matmul(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Rows times a matrix: rows; a product over the batch: a sum over ranks; rows times rows: one is gathered."""
    a, b = args[:2] if len(args) > 1 else (args[0], *kwargs.values())[:2]  # (other, mat2 or vec)
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if kwargs.get("out") is not None or a.dim() == 0 or b.dim() == 0:
        raise Unsplit
    if isinstance(a, Rows) and isinstance(b, Rows):
        if a.dim_ == a.local.dim() - 1 and b.dim_ == max(b.local.dim() - 2, 0) and a.offsets == b.offsets:
            ctx.note("combine")
            return collectives.Sum.apply(torch.matmul(a.local, b.local))
        if a.local.dim() == b.local.dim() > 2 and a.dim_ == b.dim_ < a.local.dim() - 2 and a.offsets == b.offsets:
            return Rows(torch.matmul(a.local, b.local), a.offsets, a.dim_)
        if b.dim_ == b.local.dim() - 1 and a.dim_ != max(a.local.dim() - 2, 0):
            a = beside_rows(a, "matmul")
        else:
            b = beside_rows(b, "matmul")
    if isinstance(a, Rows):
        n = a.local.dim()
        if a.dim_ == n - 1 or (b.dim() > 2 and b.dim() != n):
            raise Unsplit
        if b.dim() == n > 2 and a.dim_ < n - 2 and b.shape[a.dim_] == a.offsets[-1]:
            b = cut(b, a.offsets, a.dim_)
        elif b.dim() > 2 and a.dim_ < n - 2 and b.shape[a.dim_] != 1:
            raise Unsplit
        return Rows(torch.matmul(a.local, b), a.offsets, a.dim_)
    n = b.local.dim()
    if n == 1 or b.dim_ == n - 2 or a.dim() > n or (a.dim() > 2 and a.dim() != n):
        raise Unsplit
    if b.dim_ == n - 1:
        out = torch.matmul(a, b.local)
        return Rows(out, b.offsets, out.dim() - 1)
    if a.dim() == n and a.shape[b.dim_] == b.offsets[-1]:
        a = cut(a, b.offsets, b.dim_)
    elif a.dim() == n and a.shape[b.dim_] != 1:
        raise Unsplit
    out = torch.matmul(a, b.local)
    return Rows(out, b.offsets, b.dim_)


@rule("addmm", "baddbmm", "addmv")
def addmm(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """bias + rows @ matrix."""
    if len(args) != 3 or kwargs:
        raise Unsplit
    bias, a, b = args
    return matmul(torch.matmul, (a, b), {}) + bias


@rule("einsum")
def einsum(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The batch's letter in the result: rows; summed away: a sum over ranks."""
    equation, *operands = args
    if not isinstance(equation, str) or "." in equation:
        raise Unsplit
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        out = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    lead, term = next((o, t) for o, t in zip(operands, terms, strict=True) if isinstance(o, Rows))
    letter = term[lead.dim_]
    local = []
    for o, t in zip(operands, terms, strict=True):
        if isinstance(o, Rows):
            if t.count(letter) == 1 and t[o.dim_] == letter and o.offsets == lead.offsets:
                local.append(o.local)
                continue
            o = beside_rows(o, "einsum")
        for d, c in enumerate(t):
            o = cut(o, lead.offsets, d) if c == letter and o.shape[d] != 1 else o
        local.append(o)
    result = torch.einsum(equation, *local)
    if letter in out:
        return Rows(result, lead.offsets, out.index(letter))
    ctx.note("combine")
    return collectives.Sum.apply(result)


@rule("outer", "ger")
def outer(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Row by row in the first factor."""
    a, b = (*args, *kwargs.values())
    if not isinstance(a, Rows):
        raise Unsplit
    b = beside_rows(b, "outer") if isinstance(b, Rows) else b
    return Rows(torch.outer(a.local, b), a.offsets, 0)


@rule("cdist", "pairwise_distance")
def distances(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """From own rows to everything."""
    a, b, rest = args[0], args[1], args[2:]
    if not isinstance(a, Rows) or a.dim_:
        raise Unsplit
    if func.__name__ == "pairwise_distance":
        return Rows(func(a.local, _same(b, a), *rest, **kwargs), a.offsets, 0)
    if a.local.dim() != 2:
        raise Unsplit
    b = beside_rows(b, "cdist") if isinstance(b, Rows) else b
    return Rows(func(a.local, b, *rest, **kwargs), a.offsets, 0)


# ---- attention and recurrence -------------------------------------------------------------------------------------


@rule("scaled_dot_product_attention")
def attention(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Each sample's own queries, keys and values."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k, v, mask = (given.get(n) for n in names[:4])
    if given.get("dropout_p", 0.0) > 0:
        raise Unsplit  # its masks are drawn inside the kernel
    if not (isinstance(q, Rows) and isinstance(k, Rows) and isinstance(v, Rows)) or q.dim_ >= q.local.dim() - 2:
        raise Unsplit
    if not q.offsets == k.offsets == v.offsets or not q.dim_ == k.dim_ == v.dim_:
        raise Unsplit
    if isinstance(mask, Rows):
        if mask.offsets != q.offsets or mask.dim_ != q.dim_ or mask.local.dim() != q.local.dim():
            raise Unsplit
        mask = mask.local
    elif mask is not None and mask.dim() == q.local.dim() and mask.shape[q.dim_] == q.offsets[-1] != 1:
        mask = cut(mask, q.offsets, q.dim_)
    given.update(query=q.local, key=k.local, value=v.local, attn_mask=mask)
    return Rows(func(**given), q.offsets, q.dim_)


@rule("multi_head_attention_forward")
def multi_head_attention(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """torch.nn.MultiheadAttention's work: sequence first, batch second."""
    q, k, v = args[:3]
    heads, dropout = args[4], args[10]
    training = kwargs.get("training", args[13] if len(args) > 13 else True)
    if not all(isinstance(x, Rows) and x.dim_ == 1 and x.local.dim() == 3 and x.offsets == q.offsets
               for x in (q, k, v)):
        raise Unsplit
    local = {"key_padding_mask": kwargs.get("key_padding_mask"), "attn_mask": kwargs.get("attn_mask")}
    for name, mask in local.items():
        per = heads if name == "attn_mask" else 1
        if isinstance(mask, Rows):
            if mask.dim_ or mask.offsets != scaled(q.offsets, per):
                raise Unsplit
            local[name] = mask.local
        elif mask is not None and (name == "key_padding_mask" or mask.dim() == 3):
            local[name] = cut(mask, scaled(q.offsets, per), 0)
    if any(isinstance(a, Rows) for a in args[3:]):
        raise Unsplit
    same = k is q and v is q  # nn.functional takes a shorter way when they are one object
    rest = (q.local, q.local, q.local) if same else (q.local, k.local, v.local)
    ctx.split = Split(q.offsets, None, q.local.shape[1] == 0) if dropout > 0 and training else None
    try:
        out, weights = func(*rest, *args[3:], **{**kwargs, **local})
    finally:
        ctx.split = None
    return Rows(out, q.offsets, 1), None if weights is None else Rows(weights, q.offsets, 0)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Samples are independent; the hidden state has them along dimension 1."""
    if len(args) != 9 or not isinstance(args[0], Rows):
        raise Unsplit  # packed sequences
    x, hidden, weights, biases, layers, dropout, training, both_ways, batch_first_ = args
    at = 0 if batch_first_ else 1
    if x.local.dim() != 3 or x.dim_ != at:
        raise Unsplit
    if dropout > 0 and training and layers > 1:
        return _layer_by_layer(func, *args)

    def state(h: torch.Tensor) -> torch.Tensor:
        if isinstance(h, Rows):
            if h.offsets != x.offsets or h.dim_ != 1:
                raise Unsplit
            return h.local
        return cut(h, x.offsets, 1)

    local = tuple(map(state, hidden)) if isinstance(hidden, (tuple, list)) else state(hidden)
    out, *states = func(x.local, local, weights, biases, layers, dropout, training, both_ways, batch_first_)
    return (Rows(out, x.offsets, at), *(Rows(s, x.offsets, 1) for s in states))


def _layer_by_layer(func: Callable[..., Any], x: torch.Tensor, hidden: torch.Tensor | Sequence[torch.Tensor],
                    weights: list[torch.Tensor], biases: bool, layers: int, dropout: float, training: bool,
                    both_ways: bool, first: bool) -> Any:
    """A recurrence with dropout between its layers, as PyTorch does it: on sequence-first tensors."""
    ctx.note("random")
    ways = 2 if both_ways else 1
    per = len(weights) // layers
    states: list[list] = []
    for i in range(layers):
        here = slice(i * ways, (i + 1) * ways)
        state = tuple(h[here] for h in hidden) if isinstance(hidden, (tuple, list)) else hidden[here]
        x, *last = func(x, state, weights[i * per : (i + 1) * per], biases, 1, 0.0, training, both_ways, first)
        states.append(last)
        if i < layers - 1:
            x = x.transpose(0, 1) if first else x
            x = F.dropout(x, dropout, True)
            x = x.transpose(0, 1) if first else x
    return (x, *(torch.cat(parts) for parts in zip(*states, strict=True)))


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """One step of a recurrence, samples along dimension 0."""
    x, hidden, *weights = args
    if not isinstance(x, Rows) or x.dim_ or x.local.dim() != 2:
        raise Unsplit
    local = tuple(_same(h, x) for h in hidden) if isinstance(hidden, (tuple, list)) else _same(hidden, x)
    return wrap(func(x.local, local, *weights), x.offsets, 0)
