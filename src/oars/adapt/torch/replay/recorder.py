"""Where the script meets what takes time: models, loaders, backward, optimizer steps.

The layers here lie around all others (``seams.py``): while recording, what came out is noted on the tape; while it is
played, ``player`` gives something like it instead. Two of them are also *boundaries*, where a snapshot may be taken: a
batch is asked for, or an optimizer step is over (``snapshots.boundary``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from oars.adapt.replay.streams import streams
from oars.adapt.replay.tape import tape
from oars.adapt.torch.context import ctx
from oars.adapt.torch.replay import describe, placeholder, player
from oars.adapt.torch.replay.progress import progress

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

_main = threading.main_thread()
_asked: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # iterators asked for a batch -> whether they read samples


# ---- models ---------------------------------------------------------------------------------------------------------


def module_call(inner: Callable[..., Any]) -> Any:
    def call(self: nn.Module, *args: object, **kwargs: object) -> Any:
        # ``ctx.busy``: rows that were lost with a rank are being made again.
        if tape.busy or ctx.busy or torch.compiler.is_compiling() or threading.current_thread() is not _main:
            return inner(self, *args, **kwargs)
        return _region(functools.partial(inner, self), self, args, kwargs)

    call.__doc__ = inner.__doc__
    return call


def call_of_one_rank(inner: Callable[..., Any]) -> Any:
    """The same for one rank, where ``inner`` is PyTorch's own: modules inside models pay nothing."""
    def call(self: nn.Module, *args: object, **kwargs: object) -> Any:
        if tape.busy or torch.compiler.is_compiling() or threading.current_thread() is not _main:
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        return _region(functools.partial(inner, self), self, args, kwargs)

    return call


