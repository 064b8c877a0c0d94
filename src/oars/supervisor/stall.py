"""Hangs: finds the rank that the others wait for, says what it is in, and does what ``--on-stall`` says.

Once a second the supervisor reads the board (``engine/board.py``). The run stalls when a rank has waited in one
collective for ``--stall`` seconds; the end of the script is one too, for there MPI waits for all. Who is to blame:

- ranks in no collective (blocked, or computing), or stopped within one;
- else those that are in another collective than most, or in their n-th when most are in their m-th (out of step);
- if all are in the same: nobody; MPI or the network does not bring it to an end.

While nobody waits there is no stall, however long a step takes, nor while the voice waits for the user's input. Time in
which the supervisor was itself stopped (a suspended job) does not count.

What is done: ``report`` tells and goes on; ``drop`` also kills the blamed rank, and the others go on without it;
``abort`` also stops the run. By default a rank is dropped after five more periods, and only if it shows no sign of
life: one that uses a core, or reads and writes, may be at something long, and is only reported. Where the others cannot
go on without a rank, or it is unclear who is out of step, the run is stopped instead.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import threading
from collections import Counter
from pathlib import Path

from oars import runfolder
from oars.engine.board import SERVES, Board, Slot
from oars.hosts import stacks
from oars.hosts.reach import Glance, Reach
from oars.plan import Plan
from oars.runfolder import UsageError
from oars.supervisor import stall_report
from oars.supervisor.screen import Screen
from oars.supervisor.stall_report import END, MORE_PERIODS, Case, Stall, judge

ABORTED = 75  # the exit code, EX_TEMPFAIL: try again
LOOKED_AT_WITHIN = 30.0  # then the report goes out with what there is
DIES_WITHIN = 10.0
HELD = ("T", "t", "Z", "X", "")  # the kernel's letters for stopped, traced and dead; or no such process
ALIVE_CPU, ALIVE_IO = 0.01, 1 << 20  # in a period: this much of a core, or so many bytes
SLOW_RUN, SLOW_SHARE = 10.0, 0.05  # a slow rank is worth a line in runs this long, from this share on


class Watch:
    """The supervisor's eye on the board."""

    def __init__(self, folder: Path, plan: Plan, screen: Screen, reach: Reach) -> None:
        self.folder, self.plan, self.screen, self.reach = folder, plan, screen, reach
        self.period: float = plan.stall or 0.0
        self.every = min(1.0, self.period / 4) if self.period else 1.0  # seconds between looks
        self.policy: str | None = plan.on_stall
        self.aborted = False
        self.closing: list[str] = []  # for the end of the run
        self.board: Board | None = None
        self._clock = self._looked = 0.0
        self._changed: dict[int, float] = {}
        self._before: list[Slot] = []
        self._case: Case | None = None
        self._files = 0
        self._known: Counter[tuple] = Counter()
        self._dropped: dict[int, float] = {}
        self._ended: set[int] = set()  # of those
        self._glances: dict[int, Glance] = {}
        self._training: tuple[float, list[Slot]] | None = None  # the board when the first step was written

    def start(self) -> None:
        """Put up the board."""
        hosts = {self.plan.host, *(name for name, _ in self.plan.hosts)}
        try:
            self.board = Board.create(self.folder / runfolder.BOARD, self.plan.ranks, len(hosts))
        except OSError as error:
            raise UsageError(f"cannot write in {self.folder}: {error.strerror}") from None

    def close(self) -> None:
        """The ranks are gone: say who was slow."""
        if self.board is None:
            return
        if self._training is not None:
            began, first = self._training
            self.closing = slow_rank(first, self.board.read(), self._clock - began)
        self.board.close()

    def look(self, now: float, seen: set[str]) -> bool:
        """Look, about once a second; whether the run is to be stopped. ``seen``: the names in the run folder."""
        if self.board is None or now - self._looked < self.every:
            return False
        self._clock += min(now - self._looked, 2 * self.every)  # a longer gap is one in which we were stopped
        self._looked = now
        slots = [slot._replace(gone=slot.gone or slot.rank in self._dropped or not self._counts(slot.rank, seen),
                               kind=END if runfolder.exit_file(slot.rank) in seen else slot.kind)
                 for slot in self.board.read()]
        for slot, before in zip(slots, [*self._before, *slots[len(self._before):]], strict=True):
            if slot != before or slot.rank not in self._changed:
                self._changed[slot.rank] = self._clock
        self._before = slots
        if self._training is None and runfolder.METRICS in seen:
            self._training = self._clock, slots[: self.plan.ranks]
        if not self.period:
            return False
        return self._cannot_be_killed() or self._follow(self._stall(slots), slots)

    def _counts(self, rank: int, seen: set[str]) -> bool:
        """Whether others may wait for this rank: not while it is on its way to join them, until they do."""
        return rank < self.plan.ranks or runfolder.there(rank) in seen

    def _stall(self, slots: list[Slot]) -> Stall | None:
        waits = {rank: self._clock - at for rank, at in self._changed.items()}
        if not any(slot.kind and waits[slot.rank] >= self.period for slot in slots):
            return None
        glances = self.reach.glance(slot for slot in slots if slot.pid and not slot.gone)
        if glances is None:
            return None if self._case is None else self._case.stall
        self._glances = glances
        held = {rank for rank, glance in glances.items() if glance.state in HELD}
        held |= {slot.rank for slot in slots if slot.host in self.reach.silent}
        stall = judge(slots, held, waits)
        return stall if stall is not None and stall.seconds >= self.period else None

    def _follow(self, stall: Stall | None, slots: list[Slot]) -> bool:
        case = self._case
        if stall is None:
            if case is not None and case.reported_at is not None:
                if case.said:
                    self.screen.say(f"the ranks continue, after {case.stall.seconds:.0f} s")
                runfolder.write_event(self.folder, "stall over", seconds=round(case.stall.seconds, 1))
            self._case = None
            return False
        same = case is not None and stall[:3] == case.stall[:3]
        if case is None or (not same and case.reported_at is not None and self._clock - case.at >= self.period):
            case = self._case = Case(stall, slots, self._clock)
            case.thread = threading.Thread(target=self._examine, args=(case,), daemon=True)
            case.thread.start()
        assert case.thread is not None
        if same:
            case.stall = stall
        if case.thread.is_alive() and self._clock - case.at < LOOKED_AT_WITHIN:
            return False
        if case.reported_at is None:
            return self._tell(case)
        return self._again(case)

    def _examine(self, case: Case) -> None:
        """Look at every rank, in a thread of its own: it takes seconds, and the screen must go on."""
        case.silent = set(self.reach.silent)
        case.looks = self.reach.look(slot for slot in case.slots if slot.pid and not slot.gone)
        case.lines = stall_report.report(case, self.plan, self.folder)
        case.full = stall_report.full_text(case, self.plan)

    def _tell(self, case: Case) -> bool:
        """The report; then what the user asked for."""
        case.reported_at, case.say_next = self._clock, case.stall.seconds + self.period
        self._measure(case)
        blamed = ((stall_report.where(case, rank), stall_report.letter(case, rank)) for rank in case.stall.blamed)
        place = *case.stall[:2], *blamed
        self._known[place] += 1
        times = self._known[place]
        # A rank that is late in every epoch shall not fill the screen: the first, second, fourth, eighth … time, and
        # whenever it takes longer than this.
        if self.policy in ("drop", "abort") or times & (times - 1) == 0:
            self._say(case, times)
        for event in stall_report.events(case, self.folder):
            runfolder.write_event(self.folder, "stall", **event)
        if self.policy == "abort":
            return self._abort("--on-stall abort")
        return self._drop(case, set(case.stall.blamed)) if self.policy == "drop" else False

    def _say(self, case: Case, times: int) -> None:
        """On the screen, and in full in stall-<n>.txt."""
        case.said = True
        self._files += 1
        case.file = runfolder.stall(self._files)
        lines = case.lines or stall_report.report(case, self.plan, self.folder)  # the latter: looking took too long
        with contextlib.suppress(OSError):  # a full disk must not end the run
            (self.folder / case.file).write_text("\n".join(lines) + "\n\n" + case.full)
        stacks_at = f"every thread's stack: {self.folder / case.file}"
        if times == 1:
            self.screen.say(lines[0])
            self.screen.write(2, "".join(f"  {line}\n" for line in [*lines[1:], stacks_at]).encode())
        else:
            self.screen.say(f"{lines[0]}, where it was before, {times} times now; {stacks_at}")

    def _measure(self, case: Case) -> None:
        """Note what the blamed have used up. MPI spins, so that says something only of ranks in none of its calls."""
        case.spent_at = self._clock
        case.spent = {rank: self._glances[rank].spent for rank in case.stall.blamed
                      if rank in self._glances and not case.slots[rank].kind}

    def _again(self, case: Case) -> bool:
        """The same stall goes on: a line now and then, ever more seldom; by default the drop after five periods."""
        stall = case.stall
        if self._clock - case.spent_at >= self.period:
            before, since = case.spent, case.spent_at
            self._measure(case)
            case.alive = {rank for rank, now in case.spent.items() if self._glances[rank].state not in HELD
                          and rank in before and _lives(before[rank], now, self._clock - since)}
            case.lived.update(dict.fromkeys(case.alive, self._clock))
        if stall.seconds >= case.say_next:
            case.say_next = 2 * stall.seconds
            if case.said:
                self.screen.say(f"stalled for {stall.seconds:.0f} s now" + stall_report.signs_of_life(case, self.plan))
            else:
                self._say(case, 1)
        patience, reported_at = MORE_PERIODS * self.period, case.reported_at or 0.0
        if self.policy is not None or self._clock - reported_at < patience:
            return False
        lost = {rank for rank in stall.blamed if self._clock - case.lived.get(rank, reported_at) >= patience}
        return self._drop(case, lost) if lost or not stall.blamed else False

    def _drop(self, case: Case, ranks: set[int]) -> bool:
        """Kill these ranks; whether the run must end instead."""
        names = stall_report.ranks_text(sorted(ranks))
        if not ranks:
            return self._abort("there is no rank to blame, and so none to drop")
        if not case.stall.clear:
            return self._abort("no majority of the ranks is in step, so none is dropped")
        if not self.plan.survives:
            return self._abort(f"the run cannot continue without {names} (no fault tolerance here)")
        slots = [case.slots[rank] for rank in sorted(ranks)]
        if not all(slot.pid for slot in slots):
            return self._abort(f"{names} cannot be dropped: nobody knows where they are")
        silent = sorted({slot.host for slot in slots} & self.reach.silent)
        if silent:  # MPI waits for it, and nobody there can end it
            return self._abort(f"{silent[0]} does not answer, so {names} cannot be dropped")
        for slot in slots:
            self.reach.kill(slot.host, slot.pid, signal.SIGKILL)
            self._dropped[slot.rank] = self._clock
            runfolder.write_event(self.folder, "drop", rank=slot.rank, host=slot.host, pid=slot.pid)
        self.screen.say(f"dropped {names}: the others continue")
        self._changed = {rank: self._clock for rank in self._changed}  # a period for the others to recover
        self._case = None
        return False

    def _cannot_be_killed(self) -> bool:
        """A rank that SIGKILL does not end hangs in the kernel; its MPI would keep the others waiting for ever."""
        late = [rank for rank, at in self._dropped.items()
                if self._clock - at > DIES_WITHIN and rank not in self._ended]
        if not late:
            return False
        glances = self.reach.glance(self._before[rank] for rank in late)
        for rank, glance in (glances or {}).items():
            if rank in late and glance.state in ("D", "S", "R", "T"):
                return self._abort(f"rank {rank} cannot be killed")
            self._ended.add(rank)
        return False

    def _abort(self, why: str) -> bool:
        self.screen.say(f"the run is stopped: {why}")
        runfolder.write_event(self.folder, "stopped", why=why)
        self.aborted = True
        return True


def slow_rank(first: list[Slot], last: list[Slot], seconds: float) -> list[str]:
    """A line about the rank that the others wait for: it waits least, and by how much less than they is lost."""
    waited = {slot.rank: slot.waited - first[slot.rank].waited for slot in last[: len(first)]
              if not slot.gone and slot.kind != SERVES}
    if seconds < SLOW_RUN or len(waited) < 2:
        return []
    slow = min(waited, key=lambda rank: waited[rank])
    share = (statistics.median(waited[rank] for rank in waited if rank != slow) - waited[slow]) / seconds
    if share <= SLOW_SHARE:
        return []
    return [f"rank {slow} ({last[slow].host}) was slow: the others waited {100 * share:.0f} % of the time for it"]


def _lives(before: stacks.Spent, now: stacks.Spent, seconds: float) -> bool:
    return now.cpu - before.cpu > ALIVE_CPU * seconds or now.io - before.io > ALIVE_IO
