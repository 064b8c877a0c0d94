"""What a job script runs, ``oars job FOLDER -- COMMAND``: one part of a submitted job.

A job is stopped before its time is over: by the scheduler's SIGUSR1 (Slurm's ``--signal``), by our own clock where
there is no such thing (PBS), by SIGTERM when it is preempted. ``oars run`` then takes a snapshot, and the job goes into
the queue again. The next part goes on with ``oars resume``, until the script has ended, a part has made no progress, or
there were too many. ``parts.jsonl`` tells when each part began and ended, and why.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oars import runfolder
from oars.cluster import queues, slurm
from oars.cluster.host_list import HostsError
from oars.cluster.jobs import parts
from oars.cluster.pipeline import write_manifest
from oars.cluster.submit import QUEUES, is_run, read, write
from oars.commands.doctor_job import doctor_job, line
from oars.commands.planning import versions
from oars.runfolder import JOB, RUNS, UsageError
from oars.supervisor.screen import complain
from oars.supervisor.stall import ABORTED

if TYPE_CHECKING:
    from types import FrameType

STOPPED = 128 + signal.SIGTERM
SLURM_MAY_BE_EARLY = 90  # seconds: with a signal before the end


class Part:
    """One part of a job, from its first line to its last."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder, self.command = folder, command
        self.ask = read(folder)
        self.queue: ModuleType = QUEUES[self.ask["on"]]
        names = (self.queue.JOB_ID, slurm.JOB_ID)  # the second: this PBS is a face of Slurm
        self.id = next((os.environ[name] for name in names if name in os.environ), str(self.ask["id"]))
        self.number = sum(part["event"] == "began" for part in parts(folder)) + 1
        self.snapshot = newest(folder)
        self.stop_reason = ""  # why
        self.process: subprocess.Popen | None = None

    def run(self) -> int:
        """Run it and return its exit code."""
        self.note("began", id=self.id, host=socket.gethostname(), snapshot=self.snapshot)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, self.stop)
        if self.ask["on"] != "slurm" and self.ask["seconds"]:
            signal.alarm(max(1, self.ask["seconds"] - queues.warning(self.ask["seconds"])))
        try:
            check_versions(self.ask["versions"])
            self.look_at_nodes()
        except (UsageError, HostsError) as error:
            complain(str(error))
            return self.end(2, str(error), False)
        self.process = subprocess.Popen(self.words(), env={**os.environ, JOB: str(self.folder)})
        if self.stop_reason:  # while it was starting
            self.process.terminate()
        code = self.process.wait()
        return self.finish(code if code >= 0 else 128 - code)

    def look_at_nodes(self) -> None:
        """Before the first step: what is found goes into run.json."""
        if self.ask["nodes"] > 1 and is_run(self.command) and self.snapshot is None:
            found = doctor_job(self.folder, self.ask["gpus"], launcher_of(self.command))
            complain(line(found))
            (self.folder / runfolder.DOCTOR).write_text(json.dumps(found) + "\n")

    def words(self) -> list[str]:
        """What this part runs."""
        if not is_run(self.command):
            ours = self.command[0] == "oars"
            return [sys.executable, "-m", "oars", *self.command[1:]] if ours else self.command
        words = self.command[1:]
        if (self.folder / runfolder.RUN).exists():
            if self.snapshot is None:
                put_aside(self.folder, self.number - 1)
            else:
                words = ["resume", str(self.folder)]
        return [sys.executable, "-m", "oars", *words]

    def stop(self, number: int, frame: FrameType | None) -> None:
        """The end is near: a run is to take a snapshot and stop; other commands use the time that is left."""
        if number != signal.SIGTERM and not is_run(self.command):
            return
        first = not self.stop_reason
        self.stop_reason = self.stop_reason or ("preempted" if number == signal.SIGTERM else "time limit")
        if self.process is not None and first:  # a second SIGTERM would stop it before its snapshot is written
            self.process.terminate()

    def finish(self, code: int) -> int:
        """How it ended, and whether it goes on."""
        if code == 0 and "makes" in self.ask:
            try:
                write_manifest(self.folder, self.ask["makes"])
            except UsageError as error:
                complain(str(error))
                return self.end(1, str(error), False)
        kept = newest(self.folder)
        why = "" if code == 0 else f"exit code {code}"
        if self.stop_reason and code == STOPPED:
            why = self.stop_reason
            state = self.queue.state(self.id)
            if (self.folder / runfolder.CANCELLED).exists() or state is not None and state.name == "cancelled":
                return self.end(code, "cancelled", False)
            if state is not None and state.left > queues.warning(self.ask["seconds"]) + SLURM_MAY_BE_EARLY:
                why = "preempted"  # where a site lets the same signal tell of it
        elif code != ABORTED or kept is None:
            return self.end(code, last_words(self.folder, why), False)
        if not is_run(self.command) or kept is None:
            return self.end(code, f"{why}: there is no snapshot to continue from", False)
        if kept == self.snapshot:
            return self.end(code, f"{why}: this part did not get further than the part before", False)
        if self.number > self.ask["max_restarts"]:
            return self.end(code, f"{why}: no more than {self.ask['max_restarts']} restarts were asked for", False)
        return self.again(code, why)

    def again(self, code: int, why: str) -> int:
        """Into the queue once more. Slurm ends this process then, so everything is said before."""
        complain(f"part {self.number} is over ({why}): the job is queued again")
        self.end(code, why, True)
        try:
            state = self.queue.state(self.id)
            job = self.id if state is not None and state.name == "queued" else self.queue.again(
                self.id, self.folder / runfolder.JOB_SCRIPT)
            if job != self.id:
                write(self.folder, {**self.ask, "id": job})
                self.let_wait_for(job)
        except UsageError as error:
            complain(str(error))
            return self.end(code, f"{why}, and {error}", False)
        return code

    def let_wait_for(self, job: str) -> None:
        """What waits for the job that ends now shall wait for its next part."""
        for path in Path(RUNS).glob(f"*/{runfolder.JOB_RECORD}"):
            other = read(path.parent)
            if self.id in other["after"]:
                other["after"] = [job if before == self.id else before for before in other["after"]]
                self.queue.depend(other["id"], other["after"])
                write(path.parent, other)

    def end(self, code: int, why: str, again: bool) -> int:
        """Write down how this part ended."""
        self.note("ended", code=code, why=why, again=again)
        return code

    def note(self, event: str, **more: Any) -> None:
        with open(self.folder / runfolder.PARTS, "a") as file:
            file.write(json.dumps({"event": event, "part": self.number, "time": time.time(), **more}) + "\n")


