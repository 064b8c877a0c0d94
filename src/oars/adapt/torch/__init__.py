"""PyTorch aboard: a global batch of which each rank holds its rows.

``seams`` is the table of what is replaced in PyTorch. Loaders give Rows (``batches``), operations on them work on own
rows or gather (``rows``), module calls run on plain local rows (``model``), and ``backward`` leaves the global
gradients everywhere (``backward``), unless ranks train on their own for a while (``async_modes``). After a death the
step is done again (``recovery``); ``replay`` records a run and plays it again for ``oars resume``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oars import runfolder
from oars.adapt.python.signals import signals
from oars.plan import Plan

if TYPE_CHECKING:
    from oars.engine.world import World
    from oars.rank.record import Record


def install(world: World | None, plan: Plan, record: Record) -> None:
    """Take hold of PyTorch for this rank (``world`` is None on one rank: then only steps are counted)."""
    from oars.adapt.replay.snapshot_file import read
    from oars.adapt.torch import seams, step_log
    from oars.adapt.torch.context import ctx

    ctx.record, ctx.plan = record, plan
    ctx.begin()
    modes = set()
    gradients: Any = None
    if world is not None:
        ctx.join(world)
        from oars.adapt.python.random import Private
        from oars.adapt.torch import guard
        from oars.adapt.torch.backward.gradients import Gradients
        from oars.adapt.torch.recovery import lineage
        from oars.adapt.torch.rows import distributions, layers, losses, reshapes, shapes  # noqa: F401, E501  (each registers its rules)
        from oars.adapt.torch.sharing import Sharing

        ctx.perform, ctx.private = lineage.perform, Private(world.origin, plan.seed)
        record.polls = True
        ctx.sharing = Sharing(plan)
        if ctx.sharing.wanted:
            modes.add(seams.SHARING)
        ctx.alone = plan.sync != "allreduce"
        if ctx.alone:
            from oars.adapt.torch.async_modes.lost_samples import OwnGradients
            from oars.adapt.torch.async_modes.phases import Phases

            gradients = ctx.gradients = own = OwnGradients()
            ctx.phases = Phases(own)
            modes |= {seams.ASYNC, seams.SERVER} if plan.sync == "server" else {seams.ASYNC}
        else:
            gradients = ctx.gradients = Gradients()
            signals.begin()
            if plan.guard != guard.OFF:
                ctx.guard = guard.Guard(plan.guard == guard.HEAL, plan.guard_every)
            record.at_end = _at_end
    if plan.snapshot is not None:
        from oars.adapt.torch.replay.snapshots import Snapshots

        modes.add(seams.RECORDED)
        ctx.snapshots = Snapshots(gradients)
    if plan.prune is not None or plan.widen:
        from oars.adapt.torch.pruning import Pruner

        modes.add(seams.PRUNED)
        ctx.pruner = Pruner(plan.prune, plan.widen, plan.widen_when)
    if plan.samples == "thin":
        from oars.adapt.torch.thin import Thinner

        modes.add(seams.THINNED)
        ctx.thinner = Thinner(plan.of_run)
    step_log.begin()
    seams.install(modes)
    if plan.snapshot is not None:
        if plan.joining:
            ctx.snapshots.play(plan.joining, [])
        elif plan.resume:
            ctx.snapshots.play(*read(record.folder / runfolder.SNAPSHOTS / plan.resume))


def _at_end() -> None:
    """All ranks have come to the script's good end."""
    from oars.adapt.torch.context import ctx

    if ctx.world.broadcast(lambda: signals.due):
        signals.deliver()
    if ctx.guard is not None:
        ctx.guard.check("the script's end")
