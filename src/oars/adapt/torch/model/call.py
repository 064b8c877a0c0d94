"""A module's call: on plain local rows where the model treats its rows one by one, on Rows where it does not.

The first call of a module is *traced*: it runs on Rows, whose rules see every operation. If nothing but row-by-row
work happened, nothing read a value, and no intermediate rows stayed behind (in an attribute, a hook, a list), the
model would do the same to any rows, so later calls hand it plain local tensors and wrap what comes out: *split*, at no
cost per operation. Otherwise later calls run on Rows as the first one did, exact but with a little cost per operation,
while the modules inside may still be split. A hand-made batch (plain tensors) whose call had to gather runs replicated,
unless most of the model's weights are in modules inside that are split.

A model may change its ways, so the 2nd, 4th, 8th … call is traced again.
"""

from __future__ import annotations

import itertools
import re
import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from oars import debug
from oars.adapt.python import random
from oars.adapt.python.clock import perf_counter
from oars.adapt.torch.context import Draw, Offsets, Split, ctx, offsets_of, on_every_rank, own, scaled, site, tiny
from oars.adapt.torch.model import paths, sequences
from oars.adapt.torch.model.compare import Rehearsal
from oars.adapt.torch.model.moving import Moving
from oars.adapt.torch.model.replicated import say_replicated
from oars.adapt.torch.model.switches import Switches
from oars.adapt.torch.model.trace import Trace, batch_dim, hooks_of_all_modules, kind_of, nests, watching
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows import tensor as rows_
from oars.adapt.torch.rows.looks import together
from oars.adapt.torch.rows.noise import drawing
from oars.adapt.torch.rows.size import BatchSize
from oars.adapt.torch.rows.tensor import Otherwise, Rows, whole
from oars.engine.dissent import Whole
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils._pytree import TreeSpec

_call = nn.Module._wrapped_call_impl
SPLIT, ROWS, REPLICATED = "split", "rows", "replicated"
_SIZES = 4  # a model that looks at the batch's size in a way that is not seen shows it by one of so many
SECOND = "second"  # the batch is the second dimension: see ``sequences.py``
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


class Verdict:
    """How a module is called from now on, for one kind of arguments."""

    def __init__(self, of_first: Verdict | None = None) -> None:
        self.way = ROWS
        self.site = ""  # where it was called, if it is replicated
        self.calls = 0
        self.first: Any = of_first  # along the first dimension, where the second is tried; and there, what was seen
        self.changes = -1  # of modules, when it was traced
        self.new_leaves = False  # it may use weights that nobody knows yet
        self.sure = True  # it cannot fail on one rank alone
        self.sizes: list[int] = []  # of batches for which it was compared with a call on plain own rows
        self.switches: Switches | None = None  # what stands outside of modules, when it was traced
        self.paths: set[int | None] = set()  # the ways that were compared
        self.blind = False  # the ways of calls without gradients cannot be seen
        self.within = 0  # the call being traced in which it was traced last
        self.work: tuple[float, ...] = ()  # of a row, where it was counted (see sharing.py)
        self.missed = -1  # the script's operation in which a split call did otherwise
        self.mixed = -1  # the one in which rows met in a turn of a module inside: it is not split until none do
        self.draws: list[Draw] = []
        self.noisy = False  # of any call so far
        self.outputs: list[tuple[int, int] | None] = []  # per leaf of the result: (dimension, rows per sample)


_verdicts: WeakKeyDictionary[nn.Module, tuple[dict, dict]] = WeakKeyDictionary()  # together, and in separate training
_moving: WeakKeyDictionary[nn.Module, Moving] = WeakKeyDictionary()
_first_calls = itertools.count()
_draws: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # what random streams a call draws from


def forget() -> None:
    """What was found by tracing: ranks have joined, which have not seen it."""
    global _first_calls
    _first_calls = itertools.count()
    for known in (_verdicts, _moving, _draws):
        known.clear()


def moving_buffers() -> dict[int, tuple[list[torch.Tensor], list[int]]]:
    """The numbers that models may change by themselves when they are called (running statistics and the like), and
    which of them have changed here: for each model, by the order of their first calls. One that the script has dropped
    is gone sooner on some ranks."""
    found = {}
    for module, moving in list(_moving.items()):
        buffers = [b for b in _changeable(module) if b.is_floating_point() or b.is_complex()]
        found[moving.number] = buffers, [i for i, b in enumerate(buffers) if moving.has_moved(b)]
    return found


