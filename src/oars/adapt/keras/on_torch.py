"""Keras on PyTorch: ``adapt/torch`` does what there is to do, once it knows Keras's optimizers and shape checks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import torch


def apply(inner: Callable[..., Any]) -> Any:
    """Around ``Optimizer.apply``: tell where an optimizer changes weights."""
    from oars.adapt.torch.context import ctx
    from oars.adapt.torch.recovery import lineage

    known: weakref.WeakSet = weakref.WeakSet()

    @functools.wraps(inner)
    def apply(self: keras.Optimizer, grads: Sequence[torch.Tensor],
              trainable_variables: Sequence[keras.Variable] | None = None) -> Any:
        if self not in known:
            known.add(self)
            for v in trainable_variables or self._trainable_variables:
                ctx.optimizer_of[v.value] = ctx.number(self)
        lineage.before_step(ctx.number(self))
        out = inner(self, grads, trainable_variables)
        lineage.stepped(ctx.number(self))
        return out

    return apply


def checked(inner: Callable[..., Any]) -> Any:
    """Around ``assert_input_compatibility``: a layer that checks the shape of what it is given does not depend on the
    batch's size by that, unless it asks for a certain one. So a model of such layers may run on own rows."""
    from keras import tree

    from oars.adapt.torch.context import ctx

    @functools.wraps(inner)
    def check(specs: Any, inputs: Any, layer_name: str) -> None:
        traces = ctx.traces
        if traces and not any(spec is not None and _of_a_size(spec) for spec in tree.flatten(specs)):
            ctx.traces = []
        try:
            inner(specs, inputs, layer_name)
        finally:
            ctx.traces = traces

    return check


def _of_a_size(spec: keras.InputSpec) -> bool:
    return bool(spec.shape and spec.shape[0] is not None) or 0 in (spec.axes or ())
