"""``oars resume``: go on with a run from its newest good snapshot, in the same folder, on the same or other ranks.

The script runs from its beginning, but what it did before the snapshot is played, not done (``adapt/replay/tape.py``);
nothing in the folder is changed before the snapshot's place is reached.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.adapt.replay.snapshot_file import newest, read
from oars.adapt.replay.tape import read_tape
from oars.cluster.place import Where
from oars.cluster.place import find as find_place
from oars.commands.planning import add_mpi, make_plan, snapshot_plan
from oars.commands.run import finish, start
from oars.hosts.kill_all import kill_all
from oars.plan import Period, Plan
from oars.runfolder import UsageError, find_folder
from oars.supervisor.closing import clear_marks
from oars.supervisor.screen import complain
from oars.supervisor.snapshot_requests import take_lock
from oars.supervisor.supervise import Supervisor

KEPT = ("seed", "batch", "split", "scale_lr", "local_batchnorm", "share_gpus", "stall", "on_stall", "report_bindings",
        "launcher", "stage_env", "wire", "guard", "guard_every", "prune", "widen", "widen_when",
        "cell_timeout")  # of the old plan


def resume(run: str, ranks: int | None, where: Where, quiet: bool, period: str | None) -> int:
    """Resume a run and return its exit code."""
    folder = find_folder(run, runfolder.RUN)
    old = Plan.read(folder)
    lock = take_lock(folder)  # refuses a run that is going
    check_sides(folder)
    if not (folder / runfolder.SNAPSHOTS).is_dir():
        raise UsageError(f"{folder} holds no snapshot: the run has finished, or ended before its first one")
    path, refused = newest(folder, lambda header: check(folder, header))
    for line in refused:
        complain(line)
    if path is None:
        raise UsageError(f"{folder} holds no usable snapshot")
    folder = folder.resolve()
    try:
        os.chdir(old.cwd)
    except OSError as error:
        raise UsageError(f"the run was started in {old.cwd}, which cannot be entered now ({error.strerror})") from None
    plan = make_plan(old.script, old.args, old.module, ranks or old.ranks, find_place(where), where.per_node,
                     **changed(old, period, path.name))
    plan.started = old.started
    if plan.batch == "keep" and plan.ranks != old.ranks:
        raise UsageError(f"with --batch keep the batch grows with the ranks: resume with -n {old.ranks}")
    if plan.ranks > 1:
        add_mpi(plan)
    folder = Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder
    return go_on(folder, plan, quiet, lock)


def check_sides(folder: Path) -> None:
    """Refuse a run that another host goes on with, since a link was cut (``oars.hosts.lookout``)."""
    for path in folder.glob(runfolder.side("*")):
        if (host := path.read_text()) != socket.gethostname():
            raise UsageError(f"{folder.name} still runs on {host}, which was cut off from the command's host: wait for "
                             f"it, or end it there and remove {path}")


def check(folder: Path, header: dict[str, Any]) -> None:
    """Whether the part of the tape that belongs to a snapshot is good; Damaged if not."""
    read_tape(folder, header["tape"])


def changed(old: Plan, period: str | None, snapshot: str) -> dict[str, Any]:
    """The options of the new plan: the old ones, but for when the next snapshots are due."""
    again = snapshot_plan(period)
    if period is None and again is not None:
        before: Period = {**(old.snapshot or {})}
        before.pop("end", None)
        again = {**before, **again}
    kept = {name: getattr(old, name) for name in KEPT}
    return {**kept, "snapshot": again or {}, "resume": snapshot}


def go_on(folder: Path, plan: Plan, quiet: bool, lock: int) -> int:
    """Clear away what a run that was killed has left, and run."""
    kill_all(folder.resolve())
    clear_marks(folder)
    for name in os.listdir(folder):
        if name.startswith("error-") or name == runfolder.SUMMARY:
            os.unlink(folder / name)
    step = read(folder / runfolder.SNAPSHOTS / plan.resume)[0]["step"]
    supervisor = Supervisor(folder, plan, quiet=quiet, lock=lock)
    supervisor.screen.say(f"continuing from the snapshot of step {step}")
    return finish(folder, plan, supervisor, start(folder, plan, supervisor))
