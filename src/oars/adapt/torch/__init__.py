"""PyTorch aboard: a global batch of which each rank holds its rows.

``install`` puts the patches in place (docs/how-it-works.md lists them): loaders give Rows (``loaders``), operations on
them work on own rows or gather (``rows``, ``rules``, ``shapes``, ``layers``, ``losses``), module calls run on plain
local rows (``calls``), and ``backward`` leaves the global gradients everywhere (``gradients``), unless ranks train on
their own for a while (``apart``).
"""

from __future__ import annotations

from typing import Any


def install(world: Any, plan: dict, record: Any) -> None:
    """Patch PyTorch for this rank (``world`` is None on one rank: then only steps are counted)."""
    import torch

    from oars.adapt.snapshot_file import FOLDER, read
    from oars.adapt.torch import snapshots, steps, uncompiled
    from oars.adapt.torch.context import ctx

    uncompiled.install()
    ctx.record, ctx.plan = record, plan
    gradients: Any = None
    if world is not None:
        ctx.world, ctx.rank, ctx.size = world, world.rank, world.size
        ctx.era, ctx.members = world.era, world.members
        world.adopt()
        world.phase = ctx.phase
        from oars.adapt.torch import calls, functions, hooks, layers, loaders, losses, noise, norm, shapes
        from oars.adapt.torch import gradients as gradients_

        assert layers and losses and shapes  # imported for the rules they register
        ctx.alone = plan.get("sync", "allreduce") != "allreduce"
        if ctx.alone:
            from oars.adapt.torch import apart

            gradients = apart.OwnGradients()
        else:
            gradients = gradients_.Gradients()
        gradients_.install(gradients)
        for part in (noise, norm, calls, functions, hooks, loaders):
            part.install()
        if torch.distributed.is_available():
            from oars.adapt.torch import started

            started.install(record)
    steps.install(torch, gradients)
    if ctx.alone:
        ctx.together = apart.install(gradients)
    if plan.get("snapshot") is not None:
        taking = snapshots.install(gradients)
        if "joining" in plan:
            taking.play(plan["joining"], [])
        elif "resume" in plan:
            taking.play(*read(record.folder / FOLDER / plan["resume"]))