def _region(work: Callable[..., Any], module: nn.Module | Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A call of a model, or of a compiled function."""
    if isinstance(module, nn.Module):
        progress.number(progress.modules, module, "modules")
    if tape.playing:
        streams.play()
        return player.call(work, module, args, kwargs)
    if placeholder.remain():  # a model takes what they stand for
        args, kwargs = placeholder.mapped(placeholder.value_of, (args, kwargs))
    streams.enter()
    tape.busy += 1
    try:
        out = work(*args, **kwargs)
    except Exception as error:
        tape.put_kind(b"x", (type(error).__name__, str(error)[:200]))
        streams.leave()
        raise
    finally:
        tape.busy -= 1
    tape.put_kind(b"c", describe.describe(out))
    streams.leave()
    return out


def compile_(inner: Callable[..., Any]) -> Any:
    """``torch.compile`` of a function: its calls are passed over like a model's."""
    @functools.wraps(inner)
    def compile_(model: nn.Module | Callable[..., Any] | None = None, **kwargs: object) -> Any:
        if model is None:
            return lambda f: compile_(f, **kwargs)
        compiled = inner(model, **kwargs)
        return compiled if isinstance(model, (nn.Module, type)) else passed_over(compiled)

    return compile_


def passed_over(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        if tape.busy or ctx.busy or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _region(function, call, args, kwargs)

    return call


def jit_trace(inner: Callable[..., Any]) -> Any:
    """``torch.jit.trace``: done for real when it is played too. What it makes shares its weights with the model."""
    @functools.wraps(inner)
    def trace(func: Callable[..., Any], example_inputs: Any = None, *args: object, **kwargs: object) -> Any:
        if tape.playing and not tape.busy:
            example_inputs = placeholder.mapped(placeholder._held, example_inputs)
        tape.busy += 1
        try:
            return inner(func, example_inputs, *args, **kwargs)
        finally:
            tape.busy -= 1

    return trace


def transform(inner: Callable[..., Any]) -> Any:
    """``torch.func.vmap`` and the like: what they make of a function is called like a model."""
    return functools.wraps(inner)(lambda *args, **kwargs: passed_over(inner(*args, **kwargs)))


# ---- loaders --------------------------------------------------------------------------------------------------------


def loader_iter(inner: Callable[..., Any]) -> Any:
    def begin(self: DataLoader) -> Any:
        if tape.busy:
            return inner(self)
        if tape.playing:
            streams.play()
        tape.busy += 1
        try:
            passed = player.numbered(self) if tape.playing else player.lost_workers(self)
            return player.Batches(self) if passed else inner(self)
        finally:
            tape.busy -= 1

    return functools.wraps(inner)(begin)


def next_index(inner: Callable[..., Any]) -> Any:
    def index(self: _BaseDataLoaderIter) -> Any:
        out = inner(self)
        if tape.busy and self in _asked and self._num_workers == 0:
            streams.enter()  # the sampler's draws are the script's; what reading samples draws is passed over
            _asked[self] = True
        return out

    return index


def iter_next(inner: Callable[..., Any]) -> Any:
    def next_(self: _BaseDataLoaderIter) -> Any:
        if tape.busy or threading.current_thread() is not threading.main_thread():  # a thread reads ahead of the script
            return inner(self)
        ctx.snapshots.boundary("b")
        progress.next_batch(None)
        if tape.playing:
            return player.unnumbered(inner, self)
        tape.busy += 1
        _asked[self] = False
        try:
            data = inner(self)
        except StopIteration:
            tape.put(b"e")
            raise
        finally:
            tape.busy -= 1
            reads = _asked.pop(self)
        tape.put_kind(b"b", describe.describe(data))
        if reads:
            streams.leave()
        progress.next_batch(data)
        return data

    return next_


# ---- backward and steps ---------------------------------------------------------------------------------------------


def backward(inner: Callable[..., Any]) -> Any:
    @functools.wraps(inner)
    def backward(*args: object, **kwargs: object) -> Any:
        if tape.busy:
            return inner(*args, **kwargs)
        progress.goes_back()
        if tape.skips:
            return None
        tape.busy += 1  # hooks of the script's may read values in there
        try:
            return inner(*args, **kwargs)
        finally:
            tape.busy -= 1

    return backward


def grad(inner: Callable[..., Any]) -> Any:
    @functools.wraps(inner)
    def grad(*args: Any, **kwargs: Any) -> Any:
        if tape.busy:
            return inner(*args, **kwargs)
        if tape.skips:
            return player.grad(*args, **kwargs)
        tape.busy += 1
        try:
            return inner(*args, **kwargs)
        finally:
            tape.busy -= 1

    return grad


def step(step: Callable[..., Any]) -> Any:
    @functools.wraps(step)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        progress.leave_out(False)
        if tape.busy:
            return step(self, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        progress.enter_step()
        try:
            out = player.step(self, closure) if tape.playing else _recorded_step(step, self, closure, args, kwargs)
        finally:
            progress.leave_step()
        progress.at_step[self] = progress.backwards
        ctx.snapshots.made_step(self)
        return out

    return call


def _recorded_step(step: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any] | None, args: tuple,
                   kwargs: dict) -> Any:
    if callable(closure):
        args, kwargs = (_counted(closure), *args[1:]), {k: v for k, v in kwargs.items() if k != "closure"}
    draws = not type(optimizer).__module__.startswith("torch.optim") and not callable(closure)
    if draws:
        streams.enter()
    tape.busy += 1
    try:
        out = step(optimizer, *args, **kwargs)
    finally:
        tape.busy -= 1
    tape.put(b"s")
    if not streams.begun:
        streams.begin()
    elif draws:
        streams.leave()
    return out


def step_and_hooks(step: Callable[..., Any]) -> Any:
    """Around all that belongs to a step, the hooks on it too."""
    @functools.wraps(step)
    def call(self: Optimizer | torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        progress.leave_out(isinstance(self, Optimizer))
        out = step(self, *args, **kwargs)
        if tape.busy:
            return out
        if progress.passed_over and not tape.playing:  # its gradients were lost with a rank
            tape.put(b"s")
            ctx.snapshots.made_step(self)
        if not progress.in_step:
            ctx.snapshots.boundary("t")
        return out

    return call


def scaler_step(scaler_step: Callable[..., Any]) -> Any:
    """A step by a GradScaler is over with the scaler's update: until then it holds what it found."""
    @functools.wraps(scaler_step)
    def call(*args: Any, **kwargs: Any) -> Any:
        progress.enter_step()
        try:
            return scaler_step(*args, **kwargs)
        finally:
            progress.leave_step()

    return call


def _counted(closure: Callable[[], Any]) -> Any:
    @functools.wraps(closure)
    def call() -> Any:
        busy, tape.busy = tape.busy, 0
        tape.put(b"o")
        try:
            return closure()
        finally:
            tape.busy = busy

    return call


def registering(kind: str) -> Any:
    """A layer around ``__init__`` of optimizers and the like: each gets its number."""
    def layer(init: Callable[..., Any]) -> Any:
        @functools.wraps(init)
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if not tape.busy:
                progress.number(progress.made[kind], self, kind)

        return call

    return layer


placeholder.RULES["backward"] = lambda func, args, kwargs: torch.autograd.backward(args[0])
