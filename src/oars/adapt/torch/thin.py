"""``--samples thin`` where the script meets PyTorch: what samplers give, and losses (``oars.evolve.thinning``).

A loader's batch sampler gives batches that are thinned, on every rank alike, before they are cut for the ranks. The
loss of such a batch is a sum with weights, over as many samples as the batch had. Losses come from PyTorch's own loss
functions; where they do not, nothing is left out.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.optim.optimizer import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from oars import runfolder
from oars.adapt.torch.context import ctx
from oars.evolve.thinning import WHOLE_AT_THE_END, Batch, Samples

PICTURES = 16  # of the hardest samples, kept with the run


class Thinner:
    """One rank's part; ``ctx.thinner``."""

    def __init__(self, of_run: int) -> None:
        self.of_run, self.steps = of_run, 0
        self.sets: WeakKeyDictionary[BatchSampler, tuple[Samples, Any]] = WeakKeyDictionary()  # of a loader's sampler
        self.queues: WeakKeyDictionary[BatchSampler, deque[Batch]] = WeakKeyDictionary()
        self.current: tuple[Samples, Batch] | None = None  # the batch that the script works on
        self.inside = False
        self.over = ""  # why nothing is left out any more
        self.learnt: tuple[Samples, Any] | None = None  # of the loader that was trained from, with its data set
        atexit.register(self.leave)

    def stop(self, why: str) -> None:
        """Nothing is left out any more."""
        if not self.over:
            self.over = why
            ctx.record.notice(f"no samples are left out: {why}")

    def batches(self, sampler: BatchSampler, inner: Iterator[list[int]]) -> Iterator[list[int]]:
        """A pass over a loader's batches."""
        if sampler not in self.sets:
            yield from inner
            return
        samples, _ = self.sets[sampler]
        queue = self.queues[sampler] = deque()
        away = None
        if samples.passes and not samples.trained:  # it evaluates, or its losses are not known
            yield from inner
            return
        late = self.of_run and self.steps >= self.of_run * (WHOLE_AT_THE_END - 1) / WHOLE_AT_THE_END
        if samples.passes and samples.known() and torch.is_grad_enabled() and not self.over and not late:
            away = samples.away()
        samples.passes += torch.is_grad_enabled()
        before = samples.left_out.sum()
        for given in inner:
            if not all(type(i) is int for i in given):
                self.stop("the sampler gives no numbers of samples")
                away = None
            late = self.of_run and self.steps >= self.of_run * (WHOLE_AT_THE_END - 1) / WHOLE_AT_THE_END
            if away is None or self.over or late:
                batch = Batch(np.asarray(given), len(given), None)
            else:
                batch = samples.thinned(given, away)
            queue.append(batch)
            yield batch.samples.tolist() if batch.weights is not None else given
        if samples.trained and torch.is_grad_enabled():
            ctx.record.event("thinned", **{"pass": samples.passes}, of=len(samples.losses),
                             left_out=int(samples.left_out.sum() - before))

    def loss(self, inner: Callable[..., Any], signature: inspect.Signature, args: tuple, kwargs: dict) -> Any:
        """A loss of the current batch."""
        assert self.current is not None
        samples, batch = self.current
        given = dict(signature.bind(*args, **kwargs).arguments)
        plain = given.get("reduction", "mean") == "mean" and all(given.get(key) is None for key in (
            "weight", "size_average", "reduce")) and not given.get("label_smoothing")
        each = inner(**{**given, "reduction": "none"}) if plain else None
        if each is None or not each.dim() or int(each.shape[0]) != len(batch.samples):
            if batch.weights is not None:
                self.stop("a loss does not belong to the batch, sample by sample")
            return inner(*args, **kwargs)
        one = each.flatten(1).mean(1) if each.dim() > 1 else each
        values = one.detach().tolist()
        samples.note(batch.samples, values)
        batch.noted = True
        self.learnt = next((pair for pair in self.sets.values() if pair[0] is samples), self.learnt)
        if batch.weights is None:
            return inner(*args, **kwargs)
        return (one * torch.tensor(batch.weights, dtype=one.dtype, device=one.device)).sum() / batch.of

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self.steps += 1
        if self.current is not None and self.current[1].weights is not None and not self.current[1].noted:
            self.stop("the script has computed a loss in a way that is not known")
        if self.current is None or not self.current[1].noted:
            if self.steps == 20 and self.learnt is None:
                self.stop("losses of single samples are not known here (PyTorch's own loss functions, outside of the "
                          "model, on batches of a DataLoader, tell them)")

    def leave(self) -> None:
        """The script is over: the voice keeps what was learnt of the samples with the run."""
        if self.learnt is None or not ctx.in_step or not ctx.record.voice:
            return
        samples, data = self.learnt
        pictures: list[np.ndarray] = []
        hardest = np.argsort(-np.nan_to_num(samples.losses, nan=-np.inf), kind="stable")[:PICTURES]
        for number in hardest:
            try:
                with torch.random.fork_rng():
                    picture = _picture(data[int(number)])
            except Exception:
                picture = None
            if picture is None or (pictures and picture.shape != pictures[0].shape):
                break
            pictures.append(picture)
        np.savez(ctx.record.folder / runfolder.SAMPLES, losses=samples.losses, left_out=samples.left_out,
                 passes=samples.passes, hardest=hardest[:len(pictures)], pictures=np.array(pictures))


