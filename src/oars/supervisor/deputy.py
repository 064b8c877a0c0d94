"""The supervisor's deputy on another host: it looks after the ranks there, whose processes only that host can see.

The first rank of such a host starts it. It answers through the run folder, as all do:

- ``orders-<host>`` has a line for each thing the supervisor wants: ``kill`` a process with a signal (Ctrl-C, a drop), a
  ``glance`` (is it stopped? what has it used up?), a ``look`` (its stacks as well, which takes seconds), or a ``cut``
  (the ranks here are to close their connections to a host that cannot be reached);
- ``answer-<host>-<number>.json`` is what was seen;
- ``dead-<r>`` says that a rank's process has ended.

When all its ranks have ended it goes, and if one ended without a word, so does what they left running. If this host
went on alone, cut off from the supervisor's (``oars.hosts.lookout``), it also does what that does at the end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.hosts import stacks
from oars.hosts.hub import HUB, say
from oars.hosts.kill_all import kill_all
from oars.hosts.reach import send
from oars.plan import Plan
from oars.supervisor import stage
from oars.supervisor.closing import clear_marks, seal

LOOKS_EVERY = 0.25  # seconds
DEAD = ("Z", "X", "")  # the kernel's letters; or no such process


class Deputy:
    """One host's."""

    def __init__(self, folder: Path, ranks: range) -> None:
        self.folder, self.ranks, self.host = folder, ranks, socket.gethostname()
        self.pids: dict[int, int] = {}
        self.dead: set[int] = set()
        self.read = 0  # bytes of the orders

    def serve(self) -> None:
        """Until no rank is left."""
        plan = Plan.read(self.folder)
        copy = stage.mark(plan, self.folder, self.host)
        while len(self.dead) < len(self.ranks):
            time.sleep(LOOKS_EVERY)
            self._count()
            for order in self._orders():
                self._obey(order)
        quiet = [rank for rank in self.ranks if not (self.folder / runfolder.exit_file(rank)).exists()]
        if quiet:
            kill_all(self.folder, spare="prted")
        if any(path.read_text() == self.host for path in self.folder.glob(runfolder.side("*"))):
            self._close()
        stage.clear(plan)
        copy.unlink(missing_ok=True)

    def _close(self) -> None:
        """Nobody else does: the command is on the other side of a cut link."""
        codes = [json.loads(path.read_text())["code"] for path in self.folder.glob(runfolder.exit_file("*"))]
        seal(self.folder, max(codes, default=1) if (self.folder / runfolder.SUMMARY).exists() else 1)
        clear_marks(self.folder)
        say(os.environ[HUB], over=True)

    def _count(self) -> None:
        """Who has come, and who has gone."""
        for rank in self.ranks:
            if rank not in self.pids:
                try:
                    self.pids[rank] = json.loads((self.folder / runfolder.born(rank)).read_text())[1]
                except (OSError, ValueError):  # not there yet; or the run is over, and its marks are gone
                    if not (self.folder / runfolder.BOARD).exists():
                        self.dead.add(rank)
            elif rank not in self.dead and stacks.state(self.pids[rank]) in DEAD:
                self.dead.add(rank)
                if (self.folder / runfolder.born(rank)).exists():
                    (self.folder / runfolder.dead(rank)).touch()

    def _orders(self) -> list[dict[str, Any]]:
        try:
            with open(self.folder / runfolder.orders(self.host), "rb") as file:
                file.seek(self.read)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _obey(self, order: dict[str, Any]) -> None:
        if order["do"] == "cut":
            say(os.environ[HUB], cut=order["addresses"])
            return
        if order["do"] == "kill":
            if order["pid"] in self.pids.values():
                send(order["pid"], order["signal"])
            return
        pids = {rank: pid for rank, pid in self.pids.items() if rank in order["ranks"]}
        spent = stacks.spent(pids.values())
        seen: dict[int, Any] = {rank: [stacks.state(pid), *spent[pid]] for rank, pid in pids.items()}
        if order["do"] == "look":
            seen = {rank: list(look) for rank, look in stacks.look(self.folder, pids).items()}
        path = self.folder / runfolder.answer(self.host, order['number'])
        runfolder.put(path, json.dumps(seen))


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        Deputy(folder, range(int(sys.argv[2]), int(sys.argv[3]))).serve()
    except Exception:  # a bug of ours: nobody reads what it prints
        with open(folder / runfolder.DEPUTY_LOG, "a") as log:
            log.write(f"{socket.gethostname()}: {traceback.format_exc()}")


if __name__ == "__main__":
    main()
