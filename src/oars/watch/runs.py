"""Run folders, read as they are: half-written lines, runs that are going, were killed, or are of an older version.

What is missing is None or empty, never an error: only a folder that is no run folder is.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import socket
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.plan import Plan
from oars.runfolder import RUNS as TOP

OF_SYNC = {"local": ("every", "outer", "warmup"), "gossip": ("rotate",),
           "server": ("servers", "staleness", "backup", "placement")}  # which options each --sync has
PHASES = ("data", "forward", "backward", "exchange", "update", "other")


class WatchError(Exception):
    """Something the user can put right: shown as one line, exit code 2."""


@dataclass
class Steps:
    """The columns of ``metrics.jsonl``; what a line does not tell is NaN."""

    step: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    samples_per_s: list[float] = field(default_factory=list)
    exchange_share: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    optimizer: list[int] = field(default_factory=list)

    def of_each_optimizer(self) -> list[Steps]:
        """The steps of each optimizer by themselves: a GAN's have different losses."""
        found = []
        for which in sorted(set(self.optimizer)) or [0]:
            at = [i for i, o in enumerate(self.optimizer) if o == which]
            found.append(Steps(**{name: [column[i] for i in at] for name, column in vars(self).items()}))
        return found


@dataclass
class RankTimes:
    """Where one rank's time went, in seconds, over how many steps; and the most memory it was seen with."""

    rank: int
    seconds: dict[str, float]
    steps: int
    memory: float | None
    device_memory: float | None

    @property
    def busy(self) -> float:
        """Seconds in which the others had to wait for this rank, if they were quicker."""
        return sum(self.seconds[phase] for phase in PHASES if phase != "exchange")