def module_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``nn.Module.__call__``."""
    if ctx.plain:
        return _call(self, *args, **kwargs)
    if ctx.busy:
        return _called(self, args, kwargs)
    if torch._C._len_torch_dispatch_stack():  # a mode of the script's sees every operation (FlopCounterMode counts)
        return _on_whole(self, args, kwargs)
    # One that has drawn nothing so far may begin to: then it is made again, from where the streams were.
    return ctx.perform(_outermost, self, args, kwargs, _draws.get(self, "any") or "torch")


def _outermost(self: nn.Module, args: tuple, kwargs: dict) -> Any:
    """A call that may be done again: what it changes in the module must not happen twice."""
    kind = (ctx.changes, ctx.mode, kwargs.get("training"))  # each call of a Keras model says whether it trains
    moving = _moving.get(self)
    every = moving is None or moving.kind != kind
    buffers = moving.buffers if moving is not None and not every else _changeable(self)
    before = [b.detach().clone() for b in buffers]
    versions = [b._version for b in buffers] if every else []
    counts = {v: v.calls for of in _verdicts.get(self, ()) for v in of.values()}
    try:
        out = _called(self, args, kwargs)
    except (RankLost, Otherwise):
        _put_back(buffers, before, counts)
        raise
    except Whole:
        _put_back(buffers, before, counts)
        for of in _verdicts.get(self, ()):
            for verdict in of.values():
                verdict.sure = False
        if ctx.drawn is not None:
            random.restore(ctx.drawn)
        out = _on_whole(self, args, kwargs)
    if ctx.again:
        _put_back(buffers, before, counts)
    elif ctx.guard is not None:
        ctx.guard.moves(buffers, before)
    if every and not ctx.again:
        moved = [b for b, old, version in zip(buffers, before, versions, strict=True)
                 if b._version != version or not (b.is_meta or torch.equal(b, old))]  # batch_norm moves them unseen
        _moving.setdefault(self, moving or Moving(next(_first_calls))).see(kind, buffers, versions, moved)
    return out


def called() -> list[tuple[int, nn.Module]]:
    """The modules that the script has called, by the order of their first calls."""
    return sorted((moving.number, module) for module, moving in list(_moving.items()))


def _on_whole(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """The call as one process makes it, on every rank: some rank could not do its part, and raises now with all."""
    leaves, spec = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten([whole(x, "call") if isinstance(x, Rows) else x for x in leaves], spec)
    with ctx.out_of_step():
        return _call(module, *args, **kwargs)


def _changeable(module: nn.Module) -> list:
    """Buffers; of a Keras layer also what is not trained, which Keras keeps as parameters: moving averages, seeds."""
    frozen = [p for p in module.parameters() if not p.requires_grad] if hasattr(module, "_torch_params") else []
    return [b for b in (*module.buffers(), *frozen) if not is_lazy(b)]


def _put_back(buffers: list, before: list, counts: dict) -> None:
    with torch.no_grad():
        for buffer, old in zip(buffers, before, strict=True):
            buffer.data.copy_(old)
    for verdict, calls in counts.items():
        verdict.calls = calls


def _called(self: nn.Module, args: tuple, kwargs: dict) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    rows_.take_over_changes(leaves)
    hooked = bool(self._backward_hooks or self._backward_pre_hooks or hooks_of_all._global_backward_hooks
                  or hooks_of_all._global_backward_pre_hooks)
    nested = nests(self, args, kwargs)
    if hooked or nested or isinstance(self, torch.jit.ScriptModule) or (
            ctx.separate and any(_joined(leaf) for leaf in leaves)):
        # C++ code and hooks on gradients know only whole tensors; what was joined in separate training stays so.
        args, kwargs = tree_unflatten([whole(x, "call") if isinstance(x, Rows) else x for x in leaves], spec)
        with torch._C.DisableTorchFunction() if nested else nullcontext():
            out = _deeper(_call, self, args, kwargs)
        return tree_map(_with_true_gradient, out) if hooked else out
    offsets = _batch(self, leaves)
    if offsets is None:
        return _deeper(_call, self, args, kwargs)
    ctx.sharing.called(offsets[-1])
    side = sequences.side_of(self, leaves)
    form = str(spec)
    if " at 0x" in form:  # a function in it, say, made for this call: its address may be another's, on some ranks
        form = _ADDRESS.sub("", form)
    kinds = tuple(kind_of(leaf, offsets, side) for leaf in leaves)
    key: tuple = (ctx.mode, torch.is_grad_enabled(), hooks_of_all_modules(), form, kinds)
    # In separate training each rank calls as it sees fit: what it learns there must not change what all do together.
    of_module = _verdicts.setdefault(self, ({}, {}))[ctx.separate]
    if len(of_module) > 100:  # numbers among the arguments are part of the key
        of_module.clear()
    verdict = of_module.get(key)
    if verdict is None:
        verdict = of_module[key] = Verdict()
    if verdict.way == SECOND:
        offsets, side = offsets_of(sequences.second(leaves)), 1
        key = (*key, tuple(kind_of(leaf, offsets, side) for leaf in leaves))
        verdict = of_module.setdefault(key, Verdict(of_module[key[:-1]]))
    if tiny(offsets):  # fewer rows than ranks: a model that splits gets a stand-in row, any other the whole batch
        if verdict.way == SPLIT and not ctx.traces:
            return _split(self, verdict, leaves, spec, offsets, side)
        args, kwargs = tree_unflatten([whole(x, "call") if isinstance(x, Rows) else x for x in leaves], spec)
        return _deeper(_eager, self, args, kwargs)
    verdict.calls += 1
    # A traced caller must see all that happens inside; a module that was changed may work otherwise.
    changed = verdict.changes != ctx.changes or (verdict.switches is not None and verdict.switches.thrown())
    unsure = verdict.way == SPLIT and len(verdict.sizes) < _SIZES and offsets[-1] not in verdict.sizes
    again = bool(ctx.traces) and verdict.within == ctx.traces[0].number and not changed
    missed = verdict.missed == ctx.performed  # a cell in a loop may do otherwise in any of its turns
    if verdict.calls & (verdict.calls - 1) == 0 or (not again and (ctx.traces or changed or unsure or missed)):
        if debug.on and not ctx.traces:
            why = "it was changed" if changed else f"this is call {verdict.calls}"
            debug.say(f"{type(self).__name__} is traced: {why}")
        return _trace(self, verdict, leaves, spec, offsets, side)
    if verdict.way == SPLIT and not again:
        return _split(self, verdict, leaves, spec, offsets, side)
    if again:  # a cell in a loop: the caller's trace sees all that happens in it
        caller = ctx.traces[0]
        args, kwargs = tree_unflatten([_as_rows(leaf, offsets, side) for leaf in leaves], spec)
        events, made = len(caller.events), len(caller.made)
        out = _deeper(_eager, self, args, kwargs)
        if len(caller.events) > events or caller.keeps(tree_flatten(out)[0], made):
            verdict.way, verdict.mixed = ROWS, ctx.performed
        return out
    if verdict.way == ROWS:
        args, kwargs = tree_unflatten([_as_rows(leaf, offsets, side) for leaf in leaves], spec)
        return _deeper(_eager, self, args, kwargs)
    began = perf_counter()
    out = _deeper(_eager, self, args, kwargs)
    ctx.record.alike(verdict.site, perf_counter() - began, torch.is_grad_enabled())
    return out


def _with_true_gradient(x: Any) -> Any:
    return collectives.Alike.apply(x) if isinstance(x, torch.Tensor) and x.requires_grad and not ctx.plain else x


def _joined(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, Rows) and x.requires_grad and ctx.gradients.enter(x)


def _batch(module: nn.Module, leaves: list) -> Offsets | None:
    """How the batch among the arguments is cut; None if there is none to cut."""
    offsets = None
    for leaf in leaves:
        if isinstance(leaf, Rows):
            if offsets is not None and leaf.offsets != offsets:
                return None
            offsets = leaf.offsets
    if offsets is not None or ctx.depth:
        return offsets
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and not isinstance(leaf, nn.Parameter):
            if type(leaf) is torch.Tensor and leaf.is_meta:
                return None  # asked for shapes alone: so do Keras's layers get their weights
            if leaf.shape[0] < ctx.size or leaf.is_sparse or next(module.parameters(), None) is None:
                return None
            if on_every_rank(leaf.shape[0]):
                return None
            return offsets_of(leaf.shape[0])
    return None


def _as_rows(leaf: Any, offsets: Offsets, side: int = 0) -> Any:
    """A plain tensor that spans the batch becomes rows."""
    if isinstance(leaf, Rows) or not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    dim = batch_dim(leaf, offsets, side)
    if dim is None or leaf.is_sparse:
        return leaf
    if leaf.requires_grad:
        ctx.gradients.enter(leaf)
    with torch._C.DisableTorchFunction() if ctx.traces else nullcontext():  # the model has no part in it
        return Rows(rows_.cut(leaf, offsets, dim), offsets, dim)


def _deeper(call: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    ctx.depth += 1
    try:
        return call(module, *args, **kwargs)
    finally:
        ctx.depth -= 1


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's call without torch.compile, which knows nothing of rows."""
    module = getattr(module, "_orig_mod", module)
    if module._forward_hooks or module._forward_pre_hooks or hooks_of_all_modules():
        ctx.note("hooks")  # they are to see the global batch
    if module._compiled_call_impl is None:  # by PyTorch's own frames, where a warning counts them
        return _call(module, *args, **kwargs)
    return module._call_impl(*args, **kwargs)


