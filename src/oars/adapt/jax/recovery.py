"""Compiled functions on JAX: one in which a rank was lost runs to its end on zeros, and is then done again.

For that its arguments must still be there, so buffers are not donated. Its result is waited for: else its messages
would come between those of what the script does next, in another order on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from oars.adapt.jax import collectives as wire
from oars.adapt.meet import meet

_jit = jax.jit


class Compiled:
    """What ``jax.jit`` gives."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        functools.update_wrapper(self, function)
        for name in ("donate_argnums", "donate_argnames"):
            options.pop(name, None)
        self._compiled = _jit(function, **options)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if (not meet.keras_on_jax or meet.inside
                or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))):
            return self._compiled(*args, **kwargs)
        return wire.until_done(lambda: self._waited_for(args, kwargs))

    def _waited_for(self, args: tuple, kwargs: dict) -> Any:
        result = self._compiled(*args, **kwargs)
        return jax.block_until_ready(result) if meet.calls else result

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def jit(inner: Callable[..., Any]) -> Any:
    """In place of ``jax.jit``, for what is compiled from now on."""
    @functools.wraps(inner)
    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(jit, **options)
        return Compiled(function, **options)

    return jit
