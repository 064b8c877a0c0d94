"""The supervisor's part when hosts go dark: which side goes on, and how its ranks learn it.

A host's keeper leaves ``dark-<host>`` when nothing has been heard of it for a lease. If the ranks that can still be
reached go on (``goes_on``: most of the living, or half of them with the voice), they do so after a quarter of a lease
more, by when the others have stopped by themselves. Else this side stops, and touches nothing in the run folder any
more: the other may be at work there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from oars import runfolder
from oars.hosts.lookout import WAITS, addresses_of, claim, goes_on, lease, living_at
from oars.hosts.reach import Reach
from oars.plan import Plan
from oars.runfolder import CutOff


class Sides:
    """One run's."""

    def __init__(self, folder: Path, plan: Plan, say: Callable[[str], None], reach: Reach) -> None:
        self.folder, self.plan, self.say, self.reach = folder, plan, say, reach
        self.dark: dict[str, float] = {}  # host: when it was seen to be
        self.left: set[str] = set()  # those the others go on without

    def look(self, now: float, seen: set[str]) -> None:
        """Take a side if there is one to take; CutOff if it is the side that stops."""
        dark = runfolder.dark("")
        names = {name.removeprefix(dark) for name in seen if name.startswith(dark)} - self.left
        if not names or not self.plan.survives or not any(name.startswith(runfolder.pid("")) for name in seen):
            return  # the last: they are starting, and a host is missing
        for name in names:
            self.dark.setdefault(name, now)
        living = living_at(self.folder)
        here = [rank for rank, host in living.items() if host not in names]
        if not goes_on(here, living):
            self._stop(names, living)
        waits = WAITS * lease(self.plan)
        if now - max(self.dark[name] for name in names) < waits:
            return
        if not claim(self.folder, len(living), socket.gethostname()):
            self._stop(names, living)
        self.left |= names
        lost = sorted(living.keys() - set(here))
        text = f"nothing has been heard of {' and '.join(sorted(names))} for {lease(self.plan) + waits:.0f} s"
        self.say(f"{text}: the ranks on the other hosts continue without them")
        runfolder.write_event(self.folder, "dark", hosts=sorted(names), ranks=lost)
        others = {living[rank] for rank in here} | {socket.gethostname()}
        self.reach.cut(addresses_of(self.folder, names, others), others)

    def _stop(self, names: set[str], living: dict[int, str]) -> None:
        theirs = sum(host in names for host in living.values())
        raise CutOff(f"this host is cut off from {' and '.join(sorted(names))}, where {theirs} of the {len(living)} "
                     f"ranks are: those here are stopped. If the others go on, their output is in {self.folder}; "
                     f"if they do not: oars resume {self.folder.name}")
