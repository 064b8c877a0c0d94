"""A rank that is a server (``--sync server``): it runs no script, and holds what the others train.

The first rank runs the script in any case: its output is the run's. Of the others the servers are those on hosts
without GPUs, if there are such, then the last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oars import runfolder
from oars.engine.board import SERVES
from oars.plan import Plan

if TYPE_CHECKING:
    from oars.engine.world import World


def chosen(servers: int, gpus: list[bool]) -> list[int]:
    """The ranks that serve; ``gpus``: whether each rank has one."""
    return sorted(sorted(range(1, len(gpus)), key=lambda rank: (gpus[rank], -rank))[:servers])


def serve(folder: Path, plan: Plan, world: World) -> None:
    """Serve until every worker has ended its script, or died."""
    from oars.adapt.torch import lazy_dynamo
    from oars.adapt.torch.async_modes.ps_shard import Holder
    from oars.exchange.mail import Mail
    from oars.exchange.serving import Server

    folder_of_script = os.getcwd() if plan.module else os.path.dirname(os.path.realpath(plan.script))
    sys.path.insert(0, folder_of_script)  # an optimizer's class may be in a module beside the script
    workers = [rank for rank in range(plan.ranks) if rank not in world.servers]
    signal.signal(signal.SIGINT, lambda *_: (folder / runfolder.interrupted(world.origin)).touch())
    lazy_dynamo.put_off()
    server = Server(Mail(world.star), workers, world.servers, plan.staleness, plan.backup,
                    lambda data: Holder(data, plan.wire))

    def over() -> bool:
        world.board.enter(SERVES)
        return all((folder / runfolder.exit_file(rank)).exists() for rank in server.workers)

    server.run(over)
    facts = {"role": "server", "pushes": server.pushes, "busy_seconds": round(server.busy, 6),
             "steps": server.steps, "left_out": server.left_out, "sent_bytes": server.mail.bytes}
    (folder / runfolder.sync(world.origin)).write_text(json.dumps(facts, indent=1) + "\n")
