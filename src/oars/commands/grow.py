"""``oars grow``: ask a run that is going for more ranks, and wait until it has them.

The request is a file in the run folder; the run's own ranks do the rest (``adapt/torch/replay/join.py``), for MPI lets
nobody in who was not started by one of them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.plan import Plan
from oars.runfolder import UsageError, find_folder
from oars.supervisor.screen import complain
from oars.supervisor.snapshot_requests import take_lock

LOOK_EVERY = 0.05  # seconds


def grow(run: str, ranks: str) -> int:
    """Let ``ranks`` (``+2``, or ``6`` in all) join a run; the exit code."""
    folder = find_folder(run, runfolder.RUN)
    plan = Plan.read(folder)
    number = ranks.removeprefix("+")
    in_all = number if ranks == number else str(plan.ranks + int(number))
    if not _goes_on(folder):
        raise UsageError(f"{folder.name} is not running: oars resume {folder.name} -n {in_all} continues from its "
                         "snapshot, if it has one")
    if why := unable(plan):
        raise UsageError(f"{folder.name} cannot grow while it runs ({why}): stop it with SIGTERM, then "
                         f"oars resume {folder.name} -n {in_all}")
    if (folder / runfolder.GROW).exists() or (folder / runfolder.GROWING).exists():
        raise UsageError(f"{folder.name} is growing already: wait until it has")
    (folder / runfolder.GROWN).unlink(missing_ok=True)
    runfolder.put(folder / runfolder.GROW,
                  json.dumps({"more": int(number)} if ranks != number else {"total": int(number)}))
    try:
        answer = _answer(folder)
    except KeyboardInterrupt:
        return _take_back(folder)
    if answer is None:
        complain(f"{folder.name} ended before it had grown")
        return 1
    if "failed" in answer:
        complain(f"{folder.name} did not grow: {answer['failed']}")
        return 1
    print(f"{folder.name} runs on {answer['ranks']} ranks from step {answer['step'] + 1} on")
    return 0


def unable(plan: Plan) -> str:
    """Why a run with this plan cannot grow, or ``""``."""
    if plan.ranks == 1:
        return "it has one rank, which does not use MPI"
    if plan.gpus and not plan.share_gpus:
        return "its ranks talk by NCCL"
    if not plan.survives:
        return "its MPI has no ULFM"
    if plan.sync != "allreduce":
        return f"--sync {plan.sync}: its ranks have different weights"
    if plan.snapshot is None:
        return "--snapshot off"
    if plan.batch == "keep":
        return "--batch keep: its batch grows with the ranks"
    return ""


def _goes_on(folder: Path) -> bool:
    try:
        os.close(take_lock(folder))
        return False
    except UsageError:
        return True


def _answer(folder: Path) -> dict[str, Any] | None:
    """What the run says in the end; None if it ends without a word."""
    said = False
    since = time.monotonic()
    while True:
        going = _goes_on(folder)
        try:
            return json.loads((folder / runfolder.GROWN).read_text())
        except (OSError, ValueError):
            pass
        if not going:
            return None
        if not said and time.monotonic() - since > 5 and not (folder / runfolder.SNAPSHOTS).is_dir():
            said = True
            complain(f"{folder.name} has made no optimizer step yet: it can grow after the first")
        time.sleep(LOOK_EVERY)


def _take_back(folder: Path) -> int:
    try:
        os.unlink(folder / runfolder.GROW)
        complain("the request is withdrawn")
    except OSError:
        complain(f"too late to withdraw it: {folder.name} is growing")
    return 130
