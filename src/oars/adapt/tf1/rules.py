"""What an operation of a TensorFlow 1 graph does with a rank's own rows (``cut``).

Every tensor of the graph stands for what one process would have. A rank holds all of it ("whole"), or its own rows
along the first dimension ("rows"; where steps of time, say, were put together with them, each row has several lines). A
rule says how an operation's result follows from such inputs: row by row; as a sum over rows, which is completed by a
message; or not at all: then its inputs are gathered first, and nothing can go wrong. Gradients need no rules of their
own, for TensorFlow 1 writes them into the graph as operations like all others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import tensorflow as tf

    from oars.adapt.tf1.cut import Cut

ELEMENTWISE = set(
    "Abs Acos Add AddN AddV2 Asin Atan Atan2 Cast Ceil CheckNumerics ClipByValue Conj Cos Cosh Digamma Div "
    "DivNoNan Elu EluGrad Equal Erf Erfc Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv "
    "InvGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot "
    "LogicalOr Maximum Minimum Mod Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal "
    "ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid "
    "SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference "
    "StopGradient Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlogy ZerosLike".split())
# For each input: r its rows, w all of it, n a shape, of which this rank needs that of its rows. The result is rows.
BY_ROW = {
    "BiasAdd": "rw", "Conv2D": "rw", "Conv3D": "rw", "DepthwiseConv2dNative": "rw", "MaxPool": "r", "AvgPool": "r",
    "MaxPoolGrad": "rrr", "AvgPoolGrad": "nr", "LRN": "r", "LRNGrad": "rrr", "Conv2DBackpropInput": "nwr",
    "DepthwiseConv2dNativeBackpropInput": "nwr", "SoftmaxCrossEntropyWithLogits": "rr", "ResizeBilinear": "rw",
    "SparseSoftmaxCrossEntropyWithLogits": "rr", "InTopK": "rr", "InTopKV2": "rrw", "ResizeNearestNeighbor": "rw",
}  # fmt: skip
OF_MATRICES = {"Softmax": "r", "LogSoftmax": "r", "TopKV2": "rw"}  # by row if there is more than one dimension
SUMS = {"BiasAddGrad": "r", "Conv2DBackpropFilter": "rwr", "DepthwiseConv2dNativeBackpropFilter": "rwr", "L2Loss": "r"}
REDUCING = {"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin"}


def apply(cut: Cut, op: tf.Operation, ins: list[Any]) -> list[Any]:
    """The values of ``op``'s results, ``ins`` being those of its inputs, at least one of them rows."""
    kind = op.type
    if kind == "Switch":  # of the condition's shape nothing need be known
        return cut.made(op, ins, rows=True)
    if any(v.tensor.shape.rank is None for v in ins) or (len({v.rows for v in ins} - {0}) > 1 and kind != "ShapeN"):
        return cut.gathered(op, ins)
    rule = _RULES.get(kind)
    if rule is not None:
        made = rule(cut, op, ins)
        return cut.gathered(op, ins) if made is None else made
    if kind in ELEMENTWISE:
        made = _elementwise(cut, op, ins)
    elif kind in BY_ROW:
        made = _by_row(cut, op, ins, BY_ROW[kind])
    elif kind in OF_MATRICES and ins[0].tensor.shape.rank > 1:
        made = _by_row(cut, op, ins, OF_MATRICES[kind])
    elif kind in SUMS:
        made = _by_row(cut, op, ins, SUMS[kind], summed=True)
    else:
        made = None
    return cut.gathered(op, ins) if made is None else made


def _by_row(cut: Cut, op: tf.Operation, ins: list[Any], roles: str, summed: bool = False) -> Any:
    if len(roles) != len(ins) or not any(v.rows for v, role in zip(ins, roles, strict=True) if role == "r"):
        return None
    if any(v.rows for v, role in zip(ins, roles, strict=True) if role == "n"):
        return None
    like = lines(ins)
    takes = {"r": lambda v: cut.own(v, like), "w": cut.whole, "n": lambda v: cut.own_shape(v, like)}
    given = [takes[role](v) for v, role in zip(ins, roles, strict=True)]
    return cut.summed(op, given) if summed else cut.made(op, given, rows=True)


