"""Starts runs as a person would, with the command ``oars run``, and knows them again by their folders.

A run of a sweep or a scaling series has a fixed name. If its folder tells that it has ended, well or badly, it is not
run again, so a series that was interrupted goes on with the same command; a run that was killed gets another try. A run
that is needed only up to some step is stopped there with a snapshot, and resumed if more of it is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from oars import runfolder
from oars.watch.runs import TOP, Run, WatchError, locked

ENDED = ("done", "failed", "ended")
STOPPED = f"stopped ({128 + signal.SIGTERM})"


@dataclass
class Trial:
    """One run to be made: its name, its ranks, what follows ``oars run``, and what is varied."""

    name: str
    ranks: int
    words: list[str]
    settings: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)  # of oars run
    until: int | None = None  # how many steps of it are needed; None: all
    run: Run | None = None
    busy_cores: float | None = None

    def look(self) -> bool:
        """Find the newest try; whether it has ended, or made the steps that are needed."""
        going = locked()
        for folder in tries(self.name):
            if not folder.exists():
                break
            self.run = Run(folder)
        if self.run is None:
            return False
        state = self.run.state(going)
        if state == "running":
            raise WatchError(f"{self.run.folder} is still running: wait for it, or end it")
        return state.startswith(ENDED) or (state == STOPPED and self.until is not None and self.done >= self.until)

    @property
    def done(self) -> int:
        """How many steps were made, as far as is known."""
        return int(self.run.last.get("step", 0)) if self.run is not None else 0

    def can_go_on(self) -> bool:
        """Whether it was stopped, with a snapshot."""
        return (self.run is not None and self.run.state(set()) == STOPPED
                and (self.run.folder / runfolder.SNAPSHOTS).is_dir())


@dataclass
class Going:
    """A trial under way."""

    trial: Trial
    folder: Path
    process: subprocess.Popen
    stderr: IO[bytes]
    began: float
    stopping: bool = False

    def stop_when_done(self) -> None:
        """Stop it with a snapshot once it has made the steps that are needed."""
        if self.trial.until is None or self.stopping:
            return
        self.trial.run = Run(self.folder)
        if self.trial.done >= self.trial.until:
            self.stopping = True
            self.process.send_signal(signal.SIGTERM)


def tries(name: str) -> Iterator[Path]:
    """The folders of one trial, first try first."""
    yield Path(TOP, name)
    for number in range(2, 1000):
        yield Path(TOP, f"{name}-try{number}")


def series_name(kind: str, name: str | None, script: list[str], spec: dict[str, Any]) -> Path:
    """The folder of a series. Without a name it has one that is the same for the same command and the same script."""
    if name is not None and (name != os.path.basename(name) or name in ("", ".", "..")):
        raise WatchError(f"--name {name!r} cannot be a folder's name: leave out slashes and dots")
    if script[0] != "-m":
        try:
            spec = {**spec, "sha": hashlib.sha256(Path(script[0]).read_bytes()).hexdigest()}
        except OSError as error:
            raise WatchError(f"cannot read {script[0]}: {error.strerror}") from None
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    stem = Path(script[-1 if script[0] == "-m" else 0]).stem.replace(".", "-")
    folder = Path(TOP, name or f"{kind}-{stem}-{digest[:6]}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / runfolder.SERIES
        if known.exists() and json.loads(known.read_text()).get("digest") != digest:
            raise WatchError(f"{folder} holds another series (or its script has changed since): choose another --name")
        known.write_text(json.dumps({"kind": kind, "digest": digest, **spec}, indent=1) + "\n")
    except OSError as error:
        raise WatchError(f"cannot write {folder}: {error.strerror}") from None
    return folder


def run_all(trials: Iterator[Trial], parallel: int, cores_each: Callable[[Trial], int],
            say: Callable[[Trial], None]) -> list[Trial]:
    """Run trials, ``parallel`` at a time, each on cores (and GPUs) of its own; ``say`` hears of each that ended."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // parallel)
    free = list(range(parallel))
    going: dict[int, Going] = {}
    every: list[Trial] = []
    try:
        while True:
            while free and (trial := next(trials, None)) is not None:
                every.append(trial)
                if trial.look():
                    say(trial)
                    continue
                slot = free.pop(0)
                mine = cores[slot * share:(slot + 1) * share] or cores
                going[slot] = _start(trial, mine[:max(1, cores_each(trial))], slot)
            if not going:
                return every
            slot, used = _wait(going)
            ended = going.pop(slot)
            free.append(slot)
            ended.trial.look()
            ended.trial.busy_cores = used / (time.perf_counter() - ended.began)
            say(ended.trial)
    except BaseException:
        for each in going.values():
            if each.process.poll() is None:
                each.process.send_signal(signal.SIGTERM)
        for each in going.values():
            each.process.wait()
        raise


