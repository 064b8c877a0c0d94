"""JAX arrays between ranks, eager and inside ``jax.jit``, with gradients of any order.

In compiled code a message is an ordered callback. It cannot be left by an exception, so after a loss callbacks give
zeros until the step has run to its end. Shapes are static, a rank's rows too: after a loss all is traced anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from oars.adapt.meet import end, meet
from oars.engine.world import RankLost

if TYPE_CHECKING:
    import keras

_traced = 0  # the era in which JAX has traced what it remembers
_again = False  # in work that is done again after a loss


def renew() -> None:
    """After a loss: ranks are counted anew."""
    meet.renew()


def until_done(work: Callable[[], Any]) -> Any:
    """``work()``, which must be pure: after a loss it is done again."""
    global _again, _traced
    before, _again = _again, True
    meet.begin()
    try:
        while True:
            if _traced != meet.era:  # a rank's rows are in all that was traced, loops and branches by themselves too
                jax.clear_caches()
                _traced = meet.era
            try:
                result = work()
                if not meet.lost:
                    return result
            except RankLost:
                pass
            renew()
    finally:
        _again = before


def _host(message: Callable[..., Any], like: jax.ShapeDtypeStruct, x: jax.Array) -> Any:
    if not isinstance(x, jax.core.Tracer):
        return jnp.asarray(message(np.asarray(x)))

    def say(array: jax.Array) -> np.ndarray:
        result = meet.quiet(message, np.asarray(array))
        if result is None and not _again:
            end("a rank was lost in a loop or a branch of jax.lax outside of jax.jit, which cannot be done again: put "
                "the step into jax.jit")
        return np.zeros(like.shape, like.dtype) if result is None else np.asarray(result, like.dtype)

    return io_callback(say, like, x, ordered=True)


def _wide(x: jax.Array) -> Any:
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


@jax.custom_vjp
def total(x: jax.Array) -> Any:
    """Summed over ranks; its gradient is the same."""
    wide = _wide(x)
    return _host(meet.total, jax.ShapeDtypeStruct(wide.shape, wide.dtype), wide).astype(x.dtype)


total.defvjp(lambda x: (total(x), None), lambda _, g: (total(g),))


def every(line: jax.Array) -> Any:
    """Every rank's line (a small array of one shape), stacked; its gradient sums over ranks and keeps its own."""
    return total(jnp.zeros((meet.size, *line.shape), line.dtype).at[meet.rank].set(line))


@jax.custom_vjp
def _mean(flat: jax.Array) -> Any:
    return _host(meet.gradients, jax.ShapeDtypeStruct(flat.shape, flat.dtype), flat)


_mean.defvjp(lambda x: (_mean(x), None), lambda _, g: (_mean(g),))


def means(tensors: list[Any]) -> list[Any]:
    """Each averaged over ranks, all in one message for each precision; differentiable. (A gradient that is coded, as
    ``--wire`` says, is one that nobody differentiates.)"""
    results = list(tensors)
    shapes = [tuple(t.shape) for t in tensors]
    weights = not any(hasattr(t, "primal") for t in tensors) and meet.are_weights(shapes)
    for wide in (jnp.float32, jnp.float64):
        at = [i for i, t in enumerate(tensors) if (t.dtype == jnp.float64) == (wide == jnp.float64)]
        if not at:
            continue
        coded = meet.coded([shapes[i] for i in at], wide) if weights else None
        flat = jnp.concatenate([tensors[i].astype(wide).reshape(-1) for i in at])
        mean = _mean(flat) if coded is None else _host(
            functools.partial(meet.gradients, coded=coded), jax.ShapeDtypeStruct(flat.shape, flat.dtype), flat)
        ends = np.cumsum([tensors[i].size for i in at])[:-1].tolist()
        for i, part in zip(at, jnp.split(mean, ends), strict=True):
            results[i] = part.reshape(tensors[i].shape).astype(tensors[i].dtype)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _joined(x: jax.Array, share: Share) -> Any:
    like = jax.ShapeDtypeStruct((share.rows, *x.shape[1:]), x.dtype)

    def message(rows: np.ndarray) -> np.ndarray:
        meet.current(share.era)
        return meet.gather(rows, share.rows)

    return _host(message, like, x)


