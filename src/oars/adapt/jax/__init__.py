"""JAX, with Keras or without: gradients, collectives inside compiled functions, and steps that are done again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from oars.plan import Plan

if TYPE_CHECKING:
    from oars.engine.world import World
    from oars.rank.record import Record


def install(world: World, plan: Plan, record: Record) -> None:
    """Patch JAX, as soon as it is imported: scripts say ``from jax import grad, jit`` before they import Keras."""
    import jax

    from oars.adapt.jax import seams
    from oars.adapt.meet import meet

    # A callback that is given large arrays waits for a copy by the same threads that run the program: with few cores
    # and programs that run beside their caller nobody is left to make it (jax-ml/jax, issue 24255).
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("PJRT_NPROC", str(max(2, cores)))
    meet.start(world, plan, record)
    seams.install()
