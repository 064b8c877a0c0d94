"""TensorFlow 1.x scripts on today's TensorFlow (``--tf1``): old names, sessions, graphs that are cut in stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oars.plan import Plan

if TYPE_CHECKING:
    from types import ModuleType

    from oars.engine.world import World
    from oars.rank.record import Record


def install(tf: ModuleType, world: World | None, plan: Plan, record: Record) -> None:
    """Give TensorFlow its behaviour of 2017 (``world`` is None on one rank: then only steps are counted)."""
    from oars.adapt.meet import meet
    from oars.adapt.tf1 import seams

    if world is not None:
        meet.start(world, plan, record)
    seams.install(world is not None, record)
