"""Never slower: whether a step is long enough to be shared (``--split auto``).

The operations of the second to the fifth step are counted: arithmetic on rows, module calls, messages, what reading a
sample takes. From these numbers, and from what each takes about (the constants below), follows what sharing gains and
what it costs. No clock is read, so the same script on the same number of ranks decides the same. Where
sharing costs more than it gains, batches of fewer than ``ctx.share_from`` rows are not cut any more from the sixth step
on: every rank reads and computes them whole, as it does what cannot be split, and a backward in which nothing came from
another rank ends without a message. Larger batches are still cut.

Ranks that do not share meet every few steps, so that they stay together, and find deaths, Ctrl-C, signals and weights
that differ, as an exchange of gradients does.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info

from oars import debug
from oars.adapt.python.signals import signals
from oars.adapt.torch.backward import grad_hooks
from oars.adapt.torch.context import ctx
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.recovery.backward_pass import Pass
from oars.adapt.torch.rows.tensor import Rows
from oars.adapt.torch.step_log import write_ledger
from oars.engine.retry import until_none_is_lost
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from oars.plan import Plan

_call: Any = nn.Module._wrapped_call_impl  # type: ignore[attr-defined]
_backward = torch.autograd.backward
FIRST, LAST = 1, 5  # steps: what is counted lies between
NEVER = 1 << 62  # a batch that no script has
# Seconds, on one core. Estimates: they have not been fitted to measurements on a quiet machine. What is shared:
_FLOP, _ELEMENT = 1 / 30e9, 0.4e-9
_SAMPLE, _EVENT = 4e-6, 0.5e-6  # a sample that is read, and each function that its data set calls for it
# What sharing costs beside it:
_STEP, _BATCH, _CALL, _VIEW, _GATHER = 250e-6, 150e-6, 150e-6, 40e-6, 100e-6
_BYTE = 0.8e-9  # of gradients, and of what is gathered
# How often ranks meet that do not share: after so many seconds by these numbers, or so many steps.
_MEET_AFTER, _MOST = 0.02, 50
_LOOP, _OPERATION = 150e-6, 15e-6  # what every process takes for a step, and for an operation
_SLOW = {"open", "read", "readinto", "readline", "readlines", "recv", "decode", "imread", "pread", "seek", "loads"}
_KNOWN = {"builtins", "torch", "numpy", "math", "random", "_random", "_operator", "_abc", "sys", "time", "None"}

_QUICK = ("/torch/", "/numpy/")
_VALUES = {bool, int, float, str, torch.dtype, torch.device}
_WORK = ("flops", "elements", "operations")


class Sharing:
    """What was counted, and what follows from it; ``ctx.sharing`` is the only instance."""

    def __init__(self, plan: Plan) -> None:
        self.wanted = (plan.split == "auto" and plan.sync == "allreduce" and plan.batch == "split"
                       and plan.wire == "fp32" and plan.guard == "heal" and plan.samples == "all"
                       and plan.prune is None and not plan.widen and not plan.local_batchnorm
                       and len(plan.hosts) < 2 and not torch.cuda.is_available())
        self.counting = self.wanted
        self.steps = 0
        self.every, self.since = _MOST, 0  # steps between meetings, and since the last one
        self.inside = False  # of a call that is not shared, or of its backward
        self.crossed = False  # a message was sent in this backward
        self.rows_made = False  # with gradients, in this step
        self.counts: dict[str, float] = dict.fromkeys(
            ("rows", "flops", "elements", "operations", "views", "calls", "batches", "samples", "gathers", "bytes"), 0)
        self.reading = 0.0  # seconds for a sample, of those that this rank has read

    # -- counting

    def operation(self, name: str, args: tuple, out: Any) -> None:
        """An operation was done on rows."""
        results = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Rows)]
        given = [a for a in args if isinstance(a, torch.Tensor)]
        grads = [_wants_gradient(a) for a in given[:2]] if torch.is_grad_enabled() else []
        products = 2.0 * _PRODUCTS[name](given, results[0], args) if (
            name in _PRODUCTS and results and len(given) > 1) else 0.0
        self.counts["operations"] += 1
        self.counts["views"] += not ctx.traces
        self.counts["flops"] += products * (1 + sum(grads))  # and once more for each gradient
        self.counts["elements"] += (3 if any(grads) else 1) * sum(map(_size, [*results, *given[:1]]))

    def work(self) -> tuple[float, ...]:
        """Where the counts stand to which a call on plain own rows adds."""
        return tuple(self.counts[what] for what in _WORK)

    def work_since(self, before: tuple[float, ...], rows: int) -> tuple[float, ...]:
        """What a traced call has done: for each row, and how many operations."""
        flops, elements, operations = (now - then for now, then in zip(self.work(), before, strict=True))
        return flops / rows, elements / rows, operations

    def called(self, rows: int) -> None:
        """A module was called."""
        if not ctx.traces:
            self.counts["calls"] += 1
            self.counts["rows"] = max(self.counts["rows"], rows)

    def split(self, rows: int, work: tuple[float, ...]) -> None:
        """A call was done on plain own rows."""
        if self.counting and work:
            for what, count in zip(_WORK, (work[0] * rows, work[1] * rows, work[2]), strict=True):
                self.counts[what] += count

    def batch(self, rows: int, workers: bool) -> None:
        """A loader has given a batch that was read in parts."""
        self.counts["batches"] += 1
        self.counts["samples"] += rows
        self.counts["rows"] = max(self.counts["rows"], rows)
        if workers:
            self.reading = math.inf

    def gathered(self, nbytes: int) -> None:
        """Rows were gathered."""
        self.counts["gathers"] += 1
        self.counts["bytes"] += nbytes

    def exchanged(self, nbytes: int) -> None:
        """Gradients were exchanged."""
        self.counts["bytes"] += nbytes

    def read(self, work: Callable[[], Any], samples: int) -> Any:
        """Let a data set read so many samples: the functions it calls are counted."""
        if not self.counting or get_worker_info() is not None:
            return work()
        if sys.getprofile() is not None:
            self.reading = math.inf
            return work()
        events, slow = 0, False

        def seen(frame: Any, event: str, function: Any) -> None:
            nonlocal events, slow
            if event == "c_call":
                events += 1
                of = str(getattr(function, "__module__", None)).partition(".")[0]
                slow = slow or of not in _KNOWN or getattr(function, "__name__", "") in _SLOW
            elif event == "call":
                events += 1
                file = frame.f_code.co_filename
                slow = slow or ("-packages" in file and not any(known in file for known in _QUICK))

        sys.setprofile(seen)
        try:
            return work()
        finally:
            sys.setprofile(None)
            self.reading = max(self.reading, math.inf if slow else _SAMPLE + _EVENT * events / samples)

    # -- deciding

    def stepped(self) -> None:
        """An optimizer has stepped."""
        if not self.wanted or ctx.record.played:
            return
        self.steps += 1
        self.rows_made = False
        if ctx.share_from:
            self.since += 1
            if self.since >= self.every:
                self.since = 0
                self._meet()
        elif self.steps == FIRST:
            self.counting, self.reading, self.counts = True, 0.0, dict.fromkeys(self.counts, 0)
        elif self.counting and self.steps >= LAST:
            self.counting = False
            self._decide()

    def _decide(self) -> None:
        mine = self.counts, self.reading
        every = until_none_is_lost(lambda: ctx.world.allgather(mine), lineage.renew)
        if any(counts != self.counts for counts, _ in every):  # after a death, some have counted what was done again
            return
        self.reading = max(reading for _, reading in every)
        each = {what: count / (LAST - FIRST) for what, count in self.counts.items()}
        work = _FLOP * each["flops"] + _ELEMENT * each["elements"]
        if each["samples"]:
            work += self.reading * each["samples"]
        gain = work * (1 - 1 / ctx.size)
        cost = (_STEP + _BATCH * each["batches"] + _CALL * each["calls"] + _VIEW * each["views"]
                + _GATHER * each["gathers"] + _BYTE * each["bytes"])
        if debug.on:
            debug.say(f"sharing a step gains {gain:.6f} s and costs {cost:.6f} s: {self.counts}")
        if gain >= cost:
            return
        rows, alone = int(self.counts["rows"]), work + _LOOP + _OPERATION * each["operations"]
        pays_from = rows * cost / gain if gain else NEVER
        ctx.share_from = _round(max(pays_from, rows + 1))
        self.every = int(min(_MOST, max(1, _MEET_AFTER / alone)))
        if gain and rows:
            ctx.record.notice(f"steps of about {alone * 1e3:.2g} ms are too short to share, so every rank does all of "
                              f"the work; from a batch of about {ctx.share_from:,} on they are not (--split always: "
                              "share them anyway)")

    # -- not sharing

    def _meet(self) -> None:
        """What an exchange of gradients does beside it."""
        guard = ctx.guard
        while True:
            looked = guard.look() if guard is not None else ()
            header = np.array([ctx.record.interrupted | signals.due << 1, *looked], np.int64)
            try:
                headers = ctx.gradients.exchange.agree(header)
                if guard is not None:
                    guard.compare(headers[:, 1:])
                break
            except RankLost:
                lineage.renew()
        if guard is not None:
            guard.exchanged()
        if (headers[:, 0] & 1).any():
            ctx.record.raise_interrupt()
        if (headers[:, 0] & 2).any():
            signals.deliver()

    def differ(self) -> None:
        """Ranks that computed the same by themselves hold other numbers: from here on they share."""
        ctx.share_from, self.wanted = 0, False
        ctx.record.notice("the ranks did not compute the same bits from the same numbers: they take the first rank's "
                          "weights, and share the work from here on")

    # -- snapshots

    def state(self) -> dict[str, Any]:
        """What a snapshot holds of it."""
        return {"steps": self.steps, "counting": self.counting, "counts": self.counts, "reading": self.reading,
                "share_from": ctx.share_from, "every": self.every, "since": self.since, "wanted": self.wanted}

    def arrive(self, state: dict[str, Any] | None, same_ranks: bool) -> None:
        """A resumed run, or a rank that joins, goes on from there; other ranks than then decide by themselves."""
        self.rows_made = False  # those of steps that were played
        if state is not None:
            self.wanted = self.wanted and state["wanted"]
        if not self.wanted or state is None:
            return
        for name in ("steps", "counting", "counts", "reading", "every", "since"):
            setattr(self, name, state[name])
        ctx.share_from = state["share_from"]
        if not same_ranks and not self.counting and self.steps >= LAST:
            ctx.share_from = 0
            self._decide()


# ---- layers ---------------------------------------------------------------------------------------------------------


def module_call(inner: Callable[..., Any]) -> Any:
    """Around ``nn.Module.__call__``: one that is not shared is PyTorch's own, with all that it calls."""
    @functools.wraps(inner)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not ctx.share_from or ctx.plain or ctx.busy or ctx.traces or ctx.depth or not _on_whole(args, kwargs):
            return inner(self, *args, **kwargs)
        ctx.plain = ctx.sharing.inside = True
        try:
            return _call(self, *args, **kwargs)
        finally:
            ctx.plain = ctx.sharing.inside = False

    return call