def _trace(module: nn.Module, verdict: Verdict, leaves: list, spec: TreeSpec, offsets: Offsets, side: int = 0) -> Any:
    """Run the call on rows, and decide how later calls run: any of ``trace.events`` speaks against splitting."""
    handmade = not any(isinstance(leaf, Rows) for leaf in leaves)
    if verdict.way == REPLICATED:
        args, kwargs = tree_unflatten(leaves, spec)
        return _deeper(_call, module, args, kwargs)
    inputs = [_as_rows(leaf, offsets, side) for leaf in leaves]
    args, kwargs = tree_unflatten(inputs, spec)
    rows_.see(leaves)
    verdict.blind = paths.blind(module)
    rehearsal = None if ctx.traces else Rehearsal(module, _changeable(module), [
        x.local if isinstance(x, Rows) else x for x in inputs])
    trace = Trace(offsets)
    trace.known.update(map(id, inputs))
    ctx.traces.append(trace)
    try:
        with watching(module, first=len(ctx.traces) == 1):
            out = _deeper(_eager, module, args, kwargs)
    except BaseException:
        for inner in trace.inner:
            inner.changes = -1
        raise
    finally:
        ctx.traces.remove(trace)
    trace.see_streams()
    verdict.work = ctx.sharing.work_since(trace.work, offsets[-1])
    verdict.changes, verdict.new_leaves, verdict.sure = ctx.changes, trace.new_leaves, trace.sure
    results, _ = tree_flatten(out)
    if trace.keeps([*inputs, *results]):
        trace.events.append("kept rows")
    verdict.outputs = [_output(x, offsets, trace) for x in results]
    verdict.draws = [Draw(name, dim, _rows_per_sample(o, offsets, trace) if dim >= 0 else 0, order)
                     for name, dim, o, order in trace.draws]
    verdict.noisy |= any(draw.name for draw in verdict.draws)
    if hasattr(module, "_orig_mod") and (verdict.noisy or (verdict.draws and module.training)):
        what, does = ("noise", "draws") if verdict.noisy else ("dropout", "drops")
        ctx.record.notice(f"{type(module._orig_mod).__name__} has {what} and runs uncompiled, "
                          f"so that it {does} what one process would",
                          f"compile the parts without {what} by themselves: they then run compiled on own rows")
        trace.events.append("random")
    # Nothing that the ranks see should differ, but were it to, they must still call alike; not in separate training. Of
    # modules inside, they tell each other at the end of the outermost call.
    if ctx.traces:
        verdict.within = ctx.traces[0].number
        ctx.traces[0].inner.append(verdict)
    elif _on_any_rank(trace.events, trace.inner):
        trace.events.append("elsewhere")
    elif rehearsal is not None:
        differs = rehearsal.differs(results, lambda local: _again(module, verdict, local, spec, offsets))
        if _on_any_rank([differs] * differs):
            trace.events.append("the batch's size")
        verdict.sizes.append(offsets[-1])
        if len(verdict.paths) > paths.MOST:
            trace.events.append("many ways")
    gathers = trace.gathers()
    if trace.events and ctx.depth:
        verdict.mixed = ctx.performed
    elif ctx.traces and verdict.mixed != ctx.performed:  # the caller is watched, and so are all turns
        verdict.mixed = -1
    if not trace.events and verdict.mixed == -1:
        verdict.way = SPLIT
        verdict.switches = None if ctx.traces else Switches(module, verdict.switches)
        for around in ctx.traces:
            around.weights.update((id(p), p.numel()) for p in module.parameters())
    elif handmade and gathers and verdict.calls == 1 and not side and sequences.may_be(module, leaves, trace):
        verdict.way, verdict.first = SECOND, trace
        raise Otherwise  # nothing has happened yet: along the other dimension, then
    elif gathers and side and verdict.first is not None and not trace.splits_more_than(verdict.first.first):
        sequences.known.discard(module)
        of_first = verdict.first
        verdict.way = of_first.way = ROWS if of_first.first.mostly_split(module) else REPLICATED
        if of_first.way == REPLICATED:
            verdict.site = of_first.site = say_replicated(module, of_first.first)
    elif handmade and gathers and not trace.mostly_split(module):
        verdict.way, verdict.site = REPLICATED, say_replicated(module, trace)
    else:
        verdict.way = ROWS
    if verdict.way == SPLIT or (verdict.way == ROWS and trace.worked):
        ctx.worked()
    if debug.on:
        why = f"because of {', '.join(dict.fromkeys(trace.events))}" if trace.events else "no operation mixes its rows"
        debug.say(f"call {verdict.calls} of {type(module).__name__} at {site()}: from now on {verdict.way}, {why}")
    _draws[module] = "any" if verdict.way != SPLIT else "torch"
    return out


