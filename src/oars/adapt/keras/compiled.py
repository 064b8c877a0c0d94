"""Compiled functions on JAX: one in which a rank was lost runs to its end on zeros, and is then done again.

For that its arguments must still be there, so buffers are not donated. Its result is waited for: else its messages
would come between those of what the script does next, in another order on every rank.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from oars.adapt.keras import gradients
from oars.adapt.keras import wire_jax as wire
from oars.adapt.meet import meet

_jit = jax.jit


class Compiled:
    """What ``jax.jit`` gives. A rank's rows are part of the compiled code: after a loss it is compiled anew."""

    def __init__(self, function: Any, **options: Any) -> None:
        functools.update_wrapper(self, function)
        for name in ("donate_argnums", "donate_argnames"):
            options.pop(name, None)
        self._function, self._options = function, options
        self._make()

    def _make(self) -> None:
        function = self._function

        @functools.wraps(function)
        def anew(*args: Any, **kwargs: Any) -> Any:  # JAX remembers what it has compiled by the function
            return function(*args, **kwargs)

        self._compiled, self._era = _jit(anew, **self._options), meet.era

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (not gradients.active or meet.inside
                or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))):
            return self._current()(*args, **kwargs)
        meet.begin()
        while True:
            result = self._current()(*args, **kwargs)
            if not meet.calls:
                return result
            jax.block_until_ready(result)
            if not meet.lost:
                return result
            wire.renew()

    def _current(self) -> Any:
        if self._era != meet.era:
            self._make()
        return self._compiled

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def install() -> None:
    """Patch jax.jit, for what is compiled from now on."""
    @functools.wraps(_jit)
    def jit(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(jit, **options)
        return Compiled(function, **options)

    jax.jit = jit