def _on_whole(args: tuple, kwargs: dict) -> bool:
    """Whether a call has no rows among its arguments, and no batch that is to be cut."""
    rows = None
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is torch.Tensor and not a.is_nested:
            rows = a.shape[0] if rows is None and a.dim() else rows
        elif not (a is None or kind in _VALUES or kind is nn.Parameter):
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(leaf, Rows) for leaf in leaves):
                return False
            rows = next((leaf.shape[0] for leaf in leaves if type(leaf) is torch.Tensor
                         and not leaf.is_nested and leaf.dim()), 0)
            break
    return (rows or 0) < ctx.share_from


def backward(inner: Callable[..., Any]) -> Any:
    """Around ``torch.autograd.backward``: where no rows are in the graph, ranks hold the same gradients already."""
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        gradients, sharing = ctx.gradients, ctx.sharing
        if (not ctx.share_from or sharing.rows_made or ctx.plain or gradients.pending or gradients.passes
                or grad_hooks.before_backward() or grad_hooks.wait_behind()
                or any(map(_with_rows, (tensors, *args, *kwargs.values())))):
            inner(tensors, *args, **kwargs)
            return
        if isinstance(tensors, torch.Tensor) and tensors.dim() == 0:
            gradients.last_loss = tensors.detach()
        sharing.crossed, sharing.inside = False, True
        try:
            gradients.run(lambda: _backward(tensors, *args, **kwargs))
        finally:
            sharing.inside = False
        gradients.backwards += 1
        if sharing.crossed:  # there was a graph from before the last step
            here = Pass([], None, False)
            here.broken = "a graph from an earlier step"
            gradients.passes.append(here)
            if not ctx.spoilt or gradients.redo_backwards():
                gradients.exchange_gradients()
            return
        gradients.touched.clear()
        if ctx.handed:
            write_ledger()
            ctx.handed.clear()

    return backward


