"""Steps: what the run's record is told after every optimizer step, and where ``oars verify`` stops a script.

The phases of the loop, as the record's clock sees them: ``data`` is the loader at work, ``forward`` from there to
``backward()``, ``backward``, ``update`` the optimizer at work, ``other`` the rest (evaluation, clipping, printing).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
from time import thread_time
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from oars.adapt.clock import perf_counter
from oars.adapt.torch.context import ctx, offsets_of, own

_params: Any = WeakTensorKeyDictionary()  # all that optimizers step, in the order they came
_kept: list[torch.Tensor] = []  # the same, where they are looked at when the script is over
_of_a_batch: tuple[type, ...] = ()  # latents, found for each batch anew: own rows, whose gradients are not exchanged
_loss: Any = None
_norm_at = 0.0  # when the gradients' norm may be taken next, by this thread's processor time
_norm_from = 0.0  # and by the clock on the wall, which is cheaper to ask: not before this
_NORM_SHARE = 0.0003  # of which so much may go into it: what follows a norm costs up to 20 times itself (measured)
_grad_slot: Any = torch._C.TensorBase.grad  # past who watches for reads of gradients: only the voice reads here


def install(torch_: Any, gradients: Any) -> None:
    """Hook into every optimizer; on one rank also into backward and loaders, only to count."""
    global _of_a_batch
    from torch.optim.optimizer import (
        Optimizer,
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    times = ctx.record.times
    keeps = bool(os.environ.get("OARS_DIGEST") or ctx.plan.get("stop_after"))
    ctx.record.weights = lambda: sum(p.numel() * max(4, p.element_size()) for p in _params.keys() if p.requires_grad)

    def steps(optimizer: Any, args: Any, kwargs: Any) -> None:
        times.mark("other")
        if gradients is not None and lineage.waiting:
            if gradients.pending:
                gradients.settle()  # while what they come from can be computed again
            lineage.before_step(ctx.number(optimizer))

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        times.mark("update")
        loss = _loss
        if gradients is not None:
            gradients.stepped()
            loss = gradients.last_loss
            lineage.stepped(ctx.number(optimizer))
        ctx.record.step(loss, ctx.samples, _rates(optimizer), _norm(optimizer))
        ctx.samples = 0
        if ctx.record.steps == ctx.plan.get("stop_after"):
            _leave_weights()
            raise SystemExit(0)

    register_optimizer_step_pre_hook(steps)
    register_optimizer_step_post_hook(stepped)
    add = Optimizer.add_param_group
    if gradients is not None:
        from oars.adapt.torch import lineage
        from oars.adapt.torch.rows import Rows

        _of_a_batch = (Rows,)

    def add_param_group(self: Any, group: dict) -> None:
        add(self, group)
        if "lr" in self.param_groups[-1]:
            self.param_groups[-1]["lr"] = _scaled_lr(self.param_groups[-1]["lr"])
        for p in self.param_groups[-1]["params"]:
            if isinstance(p, _of_a_batch):
                continue
            if p not in _params:
                _params[p] = True
                if keeps:
                    _kept.append(p)
            ctx.optimizer_of[p] = ctx.number(self)
            if gradients is not None:
                gradients.track(p)

    Optimizer.add_param_group = add_param_group  # type: ignore[assignment,method-assign]
    if gradients is not None:
        _leave_out_steps(Optimizer, gradients)
    if os.environ.get("OARS_DIGEST"):
        atexit.register(digest)
    if gradients is None:
        _count_only()
    _watch_the_clock(times)


def _watch_the_clock(times: Any) -> None:
    """Mark where loading and backward begin and end."""
    from torch.utils.data import dataloader

    def timed(work: Any, before: str, phase: str) -> Any:
        @functools.wraps(work)
        def call(*args: Any, **kwargs: Any) -> Any:
            if times.inside:
                return work(*args, **kwargs)
            times.mark(before)
            times.inside = True
            try:
                return work(*args, **kwargs)
            finally:
                times.inside = False
                times.mark(phase)

        return call

    loader: Any = dataloader._BaseDataLoaderIter
    loader.__next__ = timed(loader.__next__, "other", "data")
    torch.autograd.backward = timed(torch.autograd.backward, "forward", "backward")  # type: ignore[assignment]
    if torch.cuda.is_available():
        times.device_memory = torch.cuda.max_memory_allocated


def _rates(optimizer: Any) -> Any:
    """The learning rate, or those of all groups where they differ; one on a device is left there."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if not all(isinstance(rate, (int, float)) for rate in rates):
        return None
    return rates[0] if rates.count(rates[0]) == len(rates) else rates


