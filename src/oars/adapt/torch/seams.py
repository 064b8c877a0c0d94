"""Where the script meets what takes time: models, loaders, backward, optimizer steps.

Each of these is a *seam*: while recording, what came out is noted on the tape; while playing, ``played`` gives
something like it instead. Two seams are also *boundaries*, where a snapshot may be taken: a batch is asked for, or an
optimizer step is over (``snapshots.boundary``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as dataloader_

from oars.adapt.streams import streams
from oars.adapt.tape import tape
from oars.adapt.torch import kinds, played, standin
from oars.adapt.torch.context import ctx

boundary: Callable[[str], None] = print  # set by snapshots
stepped: Callable[[Any], None] = id  # type: ignore[assignment]
modules: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # called by the script itself -> in which order
made: dict[str, WeakKeyDictionary[Any, int]] = {  # in the order they were made
    kind: WeakKeyDictionary() for kind in ("optimizers", "schedulers", "scalers")}
backwards = 0  # so far
at_step: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # ``backwards`` at an optimizer's last step
last_batch: Any = None  # the one the script is working on
in_step = 0
passed_over = False  # the step under way was left out
_main = threading.main_thread()
_Iter: Any = dataloader_._BaseDataLoaderIter
_counts = dict.fromkeys(("modules", *made), 0)


def number(of: WeakKeyDictionary, thing: Any, kind: str) -> None:
    """Give ``thing`` its number, once."""
    if thing not in of:
        of[thing] = _counts[kind]
        _counts[kind] += 1


# ---- models ---------------------------------------------------------------------------------------------------------


def _calling(inner: Any) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # ``ctx.busy``: rows that were lost with a rank are being made again.
        if tape.busy or ctx.busy or torch.compiler.is_compiling() or threading.current_thread() is not _main:
            return inner(self, *args, **kwargs)
        return _region(functools.partial(inner, self), self, args, kwargs)

    call.__doc__ = inner.__doc__
    return call


def _calling_plain(inner: Any) -> Any:
    """The same for one rank, where ``inner`` is PyTorch's own: modules inside models pay nothing."""
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if tape.busy or torch.compiler.is_compiling() or threading.current_thread() is not _main:
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        return _region(functools.partial(inner, self), self, args, kwargs)

    return call


def _region(work: Any, module: Any, args: tuple, kwargs: dict) -> Any:
    """A call of a model, or of a compiled function."""
    if isinstance(module, nn.Module):
        number(modules, module, "modules")
    if tape.playing:
        streams.play()
        return played.call(work, module, args, kwargs)
    if standin.left:  # a model takes what they stand for
        args, kwargs = standin.mapped(standin.value_of, (args, kwargs))
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
    tape.put_kind(b"c", kinds.describe(out))
    streams.leave()
    return out


