"""Gradients: when ``backward()`` returns, every rank holds those of the script's loss over the global batch.

A hook on every leaf notes that it got a gradient; when backward is over, the noted ones are averaged over ranks in one
fused exchange. With gradient accumulation the exchange is put off to the last backward of a step once the script's
pattern is known; whoever reads ``.grad`` before gets it exchanged first.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from oars import debug
from oars.adapt.python import patching
from oars.adapt.python.clock import perf_counter
from oars.adapt.python.signals import signals
from oars.adapt.torch.backward import grad_hooks
from oars.adapt.torch.backward.ahead import Ahead
from oars.adapt.torch.backward.flat_buffers import Packing
from oars.adapt.torch.backward.unpacked import average_on_gpu, mean_one_by_one
from oars.adapt.torch.context import ctx, site
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.recovery.backward_pass import Pass, local_root
from oars.adapt.torch.recovery.lineage import Entry, Irreplaceable
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows import tensor as rows_
from oars.adapt.torch.rows.looks import together
from oars.adapt.torch.rows.tensor import Rows
from oars.adapt.torch.step_log import write_ledger
from oars.engine import Astray
from oars.engine.dissent import PARTED, Whole
from oars.engine.world import RankLost
from oars.exchange.compressed import exchange_by

if TYPE_CHECKING:
    from collections.abc import Callable

_backward = torch.autograd.backward
_grad = torch.autograd.grad
_grad_slot: Any = torch._C.TensorBase.grad
register_behind: Any = torch.Tensor.register_post_accumulate_grad_hook


class Gradients:
    """The leaves of all graphs, who of them got gradients, and their exchange."""

    def __init__(self) -> None:
        self.exchange = exchange_by(ctx.world, ctx.plan.wire)
        self.ahead = Ahead(self.exchange)
        self.serials: dict[int, tuple[int, weakref.ref]] = {}  # id -> (order of first appearance, leaf)
        self.next_serial = 0
        self.touched: list[torch.Tensor] = []
        self.pending: dict[int, torch.Tensor] = {}  # put-off ones
        self.plans: dict[tuple, Packing] = {}
        self.running = 0
        self.begun = 0  # backwards so far
        self.backwards = 0  # since the last optimizer step
        self.pattern: list[int] = []  # how many backwards the last steps had
        self.last_loss: Any = None
        self.passes: list[Pass] = []  # the backwards since the last exchange
        self.watched: Pass | None = None  # the one under way
        self.base: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the gradients there were before them
        self.interrupt = self.signalled = False
        self.passing_over = False  # the next optimizer step is left out
        self.compared = False  # the ranks' weights, at the first exchange

    # -- leaves

    def track(self, leaf: torch.Tensor) -> None:
        """Note this leaf's gradients from now on."""
        known = self.serials.get(id(leaf))
        if known is not None and known[1]() is leaf:
            return
        self.serials[id(leaf)] = (self.next_serial, weakref.ref(leaf))
        self.next_serial += 1
        for trace in ctx.traces:
            trace.new_leaves = True
        wanted = leaf.requires_grad
        if not wanted:
            if not (leaf.is_floating_point() or leaf.is_complex()):
                return
            leaf.requires_grad_(True)  # hooks can only be put on leaves that want gradients; frozen ones may thaw
        with torch._C.DisableTorchFunction():  # while a run is played, this would come back as the script's hook
            register_behind(leaf, self._touch)
        if not wanted:
            leaf.requires_grad_(False)

    def _touch(self, leaf: torch.Tensor) -> None:
        if not _aside or threading.get_ident() not in _aside:
            self.touched.append(leaf)
            if self.ahead.armed:
                self.ahead.arrived(leaf)

    def enter(self, x: torch.Tensor) -> bool:
        """A plain tensor with gradients meets rows: the leaves behind it will have different gradients by rank. Whether
        it was made of rows that were joined."""
        if x.is_leaf:
            self.track(x)
            return False
        stack, seen, joined = [x.grad_fn], set(), False
        while stack:
            node = stack.pop()
            if node is None or node in seen or isinstance(node, collectives.ACROSS):
                joined |= isinstance(node, collectives.JOINED)
                continue  # behind a message between ranks are rows, and what met them was noted then
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self.track(leaf)
            stack.extend(n for n, _ in node.next_functions)
        return joined

    def leaves(self, results: list, inputs: list) -> None:
        """A call on plain own rows: some weights may be new, no parameters but tensors made anew for each step."""
        for leaf in collectives.leaves_behind(results, inputs):
            self.track(leaf)

    def serial(self, leaf: torch.Tensor) -> int:
        """In which order a leaf was first seen, the same on all ranks."""
        return self.serials.get(id(leaf), (0,))[0]

    # -- backward

    def backward(self, tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None,
                 create_graph: bool = False, grad_variables: Any = None, inputs: Any = None) -> None:
        """Replaces ``torch.autograd.backward``."""
        if ctx.plain:  # a backward inside a backward (checkpointing)
            _backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        seeds = [None] * len(roots) if grad_tensors is None else (
            [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors))
        rows = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if isinstance(root, Rows)]
        if any(isinstance(t, Rows) for t in (*roots, *seeds)):
            for i, (root, seed) in enumerate(zip(roots, seeds, strict=True)):
                roots[i], seeds[i] = local_root(root, seed)
        if len(roots) == 1 and roots[0].dim() == 0:
            self.last_loss = roots[0].detach()
        if inputs is not None:
            inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            inputs = [i.local if isinstance(i, Rows) else i for i in inputs]
        rows_.before_backward()
        before, waited_for = grad_hooks.before_backward(), grad_hooks.wait_behind()
        if waited_for and self.pending:
            self.exchange_gradients()  # these were put off before there were hooks
        if not self.passes:
            self.base = {id(p): (p, p.grad.clone()) for p in self._leaves() if p.grad is not None}
        here = Pass(rows, inputs, create_graph)
        ctx.spoilt = here.find_boundaries(roots)  # a graph from before a loss is like a loss now
        self.passes.append(here)
        around, self.begun = ctx.place, self.begun + 1
        ctx.place = f"backward {self.begun}", 0
        if not (before or waited_for or create_graph or inputs or ctx.spoilt or ctx.separate or grad_hooks.in_between()
                or self._more_to_come(self.backwards + 1) or any(each.era != ctx.era for each in self.passes)):
            self.ahead.arm()
        try:
            self._run_backward(here, lambda: _backward(
                roots, None if grad_tensors is None and not any(s is not None for s in seeds) else seeds, retain_graph,
                create_graph, None, inputs))
            self.backwards += 1
            if ctx.spoilt and not self.redo_backwards():
                return
            if before or waited_for or create_graph or not self._more_to_come(self.backwards):
                exchanged = self.exchange_gradients()
                grad_hooks.after_exchange(before)
                if waited_for:
                    by_serial = {s: ref() for s, ref in self.serials.values()}
                    grad_hooks.run_behind([p for s in exchanged if (p := by_serial[s]) is not None], create_graph)
            else:
                self._put_off()
        except Whole as all_:
            self._undo()
            raise all_.error from None
        finally:
            ctx.place = around

    def _run_backward(self, here: Pass, work: Callable[[], Any]) -> None:
        self.watched = here
        try:
            self.run(work)
        except Exception as error:
            if not ctx.spoilt:
                if ctx.separate:
                    raise
                self._undo()
                ctx.world.dissent(error)
            here.broken = f"a backward that did not come to its end ({type(error).__name__}: {error})"
        finally:
            self.watched = None

    def _undo(self) -> None:
        """A backward has failed on some rank: gradients are what they were before it, on all."""
        self.ahead.forsake()
        if "grad" in torch.Tensor.__dict__:
            patching.remove(torch.Tensor, "grad")
        before = {id(p): grad for p, grad in self.base.values()}
        for p in (*self.touched, *self.pending.values()):
            p.grad = before.get(id(p))
        for known in (self.touched, self.pending, self.passes, self.base):
            known.clear()  # type: ignore[attr-defined]

    def _leaves(self) -> list[torch.Tensor]:
        return [p for p in (ref() for _, ref in self.serials.values()) if p is not None]

    def run(self, work: Callable[..., Any]) -> Any:
        plain, ctx.plain = ctx.plain, True
        ctx.going_back = True
        self.running += 1
        try:
            return work()
        finally:
            self.running -= 1
            ctx.plain = plain
            ctx.going_back = self.running > 0

    # -- a rank was lost

    def arrived(self, entry: Entry, place: int, grad: torch.Tensor) -> None:
        """A gradient came to a boundary of the graph (see recovery/lineage.py)."""
        if self.watched is not None:
            self.watched.arrived(entry, place, grad)

    def redo_backwards(self) -> bool:
        """Do this step's backwards again on the ranks that are left, each from what arrived at its boundaries."""
        touched = {id(p): p for p in (*self.touched, *self.pending.values())}
        self.ahead.forsake()
        while True:
            lineage.renew()
            if debug.on:
                debug.say(f"a rank was lost: {len(self.passes)} backwards are done again by ranks {ctx.members}")
            ctx.spoilt = False
            self.touched.clear()
            self.pending.clear()
            if "grad" in torch.Tensor.__dict__:
                patching.remove(torch.Tensor, "grad")
            for p in self._leaves():
                p.grad = None
            for p, grad in self.base.values():
                p.grad = grad.clone()
            try:
                for each in self.passes:
                    roots, seeds = each.anew()
                    if roots:
                        self.run(lambda r=roots, s=seeds, i=each.inputs: _backward(r, s, inputs=i))
                    if ctx.spoilt:
                        raise RankLost
                    each.add_direct(self.touched)
                    each.era = ctx.era
                return True
            except RankLost:
                pass
            except Irreplaceable as reason:
                self._skip_step(touched, reason)
                return False

    def _skip_step(self, touched: dict[int, torch.Tensor], reason: Irreplaceable) -> None:
        """This step cannot be done again: its gradients are nothing, and the next optimizer step is left out."""
        ctx.spoilt = False
        self.touched.clear()
        self.passes.clear()
        self.base.clear()
        for p in touched.values():
            p.grad = torch.zeros_like(p)
        self.passing_over = True
        ctx.record.lost_step(ctx.samples, str(reason))

    def _put_off(self) -> None:
        """Leave the exchange to the step's last backward."""
        self.pending.update((id(p), p) for p in self.touched)
        self.touched.clear()
        if self.pending:
            patching.put(torch.Tensor, "grad", _Watched(self))

    def _more_to_come(self, backwards: int) -> bool:
        pattern = self.pattern
        return len(pattern) == 2 and pattern[0] == pattern[1] > 1 and backwards < pattern[0]

    def exchange_gradients(self) -> list[int]:
        """Exchange what was not yet: gradients of this backward, and any put off before. Returns whose, by serial."""
        began = perf_counter()
        inside = ctx.world.seconds
        while True:
            if self.pending:
                patching.remove(torch.Tensor, "grad")  # back to PyTorch's own slot
                self.touched.extend(self.pending.values())
                self.pending.clear()
            try:
                if any(each.era != ctx.era for each in self.passes):
                    raise RankLost  # since the backwards that were put off
                packing = self._packing(self.touched)
                if ctx.handed and not ctx.record.played:
                    write_ledger()
                exchanged = self._exchange(packing)
                odd = [mean_one_by_one(p.grad) for p in packing.odd()]
                if grad_hooks.wait_behind():  # in the order of the first rank's backward, which is one process's
                    exchanged = list(dict.fromkeys(ctx.world.allgather(self.in_order())[0] + exchanged))
                break
            except RankLost:
                if not self.redo_backwards():
                    return []
        for done in (self.touched, self.passes, self.base, ctx.handed):
            done.clear()  # type: ignore[attr-defined]
        for p, grad in zip(packing.odd(), odd, strict=True):
            p.grad = grad
        if ctx.guard is not None:
            ctx.guard.exchanged()
        ctx.world.seconds = inside + perf_counter() - began
        if self.interrupt:
            self.interrupt = False
            ctx.record.raise_interrupt()  # Ctrl-C reached some rank: all stop at this step
        if self.signalled:
            self.signalled = False
            signals.deliver()
        return exchanged

    def in_order(self) -> list[int]:
        """The serials of touched leaves as backward came by them."""
        return list(dict.fromkeys(self.serials[id(p)][0] for p in self.touched))

    def _packing(self, touched: list[torch.Tensor]) -> Packing:
        key = tuple(map(id, touched))
        packing = self.plans.get(key)
        if packing is None or packing.dead:
            if len(self.plans) > 32:
                self.plans.clear()
            by_serial = {self.serials[id(p)][0]: p for p in touched if id(p) in self.serials}
            packing = self.plans[key] = Packing(dict(sorted(by_serial.items())))
        return packing

    def _exchange(self, packing: Packing, of_all: bool = False) -> list[int]:
        """Returns the serials of the leaves that any rank has touched."""
        exchange, ahead = self.exchange, self.ahead
        looked = ctx.guard.look() if ctx.guard is not None else ()
        # After a death a rank may have been helped over a meeting that another had finished: histories differ then.
        history = ctx.world.history if not ctx.world.era else 0
        early = ahead.close(packing)
        order = 0 if early or of_all else ahead.order(packing, self.in_order())
        header = np.array([packing.digest, packing.nbytes, ctx.record.interrupted | signals.due << 1,
                           self.compared or packing.values(), history, early, order, *looked], np.int64)
        gradients = packing.gradients()
        with torch.no_grad():
            on_gpu = bool(gradients) and gradients[0].is_cuda and ctx.nccl() is not None
            laid_in = early in (0, -1) and exchange.holds(packing.nbytes) and not on_gpu
            if laid_in:
                packing.lay_in(exchange, gradients)
            headers = exchange.agree(header)
            if (headers[:, 4] != header[4]).any():
                raise Astray(f"oars: the ranks went out of step after the last step, before {site()} {PARTED}")
            left = ahead.conclude(headers[:, 5])
            if (headers[:, 0] != packing.digest).any():
                if of_all:
                    raise RuntimeError("oars: the ranks' parameters are not the same ones: the script built its model "
                                       "differently on some ranks")
                return self._exchange_union(packing)
            if len(set(headers[:, 3].tolist()) - {1}) > 1:
                raise Astray("oars: the ranks' weights are not the same before the first step: the script makes them "
                             "in another order on each rank (by a set of modules or tensors? use a list), or draws "
                             "them from numbers without a common seed (seed it)")
            self.compared = True
            if ctx.guard is not None:
                ctx.guard.compare(headers[:, 7:])
            if on_gpu:
                average_on_gpu(gradients, list(packing.held()))
            elif left > 0:
                packing.lay_in(exchange, [])
                packing.take_out(gradients)
            elif packing.nbytes:
                if not exchange.holds(packing.nbytes):
                    exchange.reserve(packing.nbytes)
                if left or not laid_in:
                    packing.lay_in(exchange, gradients)
                    exchange.agree(header)
                exchange.average(packing.spans, packing.shapes, packing.digest)
                packing.take_out(gradients)
            if order and (headers[:, 6] == order).all():
                ahead.learn(packing, self.in_order())
        ctx.sharing.exchanged(packing.nbytes)
        self.interrupt |= bool((headers[:, 2] & 1).any())
        self.signalled |= bool((headers[:, 2] & 2).any())
        if debug.on:
            debug.say(f"exchanged gradients of {len(packing.serials)} tensors, {packing.nbytes} bytes")
        return packing.serials

    def _exchange_union(self, packing: Packing) -> list[int]:
        """Some ranks touched other leaves than others: those without a gradient take part with zeros."""
        serials = sorted({s for part in ctx.world.allgather(packing.serials) for s in part})
        by_serial = {s: ref() for s, ref in self.serials.values()}
        leaves: list[Any] = [by_serial[s] for s in serials]
        for p in leaves:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return self._exchange(Packing(dict(zip(serials, leaves, strict=True))), of_all=True)

    def stepped(self) -> None:
        """An optimizer stepped: learn how many backwards a step has."""
        if self.backwards:
            self.pattern = [*self.pattern[-1:], self.backwards]
            self.backwards = 0

    # -- torch.autograd.grad

    def grad(self, outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
             create_graph: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``torch.autograd.grad``: what it returns is global, as on one process."""
        args = (outputs, inputs, grad_outputs, retain_graph, create_graph, *args)
        if ctx.plain:  # inside a split call (torch.compile at work) or a backward, where a hook may have rows
            return self._of_rows(args, kwargs) if any(isinstance(t, Rows) for t in tree_leaves(args)) else (
                _grad(*args, **kwargs))
        ctx.note("grad")
        return ctx.perform(self._grad_of, None, args, kwargs)

    def _grad_of(self, _: None, args: tuple, kwargs: dict) -> tuple:
        try:
            grads = self._of_rows(args, kwargs)
        except (RankLost, Irreplaceable):
            raise
        except Exception as error:
            raise together(error) from None
        if ctx.spoilt:
            ctx.spoilt = False
            raise RankLost
        return grads

    def _of_rows(self, args: tuple, kwargs: dict) -> tuple:
        outputs, inputs, grad_outputs, *how = args
        roots = [lineage.current(r) for r in ([outputs] if isinstance(outputs, torch.Tensor) else outputs)]
        if ctx.era and Pass([], None, False).find_boundaries([r for r in roots if not isinstance(r, Rows)]):
            raise Irreplaceable("torch.autograd.grad went back through a graph from before the loss of a rank")
        seeds = [None] * len(roots) if grad_outputs is None else (
            [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs))
        for i, (root, seed) in enumerate(zip(roots, seeds, strict=True)):
            roots[i], seeds[i] = local_root(root, seed) if isinstance(root, Rows) else (root, seed)
        wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        local = [w.local if isinstance(w, Rows) else w for w in wanted]
        grads = self.run(lambda: _grad(roots, local, seeds, *how, **kwargs))
        return tuple(_global_grad(w, g) for w, g in zip(wanted, grads, strict=True))


def _global_grad(of: torch.Tensor, grad: torch.Tensor | None) -> Any:
    if grad is None:
        return None
    if isinstance(of, Rows):
        return Rows(grad / ctx.size, of.offsets, of.dim_)
    return grad_hooks.seen_by(of, collectives.Mean.apply(grad))


class _Watched:
    """``Tensor.grad`` while exchanges are put off: whoever looks gets them done first."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def __get__(self, tensor: torch.Tensor | None, owner: type | None = None) -> Any:
        if tensor is None:
            return self
        if self.gradients.pending and not self.gradients.running:
            self.gradients.exchange_gradients()
        return _grad_slot.__get__(tensor)

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        _grad_slot.__set__(tensor, value)


_aside: set[int] = set()  # threads in a backward that is not the training's


def backward_aside(*args: Any, **kwargs: Any) -> None:
    """A backward where ranks are not in step: its gradients are nobody else's."""
    here = threading.get_ident()
    inside = here in _aside
    _aside.add(here)
    try:
        _backward(*args, **kwargs)
    finally:
        if not inside:
            _aside.discard(here)


def parameter_new(inner: Callable[..., Any]) -> Any:
    """Around ``nn.Parameter.__new__``: every parameter is watched from its making."""
    def new(cls: type[nn.Parameter], *args: Any, **kwargs: Any) -> Any:
        made = inner(cls, *args, **kwargs)
        if type(made) is nn.Parameter and not ctx.trying:
            ctx.gradients.track(made)
        return made

    return new