def launcher_of(command: list[str]) -> str:
    """What starts the ranks of an ``oars run``; what follows the script is the script's."""
    ours = list(itertools.takewhile(lambda word: word != "-m" and not word.endswith(".py"), command))
    return ours[ours.index("--launcher") + 1] if "--launcher" in ours else "mpirun"


def newest(folder: Path) -> str | None:
    """The newest snapshot's name."""
    return max((path.name for path in (folder / runfolder.SNAPSHOTS).glob("*.snap")), default=None)


def put_aside(folder: Path, part: int) -> None:
    """A run that was ended before its first snapshot begins anew; what it left is kept."""
    aside = folder / runfolder.part(part)
    aside.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if runfolder.MARKS.match(path.name):
            path.unlink()
        elif not path.name.startswith(("job.", "part", ".job.", runfolder.DOCTOR)):
            os.replace(path, aside / path.name)


def last_words(folder: Path, why: str) -> str:
    """An exit code, with the last line of the error that caused it, or the line in which we refused."""
    for path in sorted(folder.glob(runfolder.error("*"))):
        try:
            lines = json.loads(path.read_text())["text"].strip().splitlines()
            return f"{why}: {lines[-1]}" if lines else why
        except (OSError, ValueError, KeyError):
            pass
    if why == "exit code 2" and (folder / runfolder.JOB_OUTPUT).exists():
        lines = (folder / runfolder.JOB_OUTPUT).read_text(errors="replace").splitlines()
        return next((f"{why}: {line[6:]}" for line in reversed(lines) if line.startswith("oars: ")), why)
    return why


def check_versions(submitted: dict[str, str]) -> None:
    """The job's Python and packages must be those of the shell that submitted it."""
    here = versions()
    for name, version in submitted.items():
        if here.get(name) != version:
            raise UsageError(f"{name} is {here.get(name, 'not here')} on {socket.gethostname()}, but {version} where "
                             f"the job was submitted: this node has another {sys.executable}, or other packages")