def _on_any_rank(events: list, inner: Sequence[Verdict] = ()) -> bool:
    """Whether there is an event on any rank; what modules inside do must be the same on all."""
    if ctx.separate:
        return bool(events)
    ways = zlib.crc32(" ".join(verdict.way for verdict in inner).encode())
    every = ctx.world.allgather_alike(np.array([len(events), ways]))
    if (every[:, 1] != every[0, 1]).any():
        for verdict in inner:
            verdict.way, verdict.changes = ROWS, -1
    return bool(every[:, 0].any())


def _again(module: nn.Module, verdict: Verdict, local: list, spec: TreeSpec, offsets: Offsets) -> list:
    """The leaves of what the module gives for plain own rows."""
    args, kwargs = tree_unflatten(local, spec)
    split = ctx.split = Split(offsets, verdict.draws, False)
    ctx.plain = True
    try:
        with drawing(split, verdict.noisy):
            out, path = paths.follow(lambda: _eager(module, *args, **kwargs), local, verdict.blind)
        verdict.paths.add(path)
        return tree_flatten(out)[0]
    finally:
        ctx.split, ctx.plain = None, False


def _rows_per_sample(found: Offsets, base: Offsets, trace: Trace) -> int:
    k = found[-1] // base[-1] if base[-1] else 0
    if scaled(base, k) != found:
        trace.events.append("ragged")
    return k


