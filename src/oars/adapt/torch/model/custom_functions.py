"""Custom ``autograd.Function``s and ``torch.func`` transforms that meet rows.

Neither goes through PyTorch's overrides. A custom function is tried out once: its forward and its backward run on Rows
under watch, and if both work row by row it is applied to own rows from then on (a gradient reversal, a straight-through
estimator), else to the whole batch. Transforms always work on the whole batch, which the rows
in a transformed function's closure become, too (``rows/tensor.py``).

Nor can rows be made of inference tensors, which do not tell when they are changed: inference mode only turns gradients
off here.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves, tree_map

import oars
from oars.adapt.python import random
from oars.adapt.torch.context import Offsets, ctx
from oars.adapt.torch.model.call import Trace
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.rows import tensor as rows_
from oars.adapt.torch.rows.collectives import Alike, Times
from oars.adapt.torch.rows.looks import look_after, together
from oars.adapt.torch.rows.tensor import Rows, cut, whole
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_OURS = os.path.join(os.path.dirname(oars.__file__), "")
# With older versions of PyTorch, a function keeps a checkpoint's arguments until backward: rows, too, as they are.
_KEEPER = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
_by_row: dict[tuple, tuple[int, ...] | None] = {}  # (function, kinds of arguments) -> batch dimension of each result


def forget() -> None:
    """What was found by trying out: ranks have joined, which have not seen it."""
    _by_row.clear()


class _Notes:
    """What ``ctx`` is in a custom function's forward and backward, for trying it out."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.saved_tensors: tuple = ()
        self.needs_input_grad = needs

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = lambda self, *a: None


