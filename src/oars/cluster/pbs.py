"""PBS: OpenPBS, PBS Professional, Torque."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

from oars import runfolder
from oars.cluster import queues
from oars.cluster.host_list import Host, read_file
from oars.cluster.queues import Ask, State
from oars.runfolder import UsageError

NAME = "PBS"
JOB_ID = "PBS_JOBID"
# A status below zero is the scheduler's own: PBS Professional's, and Torque's, which writes the word small.
ENDED = {("Exit_status", -29): "time limit", ("Exit_status", -28): "time limit", ("exit_status", -11): "time limit",
         ("exit_status", -12): "time limit", ("Exit_status", -27): "out of memory",
         ("Exit_status", -26): "out of memory", ("exit_status", -10): "out of memory"}


def inside() -> bool:
    """Whether this is part of a PBS job."""
    return "PBS_JOBID" in os.environ and "PBS_NODEFILE" in os.environ


def hosts() -> list[Host]:
    """The job's list of nodes has a line for each rank (``mpiprocs``, or Torque's ``ppn``)."""
    return read_file(os.environ["PBS_NODEFILE"])


def reach() -> list[str]:
    """PBS's own remote shell, under its control and accounting; Torque has none."""
    return ["pbs_tmrsh"] if shutil.which("pbs_tmrsh") else ["ssh", "-x"]


def dialect() -> str:
    """Whether this ``qsub`` wants resources as PBS Professional does, or as Torque."""
    version = queues.look(["qsub", "--version"], NAME)
    return "pbs" if "pbs_version" in (version or "") else "torque"


def directives(ask: Ask, name: str, folder: Path) -> list[str]:
    """The lines of a job script that are for PBS."""
    per_node = ask.per_node or ask.gpus
    if per_node is None:
        raise UsageError("PBS does not tell a job how many cores its nodes have: say how many ranks, with --per-node")
    if ask.on == "torque":
        gpus = f":gpus={ask.gpus}" if ask.gpus else ""
        lines = [f"-l nodes={ask.nodes}:ppn={per_node}{gpus}"]
    else:
        gpus = f":ngpus={ask.gpus}" if ask.gpus else ""
        lines = [f"-l select={ask.nodes}:ncpus={per_node}:mpiprocs={per_node}{gpus}", "-l place=scatter"]
    lines += [f"-N {re.sub(r'^[^A-Za-z]+', '', name)[:15] or 'oars'}"]  # what all of them take
    lines += [f"-l walltime={queues.clock(ask.seconds)}"] if ask.seconds else []
    lines += [f"-q {ask.queue}"] if ask.queue else []
    lines += [f"-A {ask.account}"] if ask.account else []
    lines += ["-j oe", f"-o {shlex.quote(str(folder / runfolder.PBS_OUTPUT))}", "-r y"]
    return [f"#PBS {line}" for line in [*lines, shlex.join(ask.flags)] if line]


def submit(script: Path, after: list[str]) -> str:
    """Put a job script into the queue; it waits for the good end of the jobs ``after``."""
    waits = ["-W", f"depend=afterok:{':'.join(after)}"] if after else []
    return queues.ask(["qsub", *waits, script.name], NAME, cwd=script.parent).split()[-1]


def state(job: str) -> State | None:
    """What PBS says of a job; None if it has forgotten it."""
    shown = queues.look(["qstat", "-x", "-f", job], NAME) or queues.look(["qstat", "-f", job], NAME) or ""
    fields = dict(re.findall(r"^\s*(job_state|[Ee]xit_status|comment) = (.*)$", shown, re.M))
    letter = fields.get("job_state")
    if letter is None:
        return None
    if letter in "QHWTM":
        return State("queued", fields.get("comment", ""))
    if letter in "RESBU":
        return State("running")
    ended = next(((name, int(code)) for name, code in fields.items() if name.lower() == "exit_status"), None)
    if ended is None:
        return State("unknown", "it is over, and PBS does not say how")
    if ended in ENDED:
        return State("failed", ENDED[ended])
    if ended[1] in (256 + 15, 256 + 9):
        return State("cancelled")
    return State("done") if ended[1] == 0 else State("failed", f"exit code {ended[1]}")


def cancel(job: str) -> None:
    """Take a job out of the queue, or end it."""
    queues.ask(["qdel", job], NAME)


def again(job: str, script: Path) -> str:
    """Queue a running job once more, under the same number where the site allows it; this may end the caller."""
    return job if queues.obeyed(["qrerun", job], NAME) else submit(script, [])


def depend(job: str, after: list[str]) -> None:
    """Let a queued job wait for others."""
    queues.ask(["qalter", "-W", f"depend=afterok:{':'.join(after)}", job], NAME)