def _output(x: Any, offsets: Offsets, trace: Trace) -> tuple[int, int] | None:
    if isinstance(x, Rows):
        return x.dim_, _rows_per_sample(x.offsets, offsets, trace)
    if isinstance(x, BatchSize) or (isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter)):
        trace.events.append("plain result")
    return None


def _split(module: nn.Module, verdict: Verdict, leaves: list, spec: TreeSpec, offsets: Offsets, side: int = 0) -> Any:
    lo, n = own(offsets)
    local = []
    for leaf in leaves:
        if isinstance(leaf, Rows):
            leaf = rows_.stand_in(leaf.local, leaf.dim_) if n == 0 else leaf.local
        elif isinstance(leaf, torch.Tensor):
            leaf = _as_rows(leaf, offsets, side)
            leaf = leaf.local if isinstance(leaf, Rows) else leaf
        local.append(leaf)
    args, kwargs = tree_unflatten(local, spec)
    split = ctx.split = Split(offsets, verdict.draws, n == 0)
    ctx.plain = ctx.record.split = True
    try:
        with drawing(split, verdict.noisy):
            out, path = paths.follow(lambda: _call(module, *args, **kwargs), local, verdict.blind)
        results, out_spec = tree_flatten(out)
        if len(results) != len(verdict.outputs) or split.drawn != len(verdict.draws) or (
                path is not None and path not in verdict.paths):
            raise Otherwise
    except Otherwise:
        verdict.changes, verdict.missed = -1, ctx.performed
        if verdict.switches is not None:
            verdict.switches.put_back()
        raise
    except Exception as error:
        ctx.split, ctx.plain = None, False
        if isinstance(error, RankLost):
            raise
        together(error)
        raise Whole(error, False) from None
    finally:
        ctx.split, ctx.plain = None, False
    ctx.sharing.split(offsets[-1], verdict.work)
    if not (verdict.sure or ctx.separate):
        collectives.unless_spoilt(ctx.world.confirm)
    if verdict.new_leaves and torch.is_grad_enabled():
        ctx.gradients.leaves(results, local)
    for i, how in enumerate(verdict.outputs):
        if how is not None:
            dim, k = how
            part = results[i].narrow(dim, 0, 0) if n == 0 else results[i]
            results[i] = Rows(part, scaled(offsets, k), dim)
    return tree_unflatten(results, out_spec)
