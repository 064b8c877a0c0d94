"""``oars jobs``, ``log``, ``wait``, ``cancel``: what has become of submitted runs.

Two know something of a job: its own folder, to the end of each part it lived to see, and the scheduler, which also
knows of jobs that wait, and of those it has killed, and forgets them after a while. The folder is asked first, and
often; the scheduler seldom.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.cluster import queues
from oars.cluster.queues import State
from oars.cluster.submit import QUEUES, read
from oars.runfolder import RUNS, UsageError, find_folder

ASK_EVERY = 1.0, 15.0  # seconds between questions to the scheduler, at first and later; sites ask for patience
LOOK_EVERY = 0.2  # seconds between looks into the folder
KILLED = 128  # exit codes from here on are signals': the scheduler may know more


def jobs() -> int:
    """One line for each submitted run, oldest first."""
    found = (path.parent for path in Path(RUNS).glob(f"*/{runfolder.JOB_RECORD}"))
    folders = sorted(found, key=lambda f: read(f)["submitted"])
    if not folders:
        print(f"oars: no submitted runs in {RUNS}", file=sys.stderr)
        return 0
    rows = [["RUN", "JOB", "STATE", ""]]
    for folder in folders:
        state = status(folder)
        rows.append([folder.name, str(read(folder)["id"]), state.name, detail(folder, state)])
    table(rows)
    return 0


def table(rows: list[list[str]]) -> None:
    """Print rows, their columns one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def detail(folder: Path, state: State) -> str:
    """Why, in which part, how far."""
    number = sum(part["event"] == "began" for part in parts(folder))
    at = f"after part {number}" if state.name == "queued" and number else f"part {number}" if number > 1 else ""
    words = [state.why, at]
    if state.name == "running":
        step = last_step(folder)
        words.append(f"step {step['step']}" + (f", loss {step['loss']:.4g}" if step["loss"] is not None else "")
                     if step else "")
    return ", ".join(filter(None, words))


def status(folder: Path, ask: bool = True) -> State:
    """What is known of a job; without ``ask``, from its folder alone (unknown if that cannot tell)."""
    every = parts(folder)
    last = every[-1] if every else {}
    if last.get("event") == "ended" and not last["again"]:
        state = _ended(last)
        if last["code"] < KILLED or state.name != "failed" or not ask or last["why"] != f"exit code {last['code']}":
            return state
        scheduler = _asked(folder)
        return scheduler if scheduler.name == "failed" and "exit code" not in scheduler.why else state
    if not ask:
        return State("unknown")
    state = _asked(folder)
    if state.name == "failed" and (folder / runfolder.CANCELLED).exists():
        return State("cancelled")
    return state


def described(state: State) -> str:
    """``failed: exit code 3``."""
    return f"{state.name}: {state.why}" if state.why else state.name


def _ended(last: dict[str, Any]) -> State:
    if last["code"] == 0:
        return State("done")
    return State("cancelled") if last["why"] == "cancelled" else State("failed", last["why"])


def _asked(folder: Path) -> State:
    """What the scheduler says; where it knows little, what it has left in the job's output."""
    job = read(folder)
    state: State | None = QUEUES[job["on"]].state(str(job["id"])) if job["id"] else None
    if state is not None and state.name != "unknown":
        if state.name == "failed" and "signal" in state.why:
            return State("failed", queues.said(folder) or state.why)
        return state
    if (folder / runfolder.CANCELLED).exists():
        return State("cancelled")
    why = queues.said(folder)
    if why:
        return State("failed", why)
    if state is None and not parts(folder):
        return State("cancelled", "it never began")
    return State("failed", "it ended without a message, and the scheduler does not know it") if state is None else state