def _with_rows(given: Any) -> bool:
    """Whether something that a backward was given is rows, or has some in it."""
    return isinstance(given, Rows) or (isinstance(given, (list, tuple)) and any(map(_with_rows, given)))


# ---- what operations take -------------------------------------------------------------------------------------------


def _size(x: Any) -> int:
    """Elements of a tensor, of rows those of the whole; no use of the size by the model."""
    if not isinstance(x, Rows):
        return x.numel() if isinstance(x, torch.Tensor) else 0
    return math.prod(_shape(x))


def _shape(x: Any) -> list[int]:
    shape = list((x.local if isinstance(x, Rows) else x).shape)
    if isinstance(x, Rows):
        shape[x.dim_] = x.offsets[-1]
    return shape or [1]


def _wants_gradient(x: Any) -> bool:
    return bool((x.local if isinstance(x, Rows) else x).requires_grad)


def _of_conv(tensors: list, out: Any, args: tuple) -> float:
    return _size(out) * _size(tensors[1]) / _shape(tensors[1])[0]


def _of_transposed_conv(tensors: list, out: Any, args: tuple) -> float:
    return _size(tensors[0]) * _size(tensors[1]) / _shape(tensors[1])[0]


def _of_rnn(tensors: list, out: Any, args: tuple) -> float:
    weights = next((a for a in args if isinstance(a, (list, tuple)) and len(a) > 2), ())
    return _size(tensors[0]) / _shape(tensors[0])[-1] * sum(map(_size, weights))


_PRODUCTS: dict[str, Callable[[list, Any, tuple], float]] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__", "einsum", "cdist"),
                    lambda tensors, out, args: _size(out) * _shape(tensors[0])[-1]),
    **dict.fromkeys(("addmm", "baddbmm"), lambda tensors, out, args: _size(out) * _shape(tensors[1])[-1]),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _of_rnn),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _of_conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _of_transposed_conv),
    "scaled_dot_product_attention": lambda tensors, out, args: 2 * _size(tensors[0]) * _shape(tensors[1])[-2],
    "multi_head_attention_forward": lambda tensors, out, args: _size(out) * (
        4 * _shape(out)[-1] + 2 * _shape(tensors[1])[0]),
}


def _round(rows: float) -> int:
    """Up to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(rows)) - 1)
    return math.ceil(rows / unit) * unit