def _norm(optimizer: Any) -> Any:
    """The norm of all gradients of this step, so seldom that it costs next to nothing (a few times a second)."""
    global _norm_at, _norm_from
    if perf_counter() < _norm_from or not ctx.record.voice or ctx.record.played:
        return None
    began = thread_time()  # on a busy machine the wall's would allow more than our share
    if began < _norm_at:
        _norm_from = perf_counter() + _norm_at - began
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [_grad_slot.__get__(p) for p in params if not isinstance(p, _of_a_batch)]
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


def _leave_out_steps(optimizer: Any, gradients: Any) -> None:
    """A step whose gradients were lost with a rank, and could not be computed again, is left out."""
    hooked = optimizer.profile_hook_step

    def profile_hook_step(step: Any) -> Any:
        inner = hooked(step)

        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if gradients.passing_over:
                gradients.passing_over = False
                return None
            return inner(*args, **kwargs)

        return wrapper

    optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _scaled_lr(lr: Any) -> Any:
    """``--scale-lr``, for the larger global batch of ``--batch keep``."""
    how = ctx.plan.get("scale_lr")
    if how is None or ctx.size == 1:
        return lr
    return lr * (ctx.size if how == "linear" else ctx.size**0.5)


def _count_only() -> None:
    """One rank: nothing is changed; the loss of each backward and the size of each batch are noted."""
    from torch.utils.data import dataloader

    backward, step = torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__

    def noting_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        global _loss
        backward(tensors, *args, **kwargs)
        if isinstance(tensors, torch.Tensor) and tensors.dim() == 0:
            _loss = tensors.detach()

    def noting_next(self: Any) -> Any:
        data = step(self)
        first = data
        while isinstance(first, (list, tuple, dict)) and first:
            first = next(iter(first.values())) if isinstance(first, dict) else first[0]
        ctx.samples += len(first) if isinstance(first, torch.Tensor) and first.dim() else 1
        return data

    torch.autograd.backward = noting_backward  # type: ignore[assignment]
    dataloader._BaseDataLoaderIter.__next__ = noting_next  # type: ignore[method-assign]


def write_ledger() -> None:
    """``OARS_LEDGER=1``: the numbers of the samples this rank contributes to the exchange, one line a batch.

    Written before it: of an exchange that failed there are lines of a later era, when it was done again.
    """
    lines = []
    for iteration, batch, indices in ctx.handed:
        first, rows = own(offsets_of(len(indices)))
        mine = indices[first : first + rows]
        lines.append(json.dumps({"iteration": iteration, "batch": batch, "of": len(indices), "era": ctx.era,
                                 "samples": [int(i) for i in mine]}) + "\n")
    fd = os.open(ctx.record.folder / f"ledger-{_name()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, "".join(lines).encode())
    os.close(fd)


def _name() -> int:
    """This rank's number at the start."""
    return ctx.world.origin if ctx.world is not None else 0


def _leave_weights() -> None:
    """For ``oars verify``: the weights as they stand, and a digest to compare ranks by."""
    import numpy as np

    arrays = [p.detach().float().cpu().numpy() for p in _kept]
    if ctx.record.voice:
        np.savez(ctx.record.folder / "weights.npz", *arrays)
    digest(arrays)


def digest(arrays: Any = None) -> None:
    """Write this rank's digest of all weights that optimizers have seen."""
    ctx.apart = False  # also if the run has failed: weights are read as they are
    arrays = arrays if arrays is not None else [p.detach().float().cpu().numpy() for p in _kept]
    whole = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    path = ctx.record.folder / f"weights-digest-{_name()}.txt"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, whole.encode())
    os.close(fd)
