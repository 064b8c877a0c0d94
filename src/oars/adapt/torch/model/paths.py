"""Which way a split call went: the operations that were done in it.

Whatever switch a script throws (an entry of a list, a file that is there, a function that is replaced), what comes of
it is seen in the operations. A way that was not compared with rows is no split call: it is made again, and traced. With
gradients the ways are read from autograd's graph, after the call (about 2 µs for each operation); without them, they
are noted one by one (about 3 µs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

MOST = 32  # ways of one model; with more, it runs on rows


class _Noted(TorchFunctionMode):
    """Notes operations."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attributes are read by a wrapper that is made for each read: its address may be any.
        self.done.append(id(func.__self__ if getattr(func, "__name__", "") in ("__get__", "__set__") else func))
        return func(*args, **(kwargs or {}))


def blind(module: nn.Module) -> bool:
    """Whether operations cannot be noted: compiled code is opaque, and PyTorch's attention has another code then."""
    return any(isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer, torch.jit.ScriptModule))
               or hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in module.modules())


def follow(call: Callable[[], Any], local: list, blind_: bool) -> tuple[Any, int | None]:
    """What a call on these leaves gives, and which way it went: None if that cannot be seen."""
    if torch.is_grad_enabled():
        out = call()
        return out, _in_graph(tree_leaves(out), local)
    if blind_:
        return call(), None
    with _Noted() as noted:
        out = call()
    return out, hash(tuple(noted.done))


def _in_graph(results: list, local: list) -> int | None:
    given = {x.grad_fn for x in local if isinstance(x, torch.Tensor) and x.grad_fn is not None}
    todo = [x.grad_fn for x in reversed(results) if isinstance(x, torch.Tensor)]
    seen, way = set(given), []
    while todo:
        node = todo.pop()
        name = None if node is None or node in given else type(node).__name__
        if name is not None and name.startswith("CompiledFunction"):
            return None
        way.append(None if name == "AccumulateGrad" else name)
        if node is not None and node not in seen:
            seen.add(node)
            todo += [further for further, _ in node.next_functions]
    return hash(tuple(way))
