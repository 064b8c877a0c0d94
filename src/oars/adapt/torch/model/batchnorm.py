"""Batch normalisation over the global batch: one small message per layer and direction.

Forward, every rank sends its count, means and variances; backward, two sums per channel. The normalising itself is
PyTorch's own kernel with the global statistics. On data that all ranks hold alike (a replicated model) the result is
the plain one, since the statistics of N copies are those of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from oars.adapt.torch.context import ctx
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows import tensor as rows_
from oars.adapt.torch.rows.tensor import Rows
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_plain = F.batch_norm


def _per_channel(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _shaped(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return v.reshape(1, -1, *[1] * (x.dim() - 2))


def _sums(g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor) -> tuple[Any, Any]:
    """Per channel, the sums of g·(x-mean)·invstd and of g, by PyTorch's own fast kernel."""
    _, products, plain = torch.ops.aten.native_batch_norm_backward(
        g, x, torch.ones_like(mean), None, None, mean, invstd, True, 0.0, [False, True, True])
    return products, plain


def _affine(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """scale·x + shift per channel, in one pass: a normalisation with mean 0 and variance 1."""
    small = 2.0**-20  # some versions take no epsilon of 0; 1 - small + small is 1, to the bit
    return _plain(x, torch.zeros_like(scale), torch.full_like(scale, 1 - small), scale, shift, False, 0.0, small)


def _own_statistics(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance per channel of own rows."""
    if not x.is_cuda:
        one = x.new_ones(x.shape[1])
        mean = _sums(x, x, one * 0, one)[1] / count
        var = _sums(x, x, mean, one)[0] / count  # x·(x-mean): right to rounding unless the mean is far from zero
        if bool((mean.square() <= 10 * var).all()):
            return mean, var
    var, mean = torch.var_mean(x, _per_channel(x), unbiased=False)
    return mean, var


def _statistics(x: torch.Tensor, empty: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean, biased variance and number of values per channel over all ranks (float64 message, exact counts)."""
    count = 0 if empty else x.numel() // max(x.shape[1], 1)
    message = torch.zeros(ctx.size, 2 * x.shape[1] + 1, dtype=torch.float64)
    if count:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, var = _own_statistics(wide, count)
        message[ctx.rank] = torch.cat([mean.cpu().double(), var.cpu().double(), torch.tensor([float(count)])])
    collectives.unless_spoilt(ctx.world.allreduce, message.numpy())  # each rank fills its own line
    means, variances, counts = message[:, : x.shape[1]], message[:, x.shape[1] : -1], message[:, -1:]
    every = counts.sum()
    mean = (means * counts).sum(0) / every
    var = ((variances + (means - mean) ** 2) * counts).sum(0) / every
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return mean.to(x.device, dtype), var.to(x.device, dtype), int(every)


class GlobalBatchNorm(torch.autograd.Function):
    """Normalise with the statistics of all ranks' rows."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                mean: torch.Tensor, var: torch.Tensor, count: int, eps: float, empty: bool) -> torch.Tensor:
        context.save_for_backward(x, weight, bias, mean, var)
        context.count, context.eps, context.empty = count, eps, empty
        return _plain(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, bias, mean, var = context.saved_tensors
        if torch.is_grad_enabled():  # a backward that will itself be differentiated: plain differentiable steps
            with torch.enable_grad():
                out = _composed(x, weight, bias, context.count, context.eps, context.empty)
                wanted = [t for t in (x, weight, bias) if t is not None]
                grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return (*[None if t is None else next(grads) for t in (x, weight, bias)], *[None] * 5)
        invstd = (var + context.eps).rsqrt()
        wide, wide_x = grad.to(mean.dtype), x.to(mean.dtype)
        if context.empty:
            wide = wide * 0
        of_weight, of_bias = _sums(wide, wide_x, mean, invstd)
        sums = collectives.allreduce(torch.stack([of_bias, of_weight])) / context.count
        scale = invstd if weight is None else invstd * weight
        if context.empty:  # a stand-in row has no part in the statistics
            scale = scale * 0
        # scale · (g - mean of g - x's part of it), gathered into factors of g, of x and of 1
        slope = sums[1] * invstd
        of_x = _affine(wide_x, -scale * slope, scale * (slope * mean - sums[0])).addcmul_(wide, _shaped(scale, x))
        return (of_x.to(x.dtype), None if weight is None else of_weight.to(weight.dtype),
                None if bias is None else of_bias.to(bias.dtype), *[None] * 5)


def _composed(x: torch.Tensor, weight: torch.Tensor | None, bias: Any, count: int, eps: float,
              empty: bool) -> torch.Tensor:
    """The same from differentiable pieces."""
    dims = _per_channel(x)
    kept = x * 0 if empty else x
    mean = collectives.Sum.apply(kept.sum(dims)) / count
    centred = x - _shaped(mean, x)
    var = collectives.Sum.apply((centred * 0 if empty else centred).square().sum(dims)) / count
    out = centred * _shaped((var + eps).rsqrt(), x)
    if weight is not None:
        out = out * _shaped(weight, x) + _shaped(bias, x)
    return out


def global_batch_norm(x: torch.Tensor, running_mean: torch.Tensor | None, running_var: Any,
                      weight: torch.Tensor | None, bias: torch.Tensor | None, momentum: float,
                      eps: float) -> torch.Tensor:
    """Training-mode batch normalisation of this rank's rows of a global batch."""
    # How own rows' statistics are computed depends on them: that is no way of the model's (see paths.py).
    with torch.no_grad(), torch._C.DisableTorchFunction():
        empty = ctx.split is not None and ctx.split.empty or x.shape[0] == 0
        mean, var, count = _statistics(x.detach(), empty)
        if count <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got {count} over all ranks")
        if running_mean is not None:  # by `data`, as PyTorch does it: what another call keeps of them stays valid
            running_mean.data.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.data.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    return GlobalBatchNorm.apply(x, weight, bias, mean, var, count, eps, empty)


def local_batch_norm(x: torch.Tensor, running_mean: torch.Tensor | None, running_var: Any, weight: torch.Tensor | None,
                     bias: torch.Tensor | None, momentum: float, eps: float) -> torch.Tensor:
    """``--local-batchnorm``: own rows' statistics; running ones averaged over ranks."""
    if running_mean is None:
        return _plain(x, None, None, weight, bias, True, momentum, eps)
    means, variances = running_mean.clone(), running_var.clone()  # backward wants these as forward left them
    out = _plain(x, means, variances, weight, bias, True, momentum, eps)
    with torch.no_grad():
        both = collectives.mean(torch.stack([means, variances]))
        running_mean.data.copy_(both[0])
        running_var.data.copy_(both[1])
    return out


def batch_norm(input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
               weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False,
               momentum: float = 0.1, eps: float = 1e-5) -> torch.Tensor:
    """nn.functional.batch_norm, over the global batch where the input is rows of one."""
    if isinstance(input, Rows):
        rows_.see(input)
        rows_.take_over_changes((input,))
    if isinstance(input, Rows) and not ctx.busy:
        return ctx.perform(_again, batch_norm, (input, running_mean, running_var, weight, bias, training, momentum,
                                                  eps), {})
    if isinstance(input, Rows) and input.dim_ == 0 and input.local.dim() >= 2:
        local = batch_norm(input.local, running_mean, running_var, weight, bias, training, momentum, eps) \
            if not training else _train(input.local, running_mean, running_var, weight, bias, momentum, eps)
        return Rows(local, input.offsets, 0)
    if training and ctx.plain and ctx.in_step and not ctx.sharing.inside:
        return _train(input, running_mean, running_var, weight, bias, momentum, eps)
    return _plain(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _again(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Batch normalisation as a step of its own; one that is done again must not move the running statistics twice."""
    running = [b.data for b in args[1:3] if b is not None]
    before = [b.clone() for b in running]
    try:
        out = func(*args)
    except RankLost:
        torch._foreach_copy_(running, before)
        raise
    if ctx.again:
        torch._foreach_copy_(running, before)
    return out


def _train(*args: Any) -> torch.Tensor:
    local = ctx.plan.local_batchnorm or ctx.plan.batch == "keep"
    return (local_batch_norm if local else global_batch_norm)(*args)


def keep_compiler_out(compiler: ModuleType) -> None:
    """Ranks cannot talk inside of what is compiled. (The decorator would import the compiler.)"""
    global global_batch_norm, local_batch_norm
    global_batch_norm, local_batch_norm = map(compiler.disable, (global_batch_norm, local_batch_norm))
