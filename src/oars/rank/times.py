"""Where a rank's time goes: ``times-<rank>.jsonl``, lines of seconds spent so far in each phase of the training loop.

An adapter calls ``mark`` whenever one phase ends and another begins: the time since the last mark is the phase's that
ended, less what was spent talking to other ranks, which is ``exchange``. A mark costs less than a microsecond, so every
step is timed; a line is written every second at first, and then whenever the run has become a hundredth longer, so that
a day's file has some 800 lines.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, time  # as they are now: scripts are given another clock later
from typing import TYPE_CHECKING

from oars import runfolder

if TYPE_CHECKING:
    from oars.engine.world import World

PHASES = ("data", "forward", "backward", "exchange", "update", "other")
EVERY = 1.0  # seconds
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Times:
    """One rank's clock. It starts with the end of the first step, whose time is not like that of the others."""

    def __init__(self, folder: Path, world: World | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.inside = False  # a phase that must not be cut into others (a backward within a backward)
        self.device_memory: Callable[[], int] | None = None  # bytes in use on a GPU, where an adapter knows
        self._path = folder / runfolder.times(world.origin if world is not None else 0)
        self._world, self._pid = world, os.getpid()
        self._began: float | None = None
        self._at = self._talked = self._due = 0.0
        self._steps = 0
        self._new = False  # something to write

    def mark(self, phase: str) -> None:
        """``phase`` ends here."""
        if self._began is None:
            return
        now = perf_counter()
        spent, self._at = now - self._at, now
        if self._world is not None:
            talked = self._world.seconds - self._talked
            self._talked = self._world.seconds
            self.seconds["exchange"] += talked
            spent -= talked
        self.seconds[phase] += spent

    def stepped(self, step: int) -> None:
        """A step is done; write a line if it is time."""
        if self._began is None:
            self._began = self._at = perf_counter()
            self._talked = self._world.seconds if self._world is not None else 0.0
            self._due = self._began + EVERY
            return
        self._steps, self._new = step, True
        if self._at >= self._due:
            self._due = self._at + max(EVERY, (self._at - self._began) / 100)
            self.write()

    def write(self) -> None:
        """Append a line. A full disk costs the line, not the training."""
        if not self._new or os.getpid() != self._pid:
            return
        self._new = False
        line = {"step": self._steps, "time": round(time(), 3),
                **{phase: round(spent, 6) for phase, spent in self.seconds.items()}, "memory": _resident()}
        if self.device_memory is not None:
            line["device_memory"] = self.device_memory()
        with contextlib.suppress(OSError):
            runfolder.append(self._path, json.dumps(line) + "\n")


def _resident() -> int | None:
    """Bytes of memory this process holds now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None