def log(run: str, follow: bool, rank: int | None) -> int:
    """Print what a run has printed, or one of its ranks; go on until its end, if it is to be followed."""
    folder = find_folder(run, runfolder.JOB_RECORD, runfolder.RUN)
    submitted = (folder / runfolder.JOB_RECORD).exists()
    if rank is None:
        names = [runfolder.JOB_OUTPUT] if submitted else [runfolder.log(voice(folder)), runfolder.err(voice(folder))]
    else:
        names = [runfolder.log(rank), runfolder.err(rank)]
        ranks = _ranks(folder)
        if ranks is not None and rank >= ranks:
            raise UsageError(f"--rank {rank}: {folder.name} has {ranks} ranks, 0 to {ranks - 1}")
    shown = dict.fromkeys(names, 0)
    for _ in _states(folder, submitted) if follow else [None]:
        for name in names:
            shown[name] = _copy(folder / name, shown[name])
    if not any(shown.values()):
        state = f"; it is {described(status(folder))}" if submitted else ""
        print(f"oars: nothing was printed in {folder} yet{state}", file=sys.stderr)
    return 0


def wait(run: str) -> int:
    """Until the end of a submitted run; its exit code is ours."""
    folder = find_folder(run, runfolder.JOB_RECORD, runfolder.RUN)
    read(folder)
    *_, state = _states(folder, True)
    print(f"oars: {folder.name} is {described(state)}", file=sys.stderr)
    if state.name == "done":
        return 0
    ends = [part["code"] for part in parts(folder) if part["event"] == "ended"]
    return ends[-1] or 1 if ends else 1


def cancel(run: str) -> int:
    """Take a run out of the queue, or end it; it will not come back."""
    folder = find_folder(run, runfolder.JOB_RECORD, runfolder.RUN)
    job = read(folder)
    state = status(folder)
    if state.over:
        raise UsageError(f"{folder.name} has ended already: {described(state)}")
    (folder / runfolder.CANCELLED).touch()
    QUEUES[job["on"]].cancel(str(job["id"]))
    print(f"oars: job {job['id']} is cancelled, {folder}")
    return 0


def _states(folder: Path, submitted: bool) -> Iterator[State]:
    """The state of a job, again and again, until it is over; the scheduler is asked now and then."""
    asked, (pause, longest) = 0.0, ASK_EVERY
    state = State("unknown")
    while True:
        known = status(folder, ask=False) if submitted else State("unknown") if going(folder) else State("done")
        now = time.monotonic()
        if submitted and not known.over and now - asked > pause:
            asked, known, pause = now, status(folder), min(2 * pause, longest)
        state = known if known.over else state
        yield state
        if state.over:
            return
        time.sleep(LOOK_EVERY)


def going(folder: Path) -> bool:
    """Whether an ``oars run`` holds this folder, or a host that was cut off from it goes on alone."""
    if any(folder.glob(runfolder.side("*"))):
        return True
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def voice(folder: Path) -> int:
    """The rank that speaks for a run: the first that was not lost."""
    events = _lines(folder / runfolder.EVENTS)
    lost = {rank for event in events if event.get("event") == "lost" for rank in event["ranks"]}
    return next(rank for rank in range(len(lost) + 1) if rank not in lost)


def parts(folder: Path) -> list[dict[str, Any]]:
    """When each part of a job began and ended."""
    return _lines(folder / runfolder.PARTS)


def last_step(folder: Path) -> dict[str, Any] | None:
    """The last step that a run has described of."""
    try:
        with open(folder / runfolder.METRICS, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 1024))
            lines = re.findall(rb"^\{.*\}$", file.read(), re.M)
    except OSError:
        return None
    step: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return step


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    except OSError:
        return []


def _ranks(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / runfolder.RUN).read_text())["ranks"])
    except (OSError, ValueError, KeyError):
        return None


def _copy(path: Path, begin: int) -> int:
    """Print what is new in a file; how far it was read."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            while data := file.read(1 << 16):
                sys.stdout.buffer.write(data)
                begin += len(data)
        sys.stdout.buffer.flush()
    except FileNotFoundError:
        pass
    return begin