class Run:
    """One run folder. Files are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.written = _json(folder / runfolder.RUN)
        self.plan = Plan.from_json(self.written)
        self.summary = _json(folder / runfolder.SUMMARY)
        self.end = _json(folder / runfolder.END)

    @property
    def ranks(self) -> int:
        return self.plan.ranks

    @property
    def started(self) -> float | None:
        return self.plan.started or None

    @property
    def command(self) -> str:
        """What was typed, but for options that say nothing about the training."""
        plan = self.plan
        words = ["oars", "run", "-n", str(self.ranks)]
        for option in ("batch", "scale_lr", "local_batchnorm", "share_gpus", "sync",
                       *OF_SYNC.get(plan.sync, ()), "wire"):
            value = getattr(plan, option)
            if value is True:
                words.append("--" + option.replace("_", "-"))
            elif (option == "staleness" and value == 0) or value not in (None, False, "split", "allreduce", "fp32", 0):
                words += ["--" + option.replace("_", "-"), str(value)]
        return f"{shlex.join(words)} {self.what}"

    @property
    def what(self) -> str:
        """The script and its arguments."""
        module = ["-m"] if self.plan.module else []
        return shlex.join([*module, self.plan.script or "?", *self.plan.args])

    @property
    def seconds(self) -> float | None:
        """From the first step to the last."""
        if self.summary.get("seconds"):
            return float(self.summary["seconds"])
        times = self.steps.time
        return times[-1] - times[0] if len(times) > 1 else None

    @property
    def rate(self) -> float | None:
        """Samples a second over the whole run; None where nobody counted them (batches made by hand)."""
        if self.summary.get("samples_per_s"):
            return float(self.summary["samples_per_s"])
        rates = [rate for rate in self.steps.samples_per_s if math.isfinite(rate)]
        return sum(rates) / len(rates) if any(rates) else None

    @cached_property
    def last(self) -> dict[str, Any]:
        """The last whole line of ``metrics.jsonl``, found from its end."""
        try:
            with open(self.folder / runfolder.METRICS, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 2048))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return {}
        for line in reversed(lines):
            if (entry := _line(line)) is not None and isinstance(entry.get("step"), int):
                return entry
        return {}

    @cached_property
    def steps(self) -> Steps:
        """All whole lines of ``metrics.jsonl``."""
        steps = Steps()
        for entry in _lines(self.folder / runfolder.METRICS):
            if not isinstance(entry.get("step"), int):
                continue
            steps.step.append(entry["step"])
            for name in ("time", "loss", "samples_per_s", "exchange_share", "lr", "grad_norm"):
                value = entry.get(name)
                if isinstance(value, list):  # the rates of several groups
                    value = value[0] if value else None
                getattr(steps, name).append(float(value) if isinstance(value, (int, float)) else math.nan)
            which = entry.get("optimizer", 0)
            steps.optimizer.append(which if isinstance(which, int) else 0)
        return steps

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """``events.jsonl``, in order."""
        return [entry for entry in _lines(self.folder / runfolder.EVENTS) if "event" in entry]

    @cached_property
    def times(self) -> list[RankTimes]:
        """Where each rank's time went; a resumed run's parts are added up."""
        found = []
        for path in sorted(self.folder.glob(runfolder.times("*"))):
            number = path.stem.partition("-")[2]
            lines = list(_lines(path))
            if not number.isdecimal() or not lines:
                continue
            ends = [a for a, b in zip(lines, lines[1:], strict=False) if _total(b) < _total(a)] + lines[-1:]
            seconds = {phase: sum(float(line.get(phase) or 0) for line in ends) for phase in PHASES}
            found.append(RankTimes(int(number), seconds, max(int(line.get("step") or 0) for line in lines),
                                   _most(lines, "memory"), _most(lines, "device_memory")))
        return sorted(found, key=lambda times: times.rank)

    def state(self, going: set[int]) -> str:
        """``done``, ``running``, ``failed (code)``, ``killed``; ``going`` is what ``locked`` gives."""
        try:
            if os.stat(self.folder).st_ino in going:
                return "running"
        except OSError:
            pass
        code = self.end.get("code")
        if isinstance(code, int):
            return "done" if code == 0 else f"stopped ({code})" if code > 128 else f"failed ({code})"
        if self.summary:
            return "ended"  # by a version that did not write down how
        if self.plan.host != socket.gethostname() and time.time() - self._touched() < 60:
            return "running"  # on another host, whose locks cannot be seen from here
        return "killed"

    def _touched(self) -> float:
        try:
            return max(os.stat(self.folder / name).st_mtime for name in (runfolder.RUN, runfolder.METRICS))
        except OSError:
            return 0.0


def find(text: str) -> Run:
    """The run that is meant: a folder, or its name under ``oars-runs``."""
    for folder in (Path(text), Path(TOP, text)):
        if (folder / runfolder.RUN).is_file():
            return Run(folder)
    raise WatchError(f"no such run: neither {text} nor {Path(TOP, text)} is a run folder; oars runs lists them")


def all_runs(top: Path) -> list[Run]:
    """Every run in a folder, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(top) if entry.is_dir()]
    except OSError as error:
        raise WatchError(f"cannot list {top}: {error.strerror}; runs are where oars run was started") from None
    runs = [Run(top / name) for name in names]
    return sorted((run for run in runs if run.written), key=lambda run: (run.started or 0.0, run.name))


def locked() -> set[int]:
    """The inodes of files on this host that somebody holds a lock on: a run that is going holds one on its folder.

    Looked up, not tried: taking the lock, if only for a moment, could keep a run from starting.
    """
    found = set()
    try:
        with open("/proc/locks") as file:
            for line in file:
                words = line.split()
                if "FLOCK" in words and "->" not in words:
                    found.add(int(words[5].rpartition(":")[2]))
    except (OSError, ValueError, IndexError):
        pass
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        entry = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a ``.jsonl`` file; a line that is not whole is passed over."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    return [entry for line in data.split(b"\n") if line and (entry := _line(line)) is not None]


def _line(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _total(line: dict[str, Any]) -> float:
    return sum(float(line.get(phase) or 0) for phase in PHASES)


def _most(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [float(line[name]) for line in lines if isinstance(line.get(name), (int, float))]
    return max(values) if values else None
