"""The ranks' processes, as the supervisor reaches them: by the kernel on its own host, elsewhere through a deputy.

Nothing here waits, but for ``look``: a deputy answers within a second, and what it said last stands until then.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from oars import runfolder
from oars.engine.board import Slot
from oars.hosts import stacks
from oars.hosts.hub import Hub

ANSWERS_WITHIN = 5.0
LOOKS_WITHIN = 20.0  # py-spy may take half of it
HOSTS_COME_WITHIN = 120.0


class Glance(NamedTuple):
    """The kernel's letter for a process's state, and what it has used up."""

    state: str
    spent: stacks.Spent


class Reach:
    """One run's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname()
        self.hub: Hub | None = None  # of this host's ranks, where there are other hosts
        self.silent: set[str] = set()  # hosts whose deputy does not answer
        self._numbers = itertools.count(1)
        self._asked: dict[str, tuple[int, float]] = {}  # host: the question it has not answered, and when it came
        self._answers: dict[str, tuple[float, dict[int, Glance]]] = {}  # host: its last answer, and when it was asked

    def kill(self, host: str, pid: int, number: int) -> None:
        """Send a signal."""
        if host == self.host:
            send(pid, number)
        else:
            self._order(host, do="kill", pid=pid, signal=int(number))

    def cut(self, addresses: list[str], hosts: Iterable[str]) -> None:
        """Let the ranks on these hosts close their connections to the addresses, from where nothing comes any more."""
        for host in hosts:
            if host == self.host and self.hub is not None:
                self.hub.tell({"cut": addresses})
            else:
                self._order(host, do="cut", addresses=addresses)

    def glance(self, slots: Iterable[Slot]) -> dict[int, Glance] | None:
        """What these ranks are at; of a silent host's nothing is known. None: ask again, a deputy has yet to answer."""
        here, elsewhere = self._by_host(slots)
        spent = stacks.spent(here.values())
        found = {rank: Glance(stacks.state(pid), spent[pid]) for rank, pid in here.items()}
        for host, ranks in elsewhere.items():
            self._hear(host, ranks)
        now = time.monotonic()
        for host in elsewhere.keys() - self.silent:
            at, answer = self._answers.get(host, (0.0, {}))
            if now - at > ANSWERS_WITHIN:  # of an earlier stall, or none
                return None
            found.update(answer)
        return found

    def _hear(self, host: str, ranks: list[int]) -> None:
        """Take a deputy's answer if it is there; ask (again) if it is not asked already."""
        now = time.monotonic()
        number, at = self._asked.get(host, (0, now))
        answer = self._answer(host, number) if number else None
        if answer is not None:
            self.silent.discard(host)
            self._answers[host] = at, {int(rank): Glance(state, stacks.Spent(cpu, io))
                                    for rank, (state, cpu, io) in answer.items()}
        elif now - at > ANSWERS_WITHIN:
            self.silent.add(host)
        if answer is not None or not number:
            self._asked[host] = self._order(host, do="glance", ranks=ranks), now

    def look(self, slots: Iterable[Slot]) -> dict[int, stacks.Look]:
        """Their stacks, and more. Takes seconds."""
        here, elsewhere = self._by_host(slots)
        asked = {host: self._order(host, do="look", ranks=ranks) for host, ranks in elsewhere.items()
                 if host not in self.silent}
        found = stacks.look(self.folder, here) if here else {}
        deadline = time.monotonic() + LOOKS_WITHIN
        while asked and time.monotonic() < deadline:
            time.sleep(0.1)
            for host, number in list(asked.items()):
                answer = self._answer(host, number)
                if answer is not None:
                    del asked[host]
                    found.update({int(rank): stacks.Look(*look) for rank, look in answer.items()})
        return found

    def _by_host(self, slots: Iterable[Slot]) -> tuple[dict[int, int], dict[str, list[int]]]:
        """The pids of ranks on this host, and the ranks of every other."""
        here: dict[int, int] = {}
        elsewhere: dict[str, list[int]] = {}
        for slot in slots:
            if slot.host == self.host:
                here[slot.rank] = slot.pid
            elif slot.host:
                elsewhere.setdefault(slot.host, []).append(slot.rank)
        return here, elsewhere

    def _order(self, host: str, **order: Any) -> int:
        number = next(self._numbers)
        runfolder.append(self.folder / runfolder.orders(host), json.dumps({**order, "number": number}) + "\n")
        return number

    def _answer(self, host: str, number: int) -> dict[str, Any] | None:
        path = self.folder / runfolder.answer(host, number)
        try:
            data = json.loads(path.read_text())
            path.unlink()
            return data
        except OSError:
            return None


def missing_hosts(hosts: list[tuple[str, int]], seen: set[str], seconds: float) -> str:
    """Which of a plan's hosts has died, or not come up in all these seconds; ``seen``: the names in the run folder."""
    gone = sorted(name.partition("-")[2] for name in seen if name.startswith(("gone-", "dark-")))
    if gone:
        return f"{', '.join(gone)} was lost while the ranks were starting"
    first, missing = 0, []
    for host, ranks in hosts:
        if not any(runfolder.born(rank) in seen for rank in range(first, first + ranks)):
            missing.append(host)
        first += ranks
    if missing and seconds > HOSTS_COME_WITHIN:
        return f"no rank has come up on {', '.join(missing)} in {seconds:.0f} s"
    return ""


def lost_host(log: str) -> str:
    """The host that mpirun lost, by what it says before it ends everything."""
    found = re.search(r"lost communication with a remote daemon.*Remote daemon: .* on node (\S+)", log, re.S)
    return found[1] if found else ""


def not_started(log: str) -> str:
    """Why mpirun's daemon could not be started on a host: the last words of the remote shell."""
    found = re.search(r"(.*?)^-+\nA daemon failed to report back.*?Remote host:\s+(\S+)", log, re.S | re.M)
    if found is None:
        return ""
    said = [line for line in found[1].splitlines() if line.strip() and "plm:ssh" not in line]
    return f"cannot start ranks on {found[2]}: {said[-1] if said else 'nothing was said'}"


def start_deputy(folder: Path, ranks: range) -> None:
    """In a rank: start the deputy for these ranks of this host, outside of what MPI watches."""
    null = subprocess.DEVNULL
    subprocess.Popen([sys.executable, "-m", "oars.supervisor.deputy", str(folder), str(ranks.start), str(ranks.stop)],
                     stdin=null, stdout=null, stderr=null, start_new_session=True)


def send(pid: int, number: int) -> None:
    """A signal to a process of this host that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
