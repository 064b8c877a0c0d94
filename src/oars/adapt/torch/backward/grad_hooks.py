"""Tensor hooks that the script registers: they see global gradients, as on one process.

On a leaf, PyTorch would run a hook with this rank's part before it is accumulated. Here it runs when the exchange is
done, on what this backward added (clamping in a hook is a common way to clip). On a result in between it runs in
backward, on the mean over ranks for plain tensors and on own rows' true gradient for rows. So is what ``retain_grad``
keeps. Hooks behind the accumulation (an optimizer's step in backward) run behind the exchange, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from oars.adapt.torch.context import ctx, mine
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows.tensor import RULES, Rows

if TYPE_CHECKING:
    from collections.abc import Callable

_register_hook: Any = torch.Tensor.register_hook
_retain_grad: Any = torch.Tensor.retain_grad
_register_behind: Any = torch.Tensor.register_post_accumulate_grad_hook
_on_leaf: dict[int, tuple[torch.Tensor, list]] = {}
_behind: Any = WeakTensorKeyDictionary()  # leaf -> the hooks that are called when it has its gradient


class _Handle:
    """What ``register_hook`` returns."""

    def __init__(self, hooks: list, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hooks, self._hook = hooks, hook
        hooks.append(hook)

    def remove(self) -> None:
        """Take the hook away again."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Behind(_Handle):
    """What ``register_post_accumulate_grad_hook`` returns. These are counted: whether any wait must not depend on when
    a rank's garbage collector finds leaves that are gone."""

    waiting = 0

    def __init__(self, hooks: list, hook: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(hooks, hook)
        _Behind.waiting += 1

    def remove(self) -> None:
        """Take the hook away again."""
        if self._hook in self._hooks:
            super().remove()
            _Behind.waiting -= 1


class _InBetween:
    """Whether the script has ever put a hook on a result: it may do anything to gradients, in backward."""

    there = False


def in_between() -> bool:
    """See ``_InBetween``."""
    return _InBetween.there


def register_hook(self: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
    """Replaces ``Tensor.register_hook`` for plain tensors."""
    if isinstance(self, Rows):
        return _on_rows(_register_hook, (self, hook), {})
    _InBetween.there |= not self.is_leaf
    if ctx.plain or not self.requires_grad:
        return _register_hook(self, hook)
    ctx.note("hooks")
    if self.is_leaf:
        return _Handle(_on_leaf.setdefault(id(self), (self, []))[1], hook)
    return _straight(_register_hook, self, lambda grad: hook(collectives.Mean.apply(grad)))


def _straight(method: Callable[..., Any], *args: Any) -> Any:
    """``method`` of a plain tensor. Where a call is traced PyTorch would come back to what is patched here."""
    before, ctx.plain = ctx.plain, True
    try:
        return method(*args)
    finally:
        ctx.plain = before


def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
    """Replaces ``Tensor.register_post_accumulate_grad_hook``: what is accumulated in backward is the rank's own."""
    if isinstance(self, Rows) or ctx.plain or not (self.requires_grad and self.is_leaf):
        return _register_behind(self, hook)
    ctx.note("hooks")
    ctx.gradients.enter(self)  # it will be among the leaves that got gradients
    return _Behind(_behind.setdefault(self, []), hook)


def retain_grad(self: torch.Tensor) -> None:
    """Replaces ``Tensor.retain_grad``: of a plain result, a rank would keep its own part."""
    if isinstance(self, Rows):
        self = self.local
    elif not (ctx.plain or self.is_leaf or self.retains_grad):
        ctx.note("hooks")
        _straight(_register_hook, self, collectives.Mean.apply)
    _straight(_retain_grad, self)


def _on_rows(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    x, hook = args
    _InBetween.there = True
    ctx.note("hooks")

    def local(grad: torch.Tensor) -> Any:
        out = hook(Rows(grad / ctx.size, x.offsets, x.dim_))
        if out is None:
            return None
        return (out.local if isinstance(out, Rows) else mine(out, x.offsets, x.dim_)) * ctx.size

    return _straight(_register_hook, x.local, local)


def before_backward() -> dict[int, Any]:
    """What hooked leaves hold now, to know afterwards what was added."""
    return {key: None if p.grad is None else p.grad.clone() for key, (p, hooks) in _on_leaf.items() if hooks}


def after_exchange(before: dict[int, Any]) -> None:
    """Run leaf hooks on what this backward added."""
    for key, old in before.items():
        leaf, hooks = _on_leaf[key]
        if leaf.grad is None or (old is not None and torch.equal(leaf.grad, old)):
            continue
        with torch.no_grad():
            added = leaf.grad.clone() if old is None else leaf.grad - old
            for hook in list(hooks):
                changed = hook(added)
                added = added if changed is None else changed
            leaf.grad.copy_(added if old is None else old + added)


def seen_by(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """What a leaf's hooks make of a gradient that is handed out, not accumulated."""
    for hook in list(_on_leaf.get(id(leaf), (leaf, ()))[1]):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def wait_behind() -> bool:
    """Whether any hooks wait for the exchange."""
    return _Behind.waiting > 0


def run_behind(leaves: list[Any], create_graph: bool) -> None:
    """Run the hooks of leaves that have their gradients, now the global ones."""
    with torch.set_grad_enabled(create_graph):
        for leaf in leaves:
            for hook in list(_behind.get(leaf, ())):
                hook(leaf)


RULES["register_hook"] = _on_rows