def _start(trial: Trial, cores: list[int], slot: int) -> Going:
    if trial.can_go_on() and trial.run is not None:
        folder = trial.run.folder
        command = ["resume", "--quiet", "--snapshot", "24h", str(folder)]
    else:
        folder = next(folder for folder in tries(trial.name) if not folder.exists())
        period = "24h" if trial.until is not None else "off"
        command = ["run", "--quiet", "--snapshot", period, "-n", str(trial.ranks), "--name", folder.name,
                   *trial.options, *trial.words]
    chosen = gpus()[slot * trial.ranks:(slot + 1) * trial.ranks]
    env = {**os.environ, "OARS_DIGEST": "1", **({"CUDA_VISIBLE_DEVICES": ",".join(chosen)} if chosen else {})}
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        if hasattr(libc, "prctl"):
            libc.prctl(1, int(signal.SIGTERM))  # ends when we are killed
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    # In a session of its own, so that Ctrl-C reaches only us, and we end it in good order.
    stderr = tempfile.TemporaryFile()
    process = subprocess.Popen(
        [sys.executable, "-m", "oars", *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
        env=env, start_new_session=True, preexec_fn=prepare)
    return Going(trial, folder, process, stderr, time.perf_counter())


def _wait(going: dict[int, Going]) -> tuple[int, float]:
    """Until one has ended: its slot, and how much processor time it took."""
    while True:
        for slot, each in going.items():
            pid, status, usage = os.wait4(each.process.pid, os.WNOHANG)
            if pid:
                each.process.returncode = os.waitstatus_to_exitcode(status)
                left = not each.stopping and Run(each.folder).state(set()) == STOPPED  # as it was: not resumed
                if left or not Path(TOP, each.trial.name).exists():  # it was refused
                    each.stderr.seek(0)
                    raise WatchError(each.stderr.read().decode(errors="replace").strip().removeprefix("oars: "))
                return slot, usage.ru_utime + usage.ru_stime
            each.stop_when_done()
        time.sleep(0.05)


def gpus() -> list[str]:
    """The GPUs that ranks may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    try:
        return [str(number) for number, _ in enumerate(os.listdir("/proc/driver/nvidia/gpus"))]
    except OSError:
        return []


def metric_of(run: Run, pattern: re.Pattern | None) -> tuple[float | None, str]:
    """A run's result, and a word where there is none: the last match of a pattern in its output, or its last losses."""
    if pattern is None:
        losses = run.steps.loss
        last = losses[-max(1, len(losses) // 20):]  # a twentieth of the run: single steps say little
        return (sum(last) / len(last), "") if last else (None, "no steps")
    values = metrics_of(run, pattern)[1]
    return (values[-1], "") if values else (None, "no metric")


def metrics_of(run: Run, pattern: re.Pattern) -> tuple[list[float], list[float]]:
    """All matches in a run's output. Of two groups the first says where on the x axis; of one, matches are counted."""
    xs: list[float] = []
    ys: list[float] = []
    try:
        with open(run.folder / runfolder.log(0), errors="replace") as file:
            for match in pattern.finditer(file.read()):
                try:
                    y = float(match[min(2, pattern.groups)])
                    xs.append(float(match[1]) if pattern.groups > 1 else len(xs) + 1.0)
                    ys.append(y)
                except (ValueError, TypeError):  # a word, or a group that took no part
                    pass
    except OSError:
        pass
    return xs, ys


def metric_name(pattern: re.Pattern | None) -> str:
    """What to call a metric: the last word before its group."""
    words = re.findall(r"[A-Za-z]{2,}", pattern.pattern.rpartition("(")[0]) if pattern else ["loss"]
    return words[-1] if words else "metric"


def compiled(text: str | None) -> re.Pattern | None:
    """``--metric``'s regular expression."""
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise WatchError(f"--metric {text!r} is no regular expression: {error}") from None
