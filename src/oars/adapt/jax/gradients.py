"""Gradients on JAX: what ``jax.grad`` and ``jax.value_and_grad`` give is, on every rank, that of the global loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from oars.adapt.jax import collectives as wire
from oars.adapt.meet import inside, meet


def exchanged(grads: Any) -> Any:
    """Gradients averaged over ranks, once a model has run on own rows."""
    if not meet.keras_on_jax or meet.inside or meet.separate or not meet.calls:
        return grads
    leaves, tree = jax.tree.flatten(grads)
    if any(map(wire.mapped, leaves)):
        return grads
    at = [i for i, g in enumerate(leaves) if hasattr(g, "dtype") and jax.numpy.issubdtype(g.dtype, jax.numpy.inexact)]
    for i, mean in zip(at, wire.means([leaves[i] for i in at]), strict=True):
        leaves[i] = mean
    return jax.tree.unflatten(tree, leaves)


def grad(inner: Callable[..., Any]) -> Any:
    """Around ``jax.grad``. Gradients are pure: after a loss they are computed again."""
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def grad(*args: object, **kwargs: object) -> Any:
        gives = inner(*args, **kwargs)
        has_aux = signature.bind(*args, **kwargs).arguments.get("has_aux", False)

        @functools.wraps(gives)
        def call(*args: object, **kwargs: object) -> Any:
            def work() -> Any:
                out = gives(*args, **kwargs)
                return (exchanged(out[0]), out[1]) if has_aux else exchanged(out)

            return wire.until_done(work)

        return call

    return grad


def value_and_grad(inner: Callable[..., Any]) -> Any:
    """Around ``jax.value_and_grad``."""
    @functools.wraps(inner)
    def value_and_grad(fun: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        gives = inner(fun, *args, **kwargs)

        @functools.wraps(gives)
        def call(*args: object, **kwargs: object) -> Any:
            def work() -> Any:
                value, grads = gives(*args, **kwargs)
                return value, exchanged(grads)

            return wire.until_done(work)

        return call

    return value_and_grad


def vjp(inner: Callable[..., Any]) -> Any:
    """Around ``jax.vjp``."""
    @functools.wraps(inner)
    def vjp(*args: object, **kwargs: object) -> Any:
        value, back, *aux = inner(*args, **kwargs)
        return (value, lambda *g: exchanged(back(*g)), *aux)

    return vjp


def of_whole_models(plain: Callable[..., Any]) -> Any:
    """``plain(function, ...)``, which runs again, or many times over, what was traced: no message can be in it."""
    @functools.wraps(plain)
    def transformed(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        @functools.wraps(function)
        def whole(*args: object, **kwargs: object) -> Any:
            if meet.keras_on_jax and not meet.inside:
                meet.record.notice(f"models in jax.{plain.__name__} run replicated on every rank (correct, not faster)",
                                   f"call the model outside of jax.{plain.__name__}", "model")
            with inside():
                return function(*args, **kwargs)

        return plain(whole, *args, **kwargs)

    return transformed
