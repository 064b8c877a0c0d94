"""Steps: what goes into the run's record after every optimizer step, and where ``oars verify`` stops a script.

The phases of the loop, as the record's clock sees them: ``data`` is the loader at work, ``forward`` from there to
``backward()``, ``backward``, ``update`` the optimizer at work, ``other`` the rest (evaluation, clipping, printing).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from oars import runfolder
from oars.adapt.python.clock import perf_counter
from oars.adapt.torch.context import ctx, offsets_of, own
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.rows.tensor import Rows

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer
    from torch.utils.data.dataloader import _BaseDataLoaderIter

_params: Any = WeakTensorKeyDictionary()  # all that optimizers step, in the order they came
_kept: list[torch.Tensor] = []  # the same, where they are looked at when the script is over
_keeps = False  # whether they are
_loss: Any = None
_optimizers: list[weakref.ref] = []  # that have stepped, in this order
_handed: dict[int, int] = {}  # samples that there had been when each of them stepped last
_norm_at = 0.0  # when the gradients' norm may be taken next, by this thread's processor time
_norm_from = 0.0  # and by the clock on the wall, which is cheaper to ask: not before this
_NORM_SHARE = 0.0003  # of which so much may go into it: what follows a norm costs up to 20 times itself (measured)
_grad_slot: Any = torch._C.TensorBase.grad  # past who watches for reads of gradients: only the voice reads here


def begin() -> None:
    """Before the script runs: what the record asks for, and what is left behind at its end."""
    global _keeps
    _keeps = bool(os.environ.get("OARS_DIGEST") or ctx.plan.stop_after)
    ctx.record.weights = lambda: sum(p.numel() * max(4, p.element_size()) for p in _params.keys() if p.requires_grad)
    if os.environ.get("OARS_DIGEST"):
        atexit.register(digest)
    if torch.cuda.is_available():
        ctx.record.times.device_memory = torch.cuda.max_memory_allocated


# ---- layers ---------------------------------------------------------------------------------------------------------


def before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """A hook before every optimizer's step."""
    if not ctx.in_step:
        return
    ctx.record.times.mark("other")
    if ctx.world is not None and lineage.waiting:
        if ctx.gradients.pending:
            ctx.gradients.exchange_gradients()  # while what they come from can be computed again
        lineage.before_step(ctx.number(optimizer))


def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """A hook behind every optimizer's step."""
    if not ctx.in_step:
        return
    ctx.record.times.mark("update")
    loss = _loss
    if ctx.world is not None:
        ctx.gradients.stepped()
        loss = ctx.gradients.last_loss
        lineage.stepped(ctx.number(optimizer))
    which = _which(optimizer)
    before, _handed[which] = _handed.get(which, 0), ctx.record.samples + ctx.samples
    ctx.record.step(loss, ctx.samples, _rates(optimizer), _norm(optimizer), which, _handed[which] - before)
    ctx.samples = 0
    if ctx.record.steps == ctx.plan.stop_after:
        _leave_weights()
        raise SystemExit(0)
    if ctx.world is not None:
        ctx.sharing.stepped()


def add_param_group(inner: Callable[..., Any]) -> Any:
    """Around ``Optimizer.add_param_group``: whose weights are stepped."""
    def add(self: Optimizer, group: dict) -> None:
        inner(self, group)
        if "lr" in self.param_groups[-1]:
            self.param_groups[-1]["lr"] = _scaled_lr(self.param_groups[-1]["lr"])
        for p in self.param_groups[-1]["params"]:
            if isinstance(p, Rows):  # a latent, found for each batch anew: own rows, whose gradients are not exchanged
                continue
            if p not in _params:
                _params[p] = True
                if _keeps:
                    _kept.append(p)
            ctx.optimizer_of[p] = ctx.number(self)
            if ctx.world is not None:
                ctx.gradients.track(p)

    return add


def _timed(inner: Callable[..., Any], before: str, phase: str) -> Any:
    times = ctx.record.times

    @functools.wraps(inner)
    def call(*args: object, **kwargs: object) -> Any:
        if times.inside:
            return inner(*args, **kwargs)
        times.mark(before)
        times.inside = True
        try:
            return inner(*args, **kwargs)
        finally:
            times.inside = False
            times.mark(phase)

    return call


def timed_next(inner: Callable[..., Any]) -> Any:
    """Around a loader's ``__next__``: its time goes to the clock."""
    return _timed(inner, "other", "data")


def timed_backward(inner: Callable[..., Any]) -> Any:
    """Around ``backward``: its time goes to the clock."""
    return _timed(inner, "forward", "backward")