def lines(ins: list[Any]) -> int:
    """How many lines those of these that are rows have for each row of the batch."""
    return max(v.rows for v in ins)


def _owned(cut: Cut, ins: list[Any]) -> list[Any]:
    return [cut.own(v, lines(ins)) for v in ins]


def _elementwise(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    ranks = [v.tensor.shape.rank for v in ins]
    if any(v.rows and rank < max(ranks) for v, rank in zip(ins, ranks, strict=True)):
        return None  # its rows lie along another dimension of the result
    given = [cut.own(v, lines(ins)) if rank == max(ranks) else v for v, rank in zip(ins, ranks, strict=True)]
    return cut.made(op, given, rows=True)


def _select(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    """TensorFlow 1's: a condition of one dimension chooses rows."""
    return cut.made(op, _owned(cut, ins), rows=True)


def _reduced(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    x, axes = ins[0], axes_of(cut, op.inputs[1], ins[0].tensor.shape.rank)
    if axes is None or not x.rows or ins[1].rows:
        return None
    if op.type.startswith("Arg"):
        return None if 0 in axes else cut.made(op, ins, rows=True)
    keep = op.get_attr("keep_dims")
    if 0 not in axes:
        return [cut.reduced(op.type, x, axes, keep, rows=True)]
    if op.type not in ("Sum", "Mean") or not x.tensor.dtype.is_floating:
        return None
    total = cut.total(cut.reduced("Sum", x, axes, keep, rows=False))
    return [total if op.type == "Sum" else cut.divided(total, x, axes)]


def axes_of(cut: Cut, tensor: tf.Tensor, rank: int) -> tuple[int, ...] | None:
    """Which dimensions a reduction is over, where that can be known before the graph runs."""
    import tensorflow as tf

    if tensor.op.type == "BroadcastGradientArgs":
        own, other = (_dims(cut, t) for t in (tensor.op.inputs if tensor.value_index == 0 else tensor.op.inputs[::-1]))
        return None if own is None or other is None else _broadcast(own, other)
    value = tf.get_static_value(tensor)
    return None if value is None else tuple(int(a) % max(rank, 1) for a in np.ravel(value))


ALL = -1  # the length of the first dimension of rows: that of the batch, more than one


def _dims(cut: Cut, shape: tf.Tensor) -> list[int | None] | None:
    """The dimensions in a shape (a tensor of the script's graph); None where one is not known."""
    import tensorflow as tf

    if shape.op.type in ("Shape", "ShapeN"):
        of = shape.op.inputs[shape.value_index]
        value = cut.value(of)
        known = value.tensor.shape if of.shape.rank is None else of.shape  # of what is fed more is known there
        if known.rank is None:
            return None
        dims = known.as_list()
        return [ALL, *dims[1:]] if value.rows else dims
    if shape.op.type == "ConcatV2":
        parts = [_dims(cut, t) for t in shape.op.inputs[:-1]]
        return None if any(part is None for part in parts) else [d for part in parts if part for d in part]
    if shape.op.type == "Slice":
        dims, begin, size = _dims(cut, shape.op.inputs[0]), _numbers(shape.op.inputs[1]), _numbers(shape.op.inputs[2])
        return None if dims is None or not begin or not size else dims[begin[0] :][: size[0] if size[0] >= 0 else None]
    if shape.op.type == "Pack":
        parts = [_dims(cut, t) for t in shape.op.inputs]
        return None if any(part is None for part in parts) else [d for part in parts if part for d in part]
    if shape.op.type == "GatherV2":
        dims, at = _dims(cut, shape.op.inputs[0]), _numbers(shape.op.inputs[1])
        return None if dims is None or at is None else [dims[i] for i in at]
    if shape.op.type == "Prod":
        dims = _dims(cut, shape.op.inputs[0])
        return None if dims is None or None in dims else [ALL if ALL in dims else math.prod(d or 0 for d in dims)]
    value = tf.get_static_value(shape)
    return None if value is None else [int(d) for d in np.ravel(value)]


def _numbers(tensor: tf.Tensor) -> list[int] | None:
    """What is computed from ranks (``tf.rank(x) - 1``), which are known before the graph runs."""
    value, op = _static(tensor), tensor.op
    if value is not None:
        return [int(n) for n in np.ravel(value)]
    parts = [_numbers(t) for t in op.inputs] if op.type in ("Pack", "Sub", "FloorMod") else [None]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if op.type == "Pack":
        return [n for part in known for n in part]
    return [a - b if op.type == "Sub" else a % b for a, b in zip(*known, strict=True)]


def _broadcast(own: list, other: list) -> tuple[int, ...] | None:
    """Along which dimensions a tensor of dimensions ``own`` was repeated to go with ``other``."""
    rank, axes = max(len(own), len(other)), []
    own, other = [0] * (rank - len(own)) + own, [1] * (rank - len(other)) + other
    for axis, (mine, its) in enumerate(zip(own, other, strict=True)):
        if mine == 0 or (mine == 1 and its is not None and its != 1):
            axes.append(axis)
        elif (mine is None and its != 1) or (mine == 1 and its is None):
            return None
    return tuple(axes)


def _matmul(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    a, b = ins
    if op.get_attr("transpose_a"):  # both are summed over
        return None if op.get_attr("transpose_b") else cut.summed(op, _owned(cut, ins))
    return cut.made(op, ins, rows=True) if a.rows and not b.rows else None


def _batch_matmul(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    a, b = ins
    if a.tensor.shape.rank < 3:
        return None
    if b.tensor.shape.rank == a.tensor.shape.rank:
        return cut.made(op, _owned(cut, ins), rows=True)
    return cut.made(op, ins, rows=True) if a.rows and not b.rows else None


def _reshape(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    x, shape = ins[0], op.outputs[0].shape
    known = bool(shape.rank) and shape[1:].is_fully_defined()
    dims = shape.as_list() if known else _dims(cut, op.inputs[1])
    before = x.tensor.shape[1:]
    if not x.rows or not dims or not before.is_fully_defined() or not before.num_elements():
        return None
    rest = [d for d in dims[1:] if d is not None and d >= 0]
    if len(rest) < len(dims) - 1 or not math.prod(rest):
        return None
    like, left = divmod(x.rows * before.num_elements(), math.prod(rest))
    return None if left or not like else [cut.reshaped(x, [-1, *rest], like)]


def _shape(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    return [cut.shape(v, op.get_attr("out_type")) for v in ins]


def _size(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    return [cut.size(ins[0], op.get_attr("out_type"))]


def _rank(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    return cut.made(op, ins, rows=False)


def _joined(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    axis = _static(op.inputs[-1])
    if axis is None or int(axis) % ins[0].tensor.shape.rank == 0:
        return None
    return cut.made(op, [*_owned(cut, ins[:-1]), ins[-1]], rows=True)


def _packed(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    rank = ins[0].tensor.shape.rank + (op.type == "Pack")
    return None if op.get_attr("axis") % rank == 0 else cut.made(op, _owned(cut, ins), rows=True)


def _divided(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    """Split and SplitV: where along is the first or the last input."""
    at, x = (0, 1) if op.type == "Split" else (2, 0)
    axis = _static(op.inputs[at])
    if axis is None or int(axis) % ins[x].tensor.shape.rank == 0 or any(v.rows for v in ins if v is not ins[x]):
        return None
    return cut.made(op, ins, rows=True)


def _with_constant(fits: Callable[[np.ndarray, int], Any]) -> Any:
    """An operation on rows whose second input is known, and ``fits``."""
    def rule(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
        value = _static(op.inputs[1])
        good = value is not None and ins[0].rows and fits(np.asarray(value), ins[0].tensor.shape.rank)
        return cut.made(op, ins, rows=True) if good else None

    return rule


def _squeeze(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    dims = op.get_attr("squeeze_dims")
    rank = ins[0].tensor.shape.rank
    return cut.made(op, ins, rows=True) if dims and all(d % rank for d in dims) else None


def _sliced(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    """``x[:, 3]``, and its gradient: all of the first dimension is taken."""
    begin = len(op.inputs) - 4 + (op.type == "StridedSlice")
    stride = _static(op.inputs[begin + 2])
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    first = stride is not None and len(stride) > 0 and int(stride[0]) == 1
    taken = masks["begin"] & 1 and masks["end"] & 1 and not masks["shrink_axis"] & 1
    if not first or not taken or masks["ellipsis"] or masks["new_axis"]:
        return None
    if op.type == "StridedSlice":
        return _by_row(cut, op, ins, "rwww")
    return _by_row(cut, op, ins, "nwwwr")


def _slice(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    begin, size = _static(op.inputs[1]), _static(op.inputs[2])
    if begin is not None and size is not None and begin[0] == 0 and size[0] == -1:
        return _by_row(cut, op, ins, "rww")
    offset = op.inputs[1].op
    if offset.type != "ConcatOffset":
        return None
    axis, dims = _numbers(offset.inputs[0]), _dims(cut, op.inputs[2])  # the gradient of a concatenation
    if axis is None or axis[0] % ins[0].tensor.shape.rank == 0 or not dims or dims[0] != ALL:
        return None
    return _by_row(cut, op, ins, "rwn")


def _merged(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    """Out of a branch of a condition; rows, if one of them gives rows."""
    if any(not v.rows and (not v.tensor.shape.rank or v.tensor.shape.as_list()[0] == 1) for v in ins):
        return None
    out, which = cut.made(op, [cut.own(v, lines(ins), surely=True) for v in ins], rows=True)
    return [out, which._replace(rows=0)]


def _looked_up(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    axis = _static(op.inputs[2]) if len(ins) > 2 else 0
    if axis is None or int(axis) != 0 or (op.type == "GatherV2" and op.get_attr("batch_dims")):
        return None
    return _by_row(cut, op, ins, "wrw"[: len(ins)])


def _one_hot(cut: Cut, op: tf.Operation, ins: list[Any]) -> Any:
    return None if op.get_attr("axis") == 0 else _by_row(cut, op, ins, "rwww")


def _static(tensor: object) -> Any:
    import tensorflow as tf

    return tf.get_static_value(tensor)


_RULES: dict[str, Any] = {
    **{kind: _reduced for kind in REDUCING}, "MatMul": _matmul, "BatchMatMul": _batch_matmul, "Reshape": _reshape,
    "BatchMatMulV2": _batch_matmul, "Shape": _shape, "ShapeN": _shape, "Rank": _rank, "Size": _size,
    "ConcatV2": _joined, "Pack": _packed, "Unpack": _packed, "Split": _divided, "SplitV": _divided,
    "Squeeze": _squeeze, "Slice": _slice, "StridedSlice": _sliced, "StridedSliceGrad": _sliced,
    "GatherV2": _looked_up, "Gather": _looked_up, "OneHot": _one_hot, "Select": _select, "Merge": _merged,
    "Transpose": _with_constant(lambda perm, rank: perm[0] == 0),
    "Pad": _with_constant(lambda pads, rank: not pads[0].any()),
    "ExpandDims": _with_constant(lambda dim, rank: int(dim) % (rank + 1) != 0),
    "Tile": _with_constant(lambda times, rank: times[0] == 1),
    "Cumsum": _with_constant(lambda axis, rank: int(axis) % rank != 0),
}  # fmt: skip