def _compiling(inner: Any) -> Any:
    """``torch.compile`` of a function: its calls are passed over like a model's."""
    @functools.wraps(inner)
    def compile_(model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return lambda f: compile_(f, **kwargs)
        compiled = inner(model, **kwargs)
        return compiled if isinstance(model, (nn.Module, type)) else _passed_over(compiled)

    return compile_


def _passed_over(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tape.busy or ctx.busy or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _region(function, call, args, kwargs)

    return call


def _tracing(inner: Any) -> Any:
    """``torch.jit.trace``: done for real when it is played too. What it makes shares its weights with the model."""
    @functools.wraps(inner)
    def trace(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if tape.playing and not tape.busy:
            example_inputs = standin.mapped(standin._held, example_inputs)
        tape.busy += 1
        try:
            return inner(func, example_inputs, *args, **kwargs)
        finally:
            tape.busy -= 1

    return trace


def _transforming(inner: Any) -> Any:
    """``torch.func.vmap`` and the like: what they make of a function is called like a model."""
    return functools.wraps(inner)(lambda *args, **kwargs: _passed_over(inner(*args, **kwargs)))


# ---- loaders --------------------------------------------------------------------------------------------------------


def _beginning(inner: Any) -> Any:
    def begin(self: DataLoader) -> Any:
        if tape.busy:
            return inner(self)
        if tape.playing:
            streams.play()
        tape.busy += 1
        try:
            passed = played.numbered(self) if tape.playing else played.lost_workers(self)
            return played.Batches(self) if passed else inner(self)
        finally:
            tape.busy -= 1

    return functools.wraps(inner)(begin)


def _next_index(inner: Any) -> Any:
    def index(self: Any) -> Any:
        out = inner(self)
        if tape.busy and getattr(self, "_oars_told", False) and self._num_workers == 0:
            streams.enter()  # the sampler's draws are the script's; what reading samples draws is passed over
            self._oars_told = "reads"
        return out

    return index


def _nexting(inner: Any) -> Any:
    def next_(self: Any) -> Any:
        global last_batch
        if tape.busy or threading.current_thread() is not threading.main_thread():  # a thread reads ahead of the script
            return inner(self)
        boundary("b")
        last_batch = None
        if tape.playing:
            return played.unnumbered(inner, self)
        tape.busy += 1
        self._oars_told = True
        try:
            data = inner(self)
        except StopIteration:
            tape.put(b"e")
            raise
        finally:
            tape.busy -= 1
            reads, self._oars_told = self._oars_told == "reads", False
        tape.put_kind(b"b", kinds.describe(data))
        if reads:
            streams.leave()
        last_batch = data
        return data

    return next_


def in_last_batch(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to the batch that was handed out last."""
    stack = [last_batch]
    while stack:
        x = stack.pop()
        if x is tensor:
            return True
        if not isinstance(x, torch.Tensor):
            stack += kinds.collate.children(x) or []
    return False


# ---- backward and steps ---------------------------------------------------------------------------------------------


def _backing(inner: Any) -> Any:
    @functools.wraps(inner)
    def backward(*args: Any, **kwargs: Any) -> Any:
        global backwards
        if tape.busy:
            return inner(*args, **kwargs)
        backwards += 1
        if tape.skips:
            return None
        tape.busy += 1  # hooks of the script's may read values in there
        try:
            return inner(*args, **kwargs)
        finally:
            tape.busy -= 1

    return backward


def _grading(inner: Any) -> Any:
    @functools.wraps(inner)
    def grad(*args: Any, **kwargs: Any) -> Any:
        if tape.busy:
            return inner(*args, **kwargs)
        if tape.skips:
            return played.grad(*args, **kwargs)
        tape.busy += 1
        try:
            return inner(*args, **kwargs)
        finally:
            tape.busy -= 1

    return grad


def _stepping(step: Any) -> Any:
    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        global in_step, passed_over
        passed_over = False
        if tape.busy:
            return step(self, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        in_step += 1
        try:
            out = played.step(self, closure) if tape.playing else _recorded_step(step, self, closure, args, kwargs)
        finally:
            in_step -= 1
        at_step[self] = backwards
        stepped(self)
        return out

    return call


def _recorded_step(step: Any, optimizer: Any, closure: Any, args: tuple, kwargs: dict) -> Any:
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


def _stepped(step: Any) -> Any:
    """Around all that belongs to a step, the hooks on it too."""
    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        global passed_over
        passed_over = isinstance(self, Optimizer)
        out = step(self, *args, **kwargs)
        if tape.busy:
            return out
        if passed_over and not tape.playing:  # its gradients were lost with a rank: the script has called it, though
            tape.put(b"s")
            stepped(self)
        if not in_step:
            boundary("t")
        return out

    return call


def _scaling(scaler_step: Any) -> Any:
    """A step by a GradScaler is over with the scaler's update: until then it holds what it found."""
    @functools.wraps(scaler_step)
    def call(*args: Any, **kwargs: Any) -> Any:
        global in_step
        in_step += 1
        try:
            return scaler_step(*args, **kwargs)
        finally:
            in_step -= 1

    return call


def _counted(closure: Any) -> Any:
    @functools.wraps(closure)
    def call() -> Any:
        busy, tape.busy = tape.busy, 0
        tape.put(b"o")
        try:
            return closure()
        finally:
            tape.busy = busy

    return call


def _registering(kind: str, init: Any) -> Any:
    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not tape.busy:
            number(made[kind], self, kind)

    return call


def install(one_rank: bool) -> None:
    """Patch around what other parts of the adapter have patched already."""
    calling = _calling_plain if nn.Module.__call__ is nn.Module._wrapped_call_impl else _calling
    nn.Module.__call__ = calling(nn.Module.__call__)  # type: ignore[method-assign]
    DataLoader.__iter__ = _beginning(DataLoader.__iter__)  # type: ignore[method-assign]
    _Iter._next_index, _Iter.__next__ = _next_index(_Iter._next_index), _nexting(_Iter.__next__)
    torch.autograd.backward = _backing(torch.autograd.backward)  # type: ignore[assignment]
    standin.RULES["backward"] = lambda func, args, kwargs: torch.autograd.backward(args[0])
    torch.autograd.grad = _grading(torch.autograd.grad)  # type: ignore[assignment]
    hooked = Optimizer.profile_hook_step
    Optimizer.profile_hook_step = staticmethod(  # type: ignore[assignment]
        lambda step: _stepped(hooked(_stepping(step))))
    Optimizer.__init__ = _registering("optimizers", Optimizer.__init__)  # type: ignore[method-assign]
    for kind in (LRScheduler, ReduceLROnPlateau):
        kind.__init__ = _registering("schedulers", kind.__init__)  # type: ignore[method-assign]
    torch.amp.GradScaler.__init__ = _registering(  # type: ignore[method-assign]
        "scalers", torch.amp.GradScaler.__init__)
    for name in ("grad", "grad_and_value", "jacrev", "jacfwd", "hessian", "vmap"):
        setattr(torch.func, name, _transforming(getattr(torch.func, name)))
    for name in ("vjp", "jvp", "linearize"):
        setattr(torch.func, name, _passed_over(getattr(torch.func, name)))
    torch.vmap = torch.func.vmap
    torch.jit.trace = _tracing(torch.jit.trace)  # type: ignore[assignment]
    torch.amp.GradScaler.step = _scaling(torch.amp.GradScaler.step)  # type: ignore[method-assign]
    torch.amp.GradScaler.update = _stepped(torch.amp.GradScaler.update)  # type: ignore[method-assign]
    if one_rank:
        torch.compile = _compiling(torch.compile)  # type: ignore[assignment]
