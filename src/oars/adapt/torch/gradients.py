"""Gradients: when ``backward()`` returns, every rank holds those of the script's loss over the global batch.

A hook on every leaf notes that it got a gradient; when backward is over, the noted ones are averaged over ranks in one
fused exchange. With gradient accumulation the exchange is put off to the last backward of a step once the script's
pattern is known; whoever reads ``.grad`` before gets it exchanged first.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from oars.adapt.torch import hooks, wire
from oars.adapt.torch import rows as rows_
from oars.adapt.torch.buckets import Plan
from oars.adapt.torch.context import ctx, own
from oars.adapt.torch.rows import Rows
from oars.exchange.allreduce import Exchange

_backward = torch.autograd.backward
_grad = torch.autograd.grad
_grad_slot: Any = torch._C.TensorBase.grad


class Gradients:
    """The leaves of all graphs, who of them got gradients, and their exchange."""

    def __init__(self) -> None:
        self.exchange = Exchange(ctx.world)
        self.serials: dict[int, tuple[int, weakref.ref]] = {}  # id -> (order of first appearance, leaf)
        self.next_serial = 0
        self.touched: list[torch.Tensor] = []
        self.pending: dict[int, torch.Tensor] = {}  # put-off ones
        self.plans: dict[tuple, Plan] = {}
        self.running = 0
        self.backwards = 0  # since the last optimizer step
        self.pattern: list[int] = []  # how many backwards the last steps had
        self.last_loss: Any = None

    # -- leaves

    def track(self, leaf: torch.Tensor) -> None:
        """Note this leaf's gradients from now on."""
        known = self.serials.get(id(leaf))
        if known is not None and known[1]() is leaf:
            return
        self.serials[id(leaf)] = (self.next_serial, weakref.ref(leaf))
        self.next_serial += 1
        wanted = leaf.requires_grad
        if not wanted:
            if not (leaf.is_floating_point() or leaf.is_complex()):
                return
            leaf.requires_grad_(True)  # hooks can only be put on leaves that want gradients; frozen ones may thaw
        leaf.register_post_accumulate_grad_hook(self.touched.append)
        if not wanted:
            leaf.requires_grad_(False)

    def enter(self, x: torch.Tensor) -> None:
        """A plain tensor with gradients meets rows: the leaves behind it will have different gradients by rank."""
        if x.is_leaf:
            self.track(x)
            return
        stack, seen = [x.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen or isinstance(node, wire.ACROSS):
                continue  # behind a message between ranks are rows, and what met them was noted then
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self.track(leaf)
            stack.extend(n for n, _ in node.next_functions)

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
        if any(isinstance(t, Rows) for t in (*roots, *seeds)):
            for i, (root, seed) in enumerate(zip(roots, seeds, strict=True)):
                roots[i], seeds[i] = _local_root(root, seed)
        if len(roots) == 1 and roots[0].dim() == 0:
            self.last_loss = roots[0].detach()
        if inputs is not None:
            inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            inputs = [i.local if isinstance(i, Rows) else i for i in inputs]
        before = hooks.before_backward()
        self._run(lambda: _backward(roots, None if grad_tensors is None and not any(s is not None for s in seeds)
                                    else seeds, retain_graph, create_graph, None, inputs))
        self.backwards += 1
        if before or create_graph or not self._more_to_come():
            self.settle()
            hooks.after_exchange(before)
        else:
            self._put_off()

    def _run(self, work: Any) -> Any:
        plain, ctx.plain = ctx.plain, True
        self.running += 1
        try:
            return work()
        finally:
            self.running -= 1
            ctx.plain = plain

    def _put_off(self) -> None:
        """Leave the exchange to the step's last backward."""
        self.pending.update((id(p), p) for p in self.touched)
        self.touched.clear()
        if self.pending:
            torch.Tensor.grad = _Watched(self)  # type: ignore[assignment]

    def _more_to_come(self) -> bool:
        pattern = self.pattern
        return len(pattern) == 2 and pattern[0] == pattern[1] > 1 and self.backwards < pattern[0]

    def settle(self) -> None:
        """Exchange everything outstanding now."""
        if self.pending:
            del torch.Tensor.grad  # back to PyTorch's own slot
            self.touched.extend(self.pending.values())
            self.pending.clear()
        began = time.perf_counter()
        inside = ctx.world.seconds
        plan = self._plan(self.touched)
        self.touched.clear()
        self._exchange(plan)
        for p in plan.odd():
            p.grad = _mean_one_by_one(p.grad)
        ctx.world.seconds = inside + time.perf_counter() - began

    def _plan(self, touched: list[torch.Tensor]) -> Plan:
        key = tuple(map(id, touched))
        plan = self.plans.get(key)
        if plan is None or plan.dead:
            if len(self.plans) > 32:
                self.plans.clear()
            by_serial = {self.serials[id(p)][0]: p for p in touched}
            plan = self.plans[key] = Plan(dict(sorted(by_serial.items())))
        return plan

    def _exchange(self, plan: Plan, of_all: bool = False) -> None:
        exchange = self.exchange
        header = np.array([plan.digest, plan.nbytes, ctx.record.interrupted], np.int64)
        gradients = plan.gradients()
        with torch.no_grad():
            on_gpu = bool(gradients) and gradients[0].is_cuda and ctx.nccl() is not None
            early = plan.nbytes <= exchange.capacity
            if early and not on_gpu:
                plan.lay_in(exchange, gradients)
            headers = exchange.agree(header)
            if (headers[:, 0] != plan.digest).any():
                if of_all:
                    raise RuntimeError("oars: the ranks' parameters are not the same ones: the script built its model "
                                       "differently on some ranks")
                self._exchange_union(plan)
                return
            if on_gpu:
                _average_on_gpu(gradients)
            elif plan.nbytes:
                if not early:
                    exchange.reserve(plan.nbytes)
                    plan.lay_in(exchange, gradients)
                    exchange.agree(header)
                exchange.average(plan.spans)
                plan.take_out(gradients)
        if headers[:, 2].any():
            ctx.record.raise_interrupt()  # Ctrl-C reached some rank: all stop at this step

    def _exchange_union(self, plan: Plan) -> None:
        """Some ranks touched other leaves than others: those without a gradient take part with zeros."""
        serials = sorted({s for part in ctx.world.allgather(plan.serials) for s in part})
        by_serial = {s: ref() for s, ref in self.serials.values()}
        leaves: list[Any] = [by_serial[s] for s in serials]
        for p in leaves:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self._exchange(Plan(dict(zip(serials, leaves, strict=True))), of_all=True)

    def stepped(self) -> None:
        """An optimizer stepped: learn how many backwards a step has."""
        if self.backwards:
            self.pattern = [*self.pattern[-1:], self.backwards]
            self.backwards = 0

    # -- torch.autograd.grad

    def grad(self, outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
             create_graph: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``torch.autograd.grad``: what it returns is global, as on one process."""
        if ctx.plain:  # inside a split call (torch.compile at work) or a backward
            return _grad(outputs, inputs, grad_outputs, retain_graph, create_graph, *args, **kwargs)
        ctx.note("grad")
        roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        seeds = [None] * len(roots) if grad_outputs is None else (
            [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs))
        for i, (root, seed) in enumerate(zip(roots, seeds, strict=True)):
            roots[i], seeds[i] = _local_root(root, seed) if isinstance(root, Rows) else (root, seed)
        wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        local = [w.local if isinstance(w, Rows) else w for w in wanted]
        grads = self._run(lambda: _grad(roots, local, seeds, retain_graph, create_graph, *args, **kwargs))
        return tuple(_global_grad(w, g) for w, g in zip(wanted, grads, strict=True))


def _local_root(root: Any, seed: Any) -> tuple[Any, Any]:
    """Rows to go back from: a rank's rows carry N times their gradient (see wire.py)."""
    if not isinstance(root, Rows):
        return root, rows_.whole(seed, "backward") if isinstance(seed, Rows) else seed
    if seed is None:
        seed = torch.ones_like(root.local)
        if root.offsets[-1] != 1 or root.local.numel() > 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return root.local, seed * ctx.size
    if isinstance(seed, Rows):
        seed = seed.local
    elif seed.dim() == root.local.dim() and seed.shape[root.dim_] == root.offsets[-1]:
        seed = seed.narrow(root.dim_, *own(root.offsets))
    return root.local, seed * ctx.size


def _global_grad(of: Any, grad: Any) -> Any:
    if grad is None:
        return None
    if isinstance(of, Rows):
        return Rows(grad / ctx.size, of.offsets, of.dim_)
    return wire.Mean.apply(grad)


def _average_on_gpu(gradients: list[torch.Tensor]) -> None:
    """One flat message per dtype, over NCCL."""
    for dtype in {g.dtype for g in gradients}:
        some = [g for g in gradients if g.dtype == dtype]
        flat = ctx.nccl().allreduce(torch.cat([g.reshape(-1) for g in some])).div_(ctx.size)
        torch._foreach_copy_(some, [f.view_as(g) for f, g in zip(flat.split([g.numel() for g in some]), some,
                                                                strict=True)])


def _mean_one_by_one(grad: Any) -> torch.Tensor:
    """Gradients that do not fit a flat buffer: sparse ones, and those that have a graph of their own."""
    if grad.layout is torch.strided:
        return wire.Mean.apply(grad)
    grad = grad.coalesce()
    parts = ctx.world.allgather((grad.indices().cpu().numpy(), grad.values().detach().cpu().float().numpy()))
    indices = torch.from_numpy(np.concatenate([i for i, _ in parts], 1))
    values = torch.from_numpy(np.concatenate([v for _, v in parts])).to(grad.dtype) / ctx.size
    return torch.sparse_coo_tensor(indices, values, grad.shape, device=grad.device, check_invariants=False).coalesce()


class _Watched:
    """``Tensor.grad`` while exchanges are put off: whoever looks gets them done first."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None:
            return self
        if self.gradients.pending and not self.gradients.running:
            self.gradients.settle()
        return _grad_slot.__get__(tensor)

    def __set__(self, tensor: Any, value: Any) -> None:
        _grad_slot.__set__(tensor, value)


def install() -> Gradients:
    """Patch backward and grad, and watch every parameter from its making."""
    gradients = Gradients()
    ctx.record.polls = True
    rows_.enter = gradients.enter
    torch.autograd.backward = gradients.backward  # type: ignore[assignment]
    torch.autograd.grad = gradients.grad  # type: ignore[assignment]
    new = nn.Parameter.__new__

    def parameter(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = new(cls, *args, **kwargs)
        if type(made) is nn.Parameter:
            gradients.track(made)
        return made

    nn.Parameter.__new__ = staticmethod(parameter)  # type: ignore[assignment]
    return gradients
