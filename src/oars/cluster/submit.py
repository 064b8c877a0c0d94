"""``oars submit``: a job script in a run folder, and its place in a scheduler's queue.

The folder is made when the job is submitted: ``job.sh`` is the script, ``job.json`` what was asked and the job's
number, ``job.out`` what it prints, ``parts.jsonl`` when each of its parts began and ended (by ``commands/job.py``).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from oars import runfolder
from oars.cluster import pbs, slurm
from oars.cluster.queues import Ask
from oars.runfolder import RUNS, UsageError, make_folder

QUEUES: dict[str, ModuleType] = {"slurm": slurm, "pbs": pbs, "torque": pbs}
# What makes the job's Python this one, on a node that knows nothing of the shell that submitted it.
CARRIED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "MPI4PY_LIBMPI")


def which_queue(on: str | None) -> str:
    """The scheduler that is meant, or the one that is here."""
    if on is not None:
        return on
    if shutil.which("sbatch"):
        return "slurm"
    if shutil.which("qsub"):
        return pbs.dialect()
    raise UsageError("there is no scheduler here: neither sbatch (Slurm) nor qsub (PBS) is on the PATH; "
                     "oars run needs none")


def submit(ask: Ask, name: str | None, stem: str, command: list[str], versions: dict[str, str], dry_run: bool) -> int:
    """Submit a job and print its number; or only show its script."""
    check_env(ask)
    if dry_run:
        folder = Path(RUNS, name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        print(job_script(ask, folder, named(command, folder.name)), end="")
        return 0
    job_script(ask, Path(), command)  # what cannot be asked leaves no folder
    folder = make_folder(name, stem)
    job = put(ask, folder, named(command, folder.name), versions)
    print(f"oars: job {job}, {folder}; watch it with: oars log {folder.name} -f")
    return 0


def put(ask: Ask, folder: Path, command: list[str], versions: dict[str, str], after: list[str] | None = None,
        **more: Any) -> str:
    """Write the job script into its folder and submit it; if that fails nothing is left."""
    try:
        script = folder.resolve() / runfolder.JOB_SCRIPT
        script.write_text(job_script(ask, folder, command))
        script.chmod(0o755)
        details = {**ask._asdict(), "command": command, "cwd": os.getcwd(), "submitted": time.time(),
               "after": after or [], "versions": versions, **more}
        write(folder, {**details, "id": None})
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes before the job is there, or after
        try:
            job: str = QUEUES[ask.on].submit(script, after or [])
        finally:
            signal.signal(signal.SIGINT, before)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if not os.listdir(RUNS):
            os.rmdir(RUNS)
        raise
    # The job may have begun, but it reads no number from here: it knows its own.
    write(folder, {**details, "id": job})
    return job


def job_script(ask: Ask, folder: Path, command: list[str]) -> str:
    """All of a job, to be read and, if need be, to be submitted by hand."""
    folder = Path(os.path.abspath(folder))
    lines = ["#!/bin/bash", *QUEUES[ask.on].directives(ask, folder.name, folder), ""]
    if ask.on != "slurm":  # which writes where we say, as it comes
        lines.append(f"exec >>{shlex.quote(str(folder / runfolder.JOB_OUTPUT))} 2>&1")
    lines.append(f"cd {shlex.quote(os.getcwd())}")
    lines += [f"export {name}={shlex.quote(os.environ[name])}" for name in CARRIED if name in os.environ]
    if ask.env is not None:
        lines.append(f". {shlex.quote(os.path.abspath(ask.env))}")
    lines.append(f"exec {shlex.quote(sys.executable)} -m oars job {shlex.quote(str(folder))} -- {shlex.join(command)}")
    return "\n".join(lines) + "\n"


def named(command: list[str], name: str) -> list[str]:
    """A command ``oars run ...``, with its folder's name."""
    return [*command[:2], "--name", name, *command[2:]] if is_run(command) else command


def is_run(command: list[str]) -> bool:
    """Whether this is a run of ours, which can be stopped and resumed."""
    return command[:2] == ["oars", "run"]


def check_env(ask: Ask) -> None:
    """The file of the environment is read by the job's shell."""
    if ask.env is not None and not os.access(ask.env, os.R_OK):
        raise UsageError(f"--env {ask.env}: no such file, or it cannot be read")
    for flag in ask.flags:
        if re.search(r"[\n\r]", flag):
            raise UsageError(f"a scheduler's flag is one line: {flag!r}")


def write(folder: Path, record: dict[str, Any]) -> None:
    """Put ``job.json`` in its place."""
    runfolder.put(folder / runfolder.JOB_RECORD, json.dumps(record, indent=1) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """``job.json``."""
    try:
        data: dict[str, Any] = json.loads((folder / runfolder.JOB_RECORD).read_text())
        return data
    except (OSError, ValueError):
        raise UsageError(f"{folder} is no submitted run: it has no readable job.json") from None
