"""What a job asks of a scheduler, and what the scheduler says of it, in words that are the same for all of them.

``slurm.py`` and ``pbs.py`` have the same functions for these: ``directives``, the lines at the top of a job script;
``submit``, which gives a job its number; ``state``; ``cancel``; ``again``, the same job once more; ``depend``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from oars.runfolder import UsageError

WARNING = 120  # seconds before a job's end in which it takes a snapshot and queues again; less in short jobs
# What schedulers write into a job's output when they end it.
_SAID = (
    (r"DUE TO TIME LIMIT|job killed: (walltime|cput)", "time limit"),
    (r"oom[-_ ]kill|[Ee]xceeded (job|step) memory limit|job killed: (p|v)*mem\b", "out of memory"),
    (r"DUE TO NODE FAILURE", "node failure"),
    (r"DUE TO PREEMPTION", "preempted"),
)


class Ask(NamedTuple):
    """What a job needs."""

    on: str  # slurm, pbs, torque
    nodes: int = 1
    per_node: int | None = None  # ranks
    seconds: int | None = None
    queue: str | None = None
    account: str | None = None
    gpus: int | None = None  # a node
    env: str | None = None  # a shell file
    flags: tuple[str, ...] = ()  # the scheduler's own
    max_restarts: int = 10


class State(NamedTuple):
    """queued, running, done, failed, cancelled or unknown, and why."""

    name: str
    why: str = ""
    left: float = 0.0  # seconds to a running job's time limit, where the scheduler tells

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.name in ("done", "failed", "cancelled")


def parse_time(text: str) -> int:
    """Seconds of ``90m``, ``1h30m``, ``2d``, or of a time as ``sbatch --time`` reads it: ``30`` (minutes), ``30:00``,
    ``12:00:00``, ``1-12``, ``1-12:00``, ``1-12:00:00``."""
    units = re.fullmatch(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    clock = (re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
             or re.fullmatch(r"(\d+)-(\d+)(?::([0-5]\d))?()", text)
             or re.fullmatch(r"()()(\d+)(?::([0-5]\d))?", text))
    found = (clock or units).groups() if clock or units else ()  # type: ignore[union-attr]
    seconds = sum(int(n or 0) * unit for n, unit in zip(found, (86400, 3600, 60, 1), strict=False))
    if not seconds:
        raise UsageError(f"--time {text} is not a length of time: use 30 (minutes), 90m, 1h30m, 2d, or 12:00:00")
    return seconds


def clock(seconds: int) -> str:
    """``hours:minutes:seconds``, which all schedulers read."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def warning(seconds: int | None) -> int:
    """How long before its end a job is to be signalled."""
    return WARNING if seconds is None else min(WARNING, max(30, seconds // 10))


def ask(command: list[str], scheduler: str, cwd: Path | None = None) -> str:
    """What a scheduler's program prints; if it fails, one line with its own words."""
    done = _call(command, scheduler, cwd)
    if done.returncode:
        raise UsageError(f"{scheduler} says: {words(done.stdout + done.stderr)} ({shlex.join(command)})")
    return done.stdout.strip()


def look(command: list[str], scheduler: str) -> str | None:
    """The same, but nothing where it fails: it knows no such job, or cannot say."""
    try:
        done = _call(command, scheduler, None)
    except UsageError:
        return None
    return done.stdout if done.returncode == 0 else None


def obeyed(command: list[str], scheduler: str) -> bool:
    """Whether a scheduler did as asked. A program that was killed counts: the order ended it too, with this job."""
    try:
        return _call(command, scheduler, None).returncode <= 0
    except UsageError:
        return False


def _call(command: list[str], scheduler: str, cwd: Path | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise UsageError(f"there is no {scheduler} here: no program {command[0]}") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{scheduler} does not answer: {command[0]} took more than 60 s") from None


def words(text: str) -> str:
    """A scheduler's complaint as one line: what it calls an error, or all of it."""
    lines = [line.strip(" '") for line in text.splitlines() if line.strip(" '")]
    errors = [line for line in lines if re.search(r"\berror:", line)]
    return "; ".join(re.sub(r"^\w+: (error: )?", "", line) for line in errors or lines) or "nothing"


def said(folder: Path) -> str:
    """Why a scheduler ended a job, if it left its words in the job's output."""
    for path in sorted(folder.glob("job.*")):
        if path.suffix not in (".out", ".pbs") and not re.fullmatch(r"\.[oe]\d+", path.suffix):
            continue
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
        for pattern, why in _SAID:
            if re.search(pattern, text):
                return why
    return ""
