"""Gradients on JAX: what ``jax.grad`` and ``jax.value_and_grad`` give is, on every rank, that of the global loss."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax

from oars.adapt.jax import collectives as wire
from oars.adapt.meet import inside, meet


def exchanged(grads: Any) -> Any:
    """Gradients averaged over ranks, once a model has run on own rows."""
    if not meet.active or meet.inside or meet.separate or not meet.calls:
        return grads
    leaves, tree = jax.tree.flatten(grads)
    if any(map(wire.mapped, leaves)):
        return grads
    at = [i for i, g in enumerate(leaves) if hasattr(g, "dtype") and jax.numpy.issubdtype(g.dtype, jax.numpy.inexact)]
    for i, mean in zip(at, wire.means([leaves[i] for i in at]), strict=True):
        leaves[i] = mean
    return jax.tree.unflatten(tree, leaves)


def install() -> None:
    """Patch what JAX differentiates by. Gradients are pure: after a loss they are computed again."""
    plain_grad, plain_both, plain_vjp = jax.grad, jax.value_and_grad, jax.vjp
    signature = inspect.signature(plain_grad)

    @functools.wraps(plain_grad)
    def grad(*args: Any, **kwargs: Any) -> Any:
        inner = plain_grad(*args, **kwargs)
        has_aux = signature.bind(*args, **kwargs).arguments.get("has_aux", False)

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            def work() -> Any:
                out = inner(*args, **kwargs)
                return (exchanged(out[0]), out[1]) if has_aux else exchanged(out)

            return wire.until_done(work)

        return call

    @functools.wraps(plain_both)
    def value_and_grad(fun: Any, *args: Any, **kwargs: Any) -> Any:
        inner = plain_both(fun, *args, **kwargs)

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            def work() -> Any:
                value, grads = inner(*args, **kwargs)
                return value, exchanged(grads)

            return wire.until_done(work)

        return call

    @functools.wraps(plain_vjp)
    def vjp(*args: Any, **kwargs: Any) -> Any:
        value, back, *aux = plain_vjp(*args, **kwargs)
        return (value, lambda *g: exchanged(back(*g)), *aux)

    jax.grad, jax.value_and_grad, jax.vjp = grad, value_and_grad, vjp
    for name in ("checkpoint", "remat", "jacrev", "jacobian", "linearize"):
        setattr(jax, name, _of_whole_models(name, getattr(jax, name)))


def _of_whole_models(name: str, plain: Any) -> Any:
    """``plain(function, ...)``, which runs again, or many times over, what was traced: no message can be in it."""
    @functools.wraps(plain)
    def transformed(function: Any, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(function)
        def whole(*args: Any, **kwargs: Any) -> Any:
            if meet.active and not meet.inside:
                meet.record.notice(f"in jax.{name} models run whole on every rank, no faster")
            with inside():
                return function(*args, **kwargs)

        return plain(whole, *args, **kwargs)

    return transformed