def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``autograd.Function.apply``."""
    linear = cls.__module__.startswith(("oars.", "torch."))  # (as far as we see their backwards)
    if cls is _KEEPER or cls.__module__.startswith("oars.") or ctx.plain and (ctx.split is None or linear):
        return _apply(cls, *args, **kwargs)
    if ctx.plain:  # in a module's call on own rows
        return _scaled(cls, args, kwargs)
    if not any(isinstance(a, Rows) for a in args):
        out = _apply_alike(cls, *args, **kwargs)  # autograd has no use for rows that a model gives in its forward
        # What was gathered before may go on as rows: then a rank has a part of the gradient.
        part = not linear and any(_goes_back(a) and not a.is_leaf for a in args)
        return _with_true_gradients(out) if part else out
    rows_.see(args)
    rows_.take_over_changes(args)
    return ctx.perform(_on_rows, cls, args, kwargs)


def _on_rows(cls: type[torch.autograd.Function], args: tuple, kwargs: dict) -> Any:
    lead = next(a for a in args if isinstance(a, Rows))
    key = (cls, tuple((a.dim_, a.local.dim()) if isinstance(a, Rows) else type(a) for a in args))
    if key not in _by_row:
        _by_row[key] = _try_out(cls, args, lead.offsets)
    dims = _by_row[key]
    for a in args:
        if isinstance(a, torch.Tensor) and a.requires_grad and not isinstance(a, Rows):
            ctx.gradients.enter(a)
    if dims is None or any(isinstance(a, Rows) and a.offsets != lead.offsets for a in args):
        return _on_whole(cls, args, kwargs)
    try:
        out = _scaled(cls, tuple(_own(a, lead) for a in args), kwargs)
    except RankLost:
        raise
    except Exception as error:
        together(error)
        return _on_whole(cls, args, kwargs)
    look_after()
    if not isinstance(out, tuple):
        return Rows(out, lead.offsets, dims[0])
    return tuple(Rows(o, lead.offsets, d) for o, d in zip(out, dims, strict=True))


def _on_whole(cls: type[torch.autograd.Function], args: tuple, kwargs: dict) -> Any:
    return _with_true_gradients(
        _apply_alike(cls, *[whole(a, cls.__name__) if isinstance(a, Rows) else a for a in args], **kwargs))


lineage.ON_WHOLE[_on_rows] = _on_whole


def _with_true_gradients(out: Any) -> Any:
    return tree_map(lambda o: Alike.apply(o) if _goes_back(o) else o, out)


def _scaled(cls: type[torch.autograd.Function], own: tuple, kwargs: dict) -> Any:
    """On own rows. Its backward may be anything but linear (a clipping): it gets the true gradients."""
    size = ctx.size
    out = _apply_alike(cls, *[Times.apply(a, size) if _goes_back(a) else a for a in own], **kwargs)
    return tree_map(lambda o: Times.apply(o, 1 / size) if _goes_back(o) else o, out)


def _goes_back(a: Any) -> bool:
    return isinstance(a, torch.Tensor) and a.requires_grad and torch.is_grad_enabled()


def _own(a: Any, lead: Rows) -> Any:
    if isinstance(a, Rows):
        return a.local
    if isinstance(a, torch.Tensor) and a.dim() == lead.local.dim() and a.shape[lead.dim_] == lead.offsets[-1]:
        return cut(a, lead.offsets, lead.dim_)
    return a


def _try_out(cls: type[torch.autograd.Function], args: tuple, offsets: Offsets) -> tuple[int, ...] | None:
    """The batch dimension of each result if the function works row by row, else None."""
    needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    notes, trace = _Notes(needs), Trace(offsets)
    args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    trace.known.update(map(id, args))
    traces, ctx.traces, streams = ctx.traces, [trace], random.state()
    try:
        with torch.no_grad():
            if cls.setup_context is not torch.autograd.Function.setup_context:
                out = cls.forward(*args)
                cls.setup_context(notes, args, out)
            else:
                out = cls.forward(notes, *args)
            outs = out if isinstance(out, tuple) else (out,)
            if not all(isinstance(o, Rows) and o.offsets == offsets for o in outs):
                return None
            if any(needs):
                cls.backward(notes, *[o.clone() for o in outs])
    except Exception as error:  # it may do anything; what cannot be tried out is gathered, and that is always right
        trace.events.append(repr(error))
    finally:
        ctx.traces = traces
        random.restore(streams)
        for verdict in trace.inner:  # ranks agree about modules inside only at the end of a watched call
            if traces:
                traces[0].inner.append(verdict)
            else:
                verdict.changes = -1
    return None if trace.events or trace.draws else tuple(o.dim_ for o in outs)


def on_whole(transform: Callable[..., Any]) -> Any:
    """A torch.func transform whose function gets whole tensors and runs alike on every rank."""

    @functools.wraps(transform)
    def transformed(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if ctx.plain:
            return transform(func, *args, **kwargs)
        plain = tree_map(lambda a: whole(a, transform.__name__) if isinstance(a, Rows) else a, (args, kwargs))
        made = alike(transform)(func, *plain[0], **plain[1])
        return alike(made) if callable(made) else made

    return transformed


def alike(call: Callable[..., Any]) -> Any:
    """``call`` on plain tensors alone: modules in it are called as they are."""

    @functools.wraps(call)
    def replicated(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda a: whole(a, "torch.func") if isinstance(a, Rows) else a, (args, kwargs))
        before, ctx.plain = ctx.plain, True
        try:
            return call(*args, **kwargs)
        finally:
            ctx.plain = before

    return replicated


_apply_alike = alike(_apply)


def script(inner: Callable[..., Any]) -> Any:
    """Around ``torch.jit.script``, which resolves the names in a class by the frame that called it: not by ours."""
    replicated = alike(inner)

    @functools.wraps(inner)
    def scripting(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_OURS):  # layers around this one
            frame, _frames_up = frame.f_back, _frames_up + 1
        return replicated(obj, optimize, _frames_up + 2, *args, **kwargs)  # this one, and ``replicated``

    return scripting


_inferring = False
_scripted: Any = torch.jit.ScriptFunction.__call__


def scripted(self: torch.jit.ScriptFunction, *args: Any, **kwargs: Any) -> Any:
    """Replaces the call of functions compiled by ``torch.jit``, which know nothing of rows: what they were compiled
    from runs on these, or else they get the whole."""
    if ctx.plain or not any(isinstance(a, Rows) for a in tree_leaves((args, kwargs))):
        return _scripted(self, *args, **kwargs)
    function = getattr(self, "_torchdynamo_orig_callable", None)
    return function(*args, **kwargs) if function is not None else alike(_scripted)(self, *args, **kwargs)


def inference_enter(self: Any) -> None:
    global _inferring
    self._before = torch.is_grad_enabled(), _inferring
    _inferring = self.mode
    torch.set_grad_enabled(not self.mode)


def inference_exit(self: Any, *_: object) -> None:
    global _inferring
    before, _inferring = self._before
    torch.set_grad_enabled(before)


def is_inferring() -> bool:
    """Replaces ``torch.is_inference_mode_enabled``."""
    return _inferring


def functional_call(inner: Callable[..., Any]) -> Any:
    """Around ``torch.func.functional_call``."""
    @functools.wraps(inner)
    def calling(module: torch.nn.Module, tensors: dict[str, torch.Tensor] | Sequence[dict[str, torch.Tensor]],
                *args: Any, **kwargs: Any) -> Any:
        for t in tree_leaves(tensors):
            if isinstance(t, torch.Tensor) and t.requires_grad and not isinstance(t, Rows):
                ctx.gradients.enter(t)  # what stands in for parameters in a split call
        return inner(module, tensors, *args, **kwargs)

    return calling