def step_unless_lost(inner: Callable[..., Any]) -> Any:
    """Around a step with its hooks: one whose gradients were lost with a rank, and could not be computed again, is left
    out."""
    @functools.wraps(inner)
    def call(*args: object, **kwargs: object) -> Any:
        if ctx.gradients.passing_over:
            ctx.gradients.passing_over = False
            return None
        return inner(*args, **kwargs)

    return call


def noting_backward(inner: Callable[..., Any]) -> Any:
    """Around ``backward`` on one rank: nothing is changed, the loss is noted."""
    def backward(tensors: torch.Tensor | Sequence[torch.Tensor], *args: object, **kwargs: object) -> None:
        global _loss
        inner(tensors, *args, **kwargs)
        if isinstance(tensors, torch.Tensor) and tensors.dim() == 0:
            _loss = tensors.detach()

    return backward


def noting_next(inner: Callable[..., Any]) -> Any:
    """Around a loader's ``__next__`` on one rank: the size of each batch is noted."""
    def next_(self: _BaseDataLoaderIter) -> Any:
        data = inner(self)
        first = data
        while isinstance(first, (list, tuple, dict, UserDict)) and first:
            first = next(iter(first.values())) if isinstance(first, (dict, UserDict)) else first[0]
        ctx.samples += len(first) if isinstance(first, torch.Tensor) and first.dim() else 1
        return data

    return next_


def _which(optimizer: Optimizer) -> int:
    """The place of an optimizer among those that step (a GAN has two); one made anew for each epoch has the place of
    the one before."""
    for place, known in enumerate(_optimizers):
        if known() is optimizer:
            return place
    free = next((place for place, known in enumerate(_optimizers) if known() is None), len(_optimizers))
    _optimizers[free:free + 1] = [weakref.ref(optimizer)]
    return free


# ---- what goes into the record --------------------------------------------------------------------------------------


def _rates(optimizer: Optimizer) -> Any:
    """The learning rate, or those of all groups where they differ; one on a device is left there."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if not all(isinstance(rate, (int, float)) for rate in rates):
        return None
    return rates[0] if rates.count(rates[0]) == len(rates) else rates


def _norm(optimizer: Optimizer) -> Any:
    """The norm of all gradients of this step, so seldom that it costs next to nothing (a few times a second)."""
    global _norm_at, _norm_from
    if perf_counter() < _norm_from or not ctx.record.voice or ctx.record.played:
        return None
    began = thread_time()  # on a busy machine the wall's would allow more than our share
    if began < _norm_at:
        _norm_from = perf_counter() + _norm_at - began
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [_grad_slot.__get__(p) for p in params if not isinstance(p, Rows)]
    grads = [g for g in grads if g is not None and g.layout is torch.strided and g.numel()]
    if not grads:
        return None
    with torch.no_grad():
        norms = torch._foreach_norm(grads)
        norm = torch.stack([n.to(norms[0].device, torch.float32) for n in norms]).norm()
    value = norm.item() if norm.device.type == "cpu" else norm
    now = thread_time()
    wait = (now - began) / _NORM_SHARE
    _norm_at, _norm_from = now + wait, perf_counter() + wait
    return value


def _scaled_lr(lr: float | torch.Tensor) -> Any:
    """``--scale-lr``, for the larger global batch of ``--batch keep``."""
    how = ctx.plan.scale_lr
    if how is None or ctx.size == 1:
        return lr
    return lr * (ctx.size if how == "linear" else ctx.size**0.5)


def last_loss() -> Any:
    """On one rank: what the last backward began from."""
    return _loss


def write_ledger() -> None:
    """``OARS_LEDGER=1``: the numbers of the samples this rank contributes to the exchange, one line a batch.

    Written before it: of an exchange that failed there are lines of a later era, when it was done again.
    """
    lines = []
    for iteration, batch, indices in ctx.handed:
        first, rows = own(offsets_of(len(indices)))
        lines.append((iteration, batch, len(indices), ctx.era, indices[first : first + rows]))
    ctx.record.write_ledger(_name(), lines)


def _name() -> int:
    """This rank's number at the start."""
    return ctx.world.origin if ctx.world is not None else 0


def _leave_weights() -> None:
    """For ``oars verify``: the weights as they stand, and a digest to compare ranks by."""
    import numpy as np

    arrays = [p.detach().float().cpu().numpy() for p in _kept]
    if ctx.record.voice:
        np.savez(ctx.record.folder / runfolder.WEIGHTS, *arrays)
    digest(arrays)


def digest(arrays: Any = None) -> None:
    """Write this rank's digest of all weights that optimizers have seen."""
    ctx.separate = False  # also if the run has failed: weights are read as they are
    arrays = arrays if arrays is not None else [p.detach().float().cpu().numpy() for p in _kept]
    whole = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    path = ctx.record.folder / runfolder.weights_digest(_name())
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, whole.encode())
    os.close(fd)
