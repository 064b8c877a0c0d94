"""What the script is given at each seam while it is played.

Up to its first optimizer step everything is done for real: the weights are the true ones then, models that find their
shapes at the first call find them, and what does not come out as it did tells that the data, the seed or the script are
others. From there on nothing is computed and nothing is read.
"""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as dataloader_

from oars.adapt.python import patching
from oars.adapt.replay.streams import streams
from oars.adapt.replay.tape import Diverged, tape
from oars.adapt.torch.context import ctx, site
from oars.adapt.torch.replay import describe, placeholder
from oars.adapt.torch.replay.placeholder import StandIn, like
from oars.adapt.torch.replay.progress import progress

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

_slot: Any = torch._C.TensorBase.grad
_moulds: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # module or loader -> what it gave when it was real
_buffers_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _for_real(work: Callable[[], Any]) -> Any:
    """Do something; past the first step the random streams are left as they were, as if it had not been done."""
    before = streams.states() if tape.skips else {}
    tape.busy += 1
    try:
        return work()
    finally:
        tape.busy -= 1
        streams.restore(before)


def call(work: Callable[..., Any], module: nn.Module | Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A model's result."""
    if tape.peek() == "x":
        name, text = tape.take_kind("x")
        streams.play()
        kind = getattr(builtins, name, RuntimeError)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(text)
    kind = tape.take_kind("c")
    out: Any = None
    if not tape.skips:
        out = _for_real(lambda: work(*args, **kwargs))
        if not describe.same(describe.describe(out), kind):
            raise Diverged(f"the model called at {site()} gives results of other shapes than the first time")
    else:
        if isinstance(module, nn.Module) and module.training and module not in _buffers_known:
            _buffers_known[module] = True
            for buffer in module.buffers():
                placeholder.mark_stale(buffer)
        if describe.needs_mould(kind) and module not in _moulds:
            held = placeholder.mapped(placeholder._held, (args, kwargs))
            out = _for_real(lambda: work(*held[0], **held[1]))
    if out is not None and describe.needs_mould(kind):
        _moulds[module] = out
    streams.play()
    return out if not tape.skips else describe.build(kind, _moulds.get(module))


def step(optimizer: Optimizer, closure: Any) -> Any:
    """An optimizer's step: its closure is the script's, what it does to the weights comes with the snapshot."""
    out = None
    while tape.peek() == "o":
        tape.take("o")
        out = closure()
    tape.take("s")
    for group in optimizer.param_groups:
        for p in group["params"]:
            placeholder.mark_stale(p)
    if not tape.skips:
        tape.skips = True
        patching.put(torch.Tensor, "grad", _Grad())
    streams.play()
    return out


def grad(outputs: torch.Tensor | Sequence[torch.Tensor], inputs: torch.Tensor | Sequence[torch.Tensor], *args: object,
         **kwargs: object) -> Any:
    """``torch.autograd.grad``'s result."""
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    return tuple(like(x, requires_grad=bool(kwargs.get("create_graph"))) for x in wanted)


class _Grad:
    """``Tensor.grad`` while nothing is computed: after a backward, a leaf has one, whatever it may be."""

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        if tensor is None:
            return self
        with torch._C.DisableTorchFunction():
            found = None if isinstance(tensor, StandIn) else _slot.__get__(tensor)
            if found is not None or tape.busy or not tape.playing or not tensor.requires_grad:
                return found
        if progress.backwards <= getattr(tensor, "_oars_cleared", 0):
            return None
        if not hasattr(tensor, "_oars_grad"):
            tensor._oars_grad = like(tensor)
        return tensor._oars_grad

    def __set__(self, tensor: Any, value: torch.Tensor | None) -> None:
        tensor._oars_cleared = progress.backwards if value is None else -1
        if not isinstance(tensor, StandIn):
            with torch._C.DisableTorchFunction():
                _slot.__set__(tensor, None if isinstance(value, StandIn) else value)

    def __delete__(self, tensor: object) -> None:
        self.__set__(tensor, None)


def leave_grad() -> None:
    """PyTorch's own ``Tensor.grad`` again."""
    if isinstance(torch.Tensor.__dict__.get("grad"), _Grad):
        patching.remove(torch.Tensor, "grad")


# ---- loaders --------------------------------------------------------------------------------------------------------


def numbered(loader: DataLoader) -> bool:
    """Whether batches can be passed over without reading them."""
    return loader._dataset_kind == dataloader_._DatasetKind.Map


def lost_workers(loader: DataLoader) -> bool:
    """Whether the script's loader had workers that stay, which were not started while it was played."""
    return loader in _persistent and loader._iterator is None


def unnumbered(inner: Callable[..., Any], iterator: dataloader_._BaseDataLoaderIter) -> Any:
    """A batch of an iterable dataset: it must be read to get past it."""
    def read() -> Any:
        try:
            return inner(iterator)
        except StopIteration:
            return StopIteration

    if tape.peek() == "e":
        tape.take("e")
        if _for_real(read) is not StopIteration:
            raise Diverged(f"the loader at {site()} has more batches than the first time")
        raise StopIteration
    kind, data = tape.take_kind("b"), _for_real(read)
    if data is StopIteration or not describe.same(describe.describe(data), kind):
        raise Diverged(f"the loader at {site()} gives other batches than the first time")
    streams.play()
    progress.next_batch(data)
    return data


class _Rest:
    """What is left of a sampler's batches, for a loader that is made in the middle of an epoch."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches


class Batches:
    """A loader's iterator while playing: the sampler runs, samples are not read. Afterwards it goes on for real."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._real: Any = None
        self._before = streams.states(), loader.generator.get_state() if loader.generator is not None else None
        self._queue: deque[list] = deque()
        self._sampler = iter(loader._index_sampler)
        ctx.iterations += 1
        self._place = ctx.iterations, 0
        again = loader.persistent_workers and loader in _persistent
        if not again:  # the seed of the workers is drawn here, with workers or without
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
        if loader.num_workers:
            if not again:
                self._sampler = iter(loader._index_sampler)
            if loader.persistent_workers:
                _persistent[loader] = True
            for _ in range(loader.num_workers * (loader.prefetch_factor or 2)):
                self._pull()

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def _pull(self) -> None:
        """One global batch's indices from the sampler; with ``--batch keep`` that is several of the script's."""
        several = ctx.size if ctx.plan.batch == "keep" else 1
        parts = [part for _ in range(several) if (part := next(self._sampler, None)) is not None]
        if parts:
            self._queue.append(parts)

    def __next__(self) -> Any:
        if self._real is None and not tape.busy:
            ctx.snapshots.boundary("b")  # may end the playing
        if not tape.playing:
            if self._real is None:
                self._real = self._go_on()
            return next(self._real)
        tape.busy += 1
        try:
            ahead = self._loader.num_workers > 0
            if not ahead:
                self._pull()
            parts = self._queue.popleft() if self._queue else None
            if ahead and parts is not None:
                self._pull()
        finally:
            tape.busy -= 1
        if parts is None:
            tape.take("e")
            raise StopIteration
        self._place = self._place[0], self._place[1] + 1
        if tape.peek() == "e":
            raise Diverged(f"the loader at {site()} has more batches than the first time")
        return self._batch(tape.take_kind("b"), parts)

    def _batch(self, kind: Sequence[Any], parts: list) -> Any:
        need = describe.needs_mould(kind)
        if not tape.skips or (need and self._loader not in _moulds):
            data = _for_real(lambda: self._read(parts))
            if not tape.skips and not describe.same(describe.describe(data), kind):
                raise Diverged(f"the loader at {site()} gives batches of other shapes than the first time")
            if need:
                _moulds[self._loader] = data
        if tape.skips:
            data = describe.build(kind, _moulds.get(self._loader))
        streams.play()
        progress.next_batch(data)
        return data

    def _read(self, parts: list) -> Any:
        """One batch, read by a loader of its own, with one worker where the script has workers."""
        workers, generator = self._loader.num_workers, self._loader.generator
        state = generator.get_state() if generator is not None else None
        self._loader.num_workers = min(workers, 1)
        try:
            one = self._loader_of(iter(parts))
        finally:
            self._loader.num_workers = workers
            if generator is not None:
                generator.set_state(state)
        streams.restore(self._streams_at_read)
        data = next(one)
        if workers:
            one._shutdown_workers()
        return data

    def _go_on(self) -> Any:
        """The real iterator, from here on."""
        now, generator = streams.states(), self._loader.generator
        after = generator.get_state() if generator is not None else None
        streams.restore(self._before[0])  # workers get the seed they had
        if generator is not None:
            generator.set_state(self._before[1])
        tape.busy += 1
        try:
            made = self._loader_of(chain(chain.from_iterable(list(self._queue)), self._sampler))
            if ctx.world is not None:
                from oars.adapt.torch.batches.reading import reading

                reading(made).place = self._place
            if self._loader.persistent_workers:
                self._loader._iterator, made._index_sampler = made, self._loader._index_sampler
            return made
        finally:
            tape.busy -= 1
            streams.restore(now)
            if generator is not None:
                generator.set_state(after)

    def _loader_of(self, batches: Iterator[Any]) -> Any:
        """A real iterator of the script's loader, over these of the sampler's batches."""
        self._streams_at_read = streams.states()
        loader, plain, rest, iterations = self._loader, DataLoader._index_sampler, _Rest(batches), ctx.iterations
        of_rest = property(lambda other: rest if other is loader else plain.fget(other))  # type: ignore[attr-defined]
        try:
            with patching.replaced(DataLoader, _index_sampler=of_rest):
                return loader._get_iterator()
        finally:
            ctx.iterations = iterations  # it is the one that was begun when this was


_persistent: WeakKeyDictionary[DataLoader, bool] = WeakKeyDictionary()
