"""What of JAX is replaced, by which layers, outermost first; on one rank nothing."""

from __future__ import annotations

import jax

from oars.adapt.jax import gradients, recovery
from oars.adapt.python import patching
from oars.adapt.python.patching import Seam

SEAMS = (
    Seam(jax, "grad", (gradients.grad,)),
    Seam(jax, "value_and_grad", (gradients.value_and_grad,)),
    Seam(jax, "vjp", (gradients.vjp,)),
    Seam(jax, "checkpoint remat jacrev jacobian linearize", (gradients.of_whole_models,)),
    Seam(jax, "jit", (recovery.jit,)),
)


def install() -> None:
    """Put all of it in place."""
    patching.install(SEAMS, frozenset())
