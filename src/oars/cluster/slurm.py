"""Slurm: ``sbatch``, ``salloc``."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from oars import runfolder
from oars.cluster import queues
from oars.cluster.host_list import Host, counts, expand
from oars.cluster.queues import Ask, State

NAME = "Slurm"
JOB_ID = "SLURM_JOB_ID"
ENDED = {"TIMEOUT": "time limit", "OUT_OF_MEMORY": "out of memory", "NODE_FAIL": "node failure",
         "BOOT_FAIL": "node failure", "PREEMPTED": "preempted", "DEADLINE": "deadline"}


def inside() -> bool:
    """Whether this is part of a Slurm job."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_JOB_NODELIST" in os.environ


def hosts() -> list[Host]:
    """As many ranks a node as the job asked for tasks; if it asked for none, one for each of its CPUs."""
    environ = os.environ
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    names = expand(environ["SLURM_JOB_NODELIST"])
    tasks = environ.get("SLURM_TASKS_PER_NODE" if asked else "SLURM_JOB_CPUS_PER_NODE", "")
    slots = counts(tasks) if tasks else []
    return [Host(name, slots[at] if at < len(slots) else 1) for at, name in enumerate(names)]


def reach() -> list[str]:
    """A step of its own, beside others (``--overlap``) and on all of the job's cores there."""
    return ["srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--mem=0",
            "--export=ALL", "--input=none", "--nodelist"]


def directives(ask: Ask, name: str, folder: Path) -> list[str]:
    """The lines of a job script that are for Slurm."""
    per_node = ask.per_node or ask.gpus
    wants = {
        "job-name": name, "nodes": ask.nodes, "ntasks-per-node": per_node, "gpus-per-node": ask.gpus,
        "time": queues.clock(ask.seconds) if ask.seconds else None, "partition": ask.queue, "account": ask.account,
        "output": folder / runfolder.JOB_OUTPUT, "open-mode": "append",
        "signal": f"B:USR1@{queues.warning(ask.seconds)}",
    }
    lines = [f"--{option}={shlex.quote(str(value))}" for option, value in wants.items() if value is not None]
    lines += ["--requeue", "--no-kill"]  # it may come back, and it survives a dead node
    if per_node is None:
        lines.append("--exclusive")  # whole nodes: a rank for each core
    return [f"#SBATCH {line}" for line in [*lines, shlex.join(ask.flags)] if line]


def submit(script: Path, after: list[str]) -> str:
    """Put a job script into the queue; it waits for the good end of the jobs ``after``."""
    waits = [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
    return queues.ask(["sbatch", "--parsable", *waits, str(script)], NAME).partition(";")[0]


def state(job: str) -> State | None:
    """What Slurm says of a job; None if it has forgotten it (minutes after the end, without accounting)."""
    shown = queues.look(["scontrol", "show", "job", "-o", job], NAME)
    if shown is None:
        shown = queues.look(["sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode"], NAME)
        ended = re.match(r"([A-Z_]+)[^|]*\|(\d+:\d+)", shown or "")
        return _named(ended[1], "", ended[2]) if ended else None
    fields = dict(re.findall(r"\b(JobState|Reason|ExitCode|TimeLimit|RunTime)=(\S+)", shown))
    found = _named(fields.get("JobState", ""), fields.get("Reason", ""), fields.get("ExitCode", "0:0"))
    left = _seconds(fields.get("TimeLimit", "")) - _seconds(fields.get("RunTime", ""))
    return found._replace(left=left) if found.name == "running" else found


def _seconds(length: str) -> float:
    """A length of time as Slurm writes it; EndTime would not do: a preempted job's is the end of its grace."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", length)
    return sum(int(n or 0) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True)) if found else 0


def _named(name: str, reason: str, exit_code: str) -> State:
    if name in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        return State("queued", "" if reason == "None" else reason)
    if name in ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"):
        return State("running")
    if name == "COMPLETED":
        return State("done")
    if name == "CANCELLED":
        return State("cancelled", "what it needs has failed" if "Dependency" in reason else "")
    if name in ENDED:
        return State("failed", ENDED[name])
    if name == "FAILED":
        code, _, number = exit_code.partition(":")
        return State("failed", f"exit code {code}" if number in ("", "0") else f"killed by signal {number}")
    return State("unknown", f"Slurm calls it {name}")


def cancel(job: str) -> None:
    """Take a job out of the queue, or end it."""
    queues.ask(["scancel", job], NAME)


def again(job: str, script: Path) -> str:
    """Queue a running job once more, under the same number where the site allows it; this may end the caller."""
    return job if queues.obeyed(["scontrol", "requeue", job], NAME) else submit(script, [])


def depend(job: str, after: list[str]) -> None:
    """Let a queued job wait for others."""
    queues.ask(["scontrol", "update", f"JobId={job}", f"Dependency=afterok:{':'.join(after)}"], NAME)