def _joined_back(share: Share, _: None, g: jax.Array) -> Any:
    meet.current(share.era)
    return (share.cut(total(g)) * jnp.asarray(share.real, g.dtype),)


class Share:
    """This rank's rows of a global batch."""

    def __init__(self, x: jax.Array) -> None:
        self.rows, self.era = int(x.shape[0]), meet.era
        self.first, self.count = meet.computed(self.rows)
        self.real = float(meet.own(self.rows)[1] > 0)  # 0 where this rank has none and computes on a stand-in

    def cut(self, x: jax.Array) -> Any:
        """Own rows of ``x``."""
        return x[self.first : self.first + self.count]

    def enter(self, x: jax.Array) -> Any:
        """Own rows of what a model is given; its gradient is the true one, of all rows, on every rank."""
        return self.cut(x) if meet.separate or not jnp.issubdtype(x.dtype, jnp.inexact) else _own(x, self)

    def gather(self, rows: jax.Array) -> Any:
        """All ranks' rows, joined; its gradient sums over ranks and keeps own rows."""
        if meet.separate:
            return repeated(rows)
        if not jnp.issubdtype(rows.dtype, jnp.inexact):
            rows = jax.lax.stop_gradient(rows)
        return _joined(rows, self)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _own(x: jax.Array, share: Share) -> Any:
    return share.cut(x)


_own.defvjp(lambda x, share: (_own(x, share), None), lambda share, _, g: (share.gather(g) / meet.size,))
_joined.defvjp(lambda x, share: (_joined(x, share), None), _joined_back)


def repeated(rows: jax.Array) -> Any:
    """Own rows as often as there are ranks: what a rank that is on its own takes for all ranks' rows."""
    return jnp.concatenate([rows] * meet.size)


def now(args: object, kwargs: object) -> bool:
    """Whether what is called runs now, and is not traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))


def rows_of(x: object) -> Any:
    """How many rows ``x`` has, or None."""
    return int(x.shape[0]) if isinstance(x, jax.Array) and x.ndim and not mapped(x) else None


def mapped(x: Any) -> bool:
    """Whether ``jax.vmap`` maps over ``x``, or ``jax.jvp`` goes forward: then nothing can be sent, nothing is cut."""
    while hasattr(x, "primal"):  # a gradient within; before JAX 0.7 one on the way back is a JVPTracer too
        if type(x).__name__ == "JVPTracer" and type(x.tangent).__name__ != "JaxprTracer":
            return True
        x = x.primal
    return type(x).__name__ == "BatchTracer"


def constant(x: object) -> Any:
    """An array as a tensor; anything else as it is."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) and x.dtype.kind in "fiub" else x


def in_graph(tree: object) -> bool:
    """Shapes are always known."""
    return False


def kept(model: keras.Model) -> list[tuple[Any, Any]]:
    """What a call may change: to be put back when it is done again. (In ``fit`` Keras keeps the values elsewhere.)"""
    there = [v for v in model.non_trainable_variables if v._value is not None]
    return [(v, v._value) for v in there] if meet.world.survives else []


def ran(model: keras.Model, cut: bool) -> None:
    """How a model is called now. (It is of no matter where an embedding's gradient has all lines.)"""


def pulled(forward: Callable[..., list], given: list[Any]) -> tuple[list[Any], Callable[[list], list[np.ndarray]]]:
    """``forward(*given)``, and what makes gradients of the given of gradients of the results, in arrays."""
    outs, pull = jax.vjp(forward, *given)

    def back(into: list) -> list[np.ndarray]:
        grads = pull([jnp.asarray(g, out.dtype) for g, out in zip(into, outs, strict=True)])
        return [np.asarray(g, "float32") for g in grads]

    return outs, back


def looked_up(call: Callable[[], Any], given: list[tuple[Any, Any]]) -> tuple[Any, list[tuple[Any, int]]]:
    """``call()``; and no variable has a gradient of some lines only."""
    return call(), []


def joined(share: Share, x: jax.Array) -> Any:
    """All ranks' rows of what a model gave."""
    return share.gather(x)


def recorded() -> bool:
    """Gradients are of functions, not of what was called before."""
    return False


def on_tape() -> bool:
    """There are no tapes."""
    return False


def hidden_from_tape(model: keras.Model) -> str:
    """There are no tapes."""
    return ""
