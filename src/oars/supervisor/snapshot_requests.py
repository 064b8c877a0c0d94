"""The supervisor's side of snapshots: it holds the run folder, asks the ranks for a snapshot, and says what is kept.

It asks by a file, ``snapshot-now`` ("go", or "stop" if the run is to end then), and is answered by another,
``snapshot-done``: the step, or nothing if none could be written. ``resumed`` says that a resumed run has come to where
it was. The ranks' side is ``oars.adapt.torch.replay.snapshots``.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from oars import runfolder
from oars.plan import Plan
from oars.runfolder import UsageError
from oars.supervisor.screen import Screen

GRACE = 25.0  # seconds for a last snapshot: schedulers give 30 or more before they kill


class Asking:
    """One run's; ``leaving`` once the ranks are to take a snapshot and stop."""

    def __init__(self, folder: Path, plan: Plan, screen: Screen) -> None:
        self.folder, self.plan, self.screen = folder, plan, screen
        self.leaving: float | None = None

    def ask(self, stop: bool) -> bool:
        """Ask the ranks for a snapshot; False if they cannot take one yet."""
        if not (self.folder / runfolder.SNAPSHOTS).is_dir() or self.plan.snapshot is None:
            return False
        if self.plan.resume and not (self.folder / runfolder.RESUMED).exists():
            return False  # what it goes on from is still the newest
        runfolder.put(self.folder / runfolder.REQUEST, "stop" if stop else "go")
        if stop:
            self.leaving = time.monotonic()
        return True

    def answered(self, now: float, seen: set[str]) -> bool:
        """Whether the last snapshot is on disk, or has taken too long."""
        return self.leaving is not None and (runfolder.DONE in seen or now - self.leaving > GRACE)

    def say_kept(self) -> None:
        """What a run that was asked to end has left to go on from."""
        kept = sorted((self.folder / runfolder.SNAPSHOTS).glob("*.snap"))
        try:
            done = (self.folder / runfolder.DONE).read_text()
        except OSError:
            done = ""
        how = f"continue with: oars resume {self.folder.name}"
        if done:
            self.screen.say(f"snapshot of step {done} kept, {how}")
        elif kept:
            new = "no new snapshot could be taken; " if self.leaving is not None else ""
            self.screen.say(f"{new}the snapshot of step {int(kept[-1].stem)} is kept, {how}")
        elif self.leaving is not None:
            self.screen.say("no snapshot could be taken")


def take_lock(folder: Path) -> int:
    """One supervisor per run folder: the lock is on the folder itself, and goes with the process."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(f"{folder} is still running: another oars uses it") from None
    except OSError:  # a file system that locks no folders (NFS)
        pass
    return fd
