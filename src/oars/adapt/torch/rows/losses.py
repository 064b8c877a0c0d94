"""What torch.nn.functional's losses do on rows: each sample's loss on own rows, then a sum over ranks.

A mean divides by what it would on one process: the number of elements, or for class targets the summed weights of
those that count (``ignore_index``, ``weight``).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn._reduction import legacy_get_string

from oars.adapt.torch.context import ctx
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows.ops import localizer
from oars.adapt.torch.rows.tensor import FUNCTIONAL, Rows, Unsplit, cut

if TYPE_CHECKING:
    from collections.abc import Callable

ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
               "gaussian_nll_loss", "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss",
               "hinge_embedding_loss", "margin_ranking_loss")
BY_ROW = ("cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
          "multilabel_soft_margin_loss")
CLASSES = ("cross_entropy", "nll_loss")
_PLAIN = {"weight", "pos_weight"}  # per class, never cut (bce's per-element weight is aligned by broadcasting)
_SIGNATURES = {n: inspect.signature(getattr(F, n)) for n in (*ELEMENTWISE, *BY_ROW, *CLASSES)}


def _given(func: Callable[..., Any], args: tuple, kwargs: dict) -> dict:
    given = dict(_SIGNATURES[func.__name__].bind(*args, **kwargs).arguments)
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    if average is not None or reduce is not None:  # the names that PyTorch had before 1.0
        given["reduction"] = legacy_get_string(average, reduce, emit_warning=True)
    return given


def elementwise(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Losses of elements, arguments broadcast against each other."""
    given = _given(func, args, kwargs)
    reduction = given.pop("reduction", "mean")
    tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
    localize, offsets, right = localizer(tuple(tensors.values()), {}, func.__name__)
    local = {k: localize(v) for k, v in tensors.items()}
    each = func(**{**given, **local}, reduction="none")
    return reduced(Rows(each, offsets, each.dim() + right), reduction)


def reduced(each: Rows, reduction: str) -> Any:
    """Per-element losses as the script wants them."""
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    if reduction == "batchmean":
        return each.sum() / (each.local.shape[0] if each.dim_ else each.offsets[-1])
    return each.mean()


def by_row(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Losses of samples along dimension 0."""
    given = _given(func, args, kwargs)
    reduction = given.pop("reduction", "mean")
    lead = next(v for v in given.values() if isinstance(v, Rows))
    local = {k: _beside(v, lead) if k not in _PLAIN else v for k, v in given.items()}
    return reduced(Rows(func(**local, reduction="none"), lead.offsets, 0), reduction)


def _beside(a: Any, lead: Rows) -> Any:
    if isinstance(a, Rows):
        if a.offsets != lead.offsets or a.dim_:
            raise Unsplit
        return a.local
    if isinstance(a, torch.Tensor) and a.dim() and a.shape[0] == lead.offsets[-1]:
        return cut(a, lead.offsets, 0)
    if isinstance(a, torch.Tensor) and a.dim():
        raise Unsplit
    return a


def classes(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """cross_entropy and nll_loss: class targets with weights and ignored entries, or class probabilities."""
    given = _given(func, args, kwargs)
    reduction = given.pop("reduction", "mean")
    lead = given["input"] if isinstance(given["input"], Rows) else given["target"]
    if isinstance(given.get("weight"), Rows) or lead.dim_ or given["input"].dim() < 2:
        raise Unsplit
    local = {k: _beside(v, lead) if k in ("input", "target") else v for k, v in given.items()}
    if reduction == "none":
        return Rows(func(**local, reduction="none"), lead.offsets, 0)
    ctx.note("combine")
    total = func(**local, reduction="sum")
    if reduction == "sum":
        return collectives.Sum.apply(total)
    scores, target, weight = local["input"], local["target"], local.get("weight")
    if target.is_floating_point():
        count = lead.offsets[-1]
        for s in scores.shape[2:]:
            count *= s
        return collectives.Sum.apply(total) / count
    counts = target != local.get("ignore_index", -100)
    if weight is not None:
        share = weight[target.where(counts, 0)].mul(counts).sum()
    else:
        share = counts.sum()
    wide = torch.float32 if total.dtype in (torch.float16, torch.bfloat16) else total.dtype
    both = collectives.Sum.apply(torch.stack([total.to(wide), share.to(wide)]))
    return (both[0] / both[1].detach()).to(total.dtype)


FUNCTIONAL.update(dict.fromkeys(ELEMENTWISE, elementwise))
FUNCTIONAL.update(dict.fromkeys(BY_ROW, by_row))
FUNCTIONAL.update(dict.fromkeys(CLASSES, classes))