def _picture(sample: Any) -> np.ndarray | None:
    """The picture in a sample, rows by columns by colours, in bytes."""
    parts = sample if isinstance(sample, (tuple, list)) else sample.values() if isinstance(sample, dict) else (sample,)
    for part in parts:
        data = np.asarray(part) if isinstance(part, (torch.Tensor, np.ndarray)) or hasattr(part, "getbands") else None
        if data is None:
            continue
        if data.ndim == 3 and data.shape[0] in (1, 3):
            data = data.transpose(1, 2, 0)
        if data.ndim == 2:
            data = data[:, :, None]
        if data.ndim == 3 and data.shape[2] in (1, 3) and min(data.shape[:2]) >= 4:
            low, high = float(data.min()), float(data.max())
            return ((data - low) * (255 / (high - low or 1))).astype(np.uint8)
    return None


# ---- layers ---------------------------------------------------------------------------------------------------------


def loader_iter(inner: Callable[..., Any]) -> Any:
    """Around ``DataLoader.__iter__``: which data set a sampler's numbers mean."""
    def begin(self: DataLoader) -> Any:
        thinner, sampler = ctx.thinner, self.batch_sampler
        if thinner is not None and ctx.in_step and isinstance(sampler, BatchSampler) and sampler not in thinner.sets:
            thinner.sets[sampler] = Samples(len(self.dataset), torch.initial_seed()), self.dataset  # type: ignore[arg-type]
        return inner(self)

    return functools.wraps(inner)(begin)


def sampler_iter(inner: Callable[..., Any]) -> Any:
    """Around ``BatchSampler.__iter__``: some samples are left out."""
    def batches(self: BatchSampler) -> Any:
        return inner(self) if ctx.thinner is None or not ctx.in_step else ctx.thinner.batches(self, inner(self))

    return functools.wraps(inner)(batches)


def iter_next(inner: Callable[..., Any]) -> Any:
    """Around a loader's ``__next__``: which batch the script works on."""
    def next_(self: Any) -> Any:
        data = inner(self)
        thinner = ctx.thinner
        if thinner is not None and ctx.in_step:
            sampler = self._index_sampler
            queue = thinner.queues.get(sampler) if isinstance(sampler, BatchSampler) else None
            thinner.current = (thinner.sets[sampler][0], queue.popleft()) if queue else None
        return data

    return functools.wraps(inner)(next_)


def loss(inner: Callable[..., Any]) -> Any:
    """Around PyTorch's losses: with the weights of the samples that stay."""
    signature = inspect.signature(inner)

    def call(*args: Any, **kwargs: Any) -> Any:
        thinner = ctx.thinner
        if (thinner is None or thinner.current is None or thinner.inside or ctx.plain or not ctx.in_step
                or not torch.is_grad_enabled()):
            return inner(*args, **kwargs)
        thinner.inside = True
        try:
            return thinner.loss(inner, signature, args, kwargs)
        finally:
            thinner.inside = False

    return functools.wraps(inner)(call)


def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """A hook behind every optimizer's step."""
    if ctx.in_step and ctx.thinner is not None:
        ctx.thinner.stepped()
