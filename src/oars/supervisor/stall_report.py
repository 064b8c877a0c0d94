"""Who is to blame for a stall, and what the user reads: judge the board, put what was found into words."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from oars import runfolder
from oars.engine.board import SERVES, Slot
from oars.hosts import stacks
from oars.plan import Plan

END = "end"  # of the script: a collective like any: MPI waits there for all
BUSY = 0.05  # of a core
MORE_PERIODS = 5  # from the report to the drop, by default


class Stall(NamedTuple):
    """A finding: who is blamed and why, who waits, for how long."""

    why: str  # "away", "out of step" or "network"
    blamed: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float
    clear: bool  # whether the run could go on without the blamed


def judge(slots: list[Slot], held: set[int], waits: dict[int, float]) -> Stall | None:
    """Who waits for whom; lost ranks are left out.

    ``held``: ranks that do not wait, whatever their slot says; ``waits``: seconds since each rank's slot changed.
    """
    live = [slot for slot in slots if not slot.gone and (slot.kind != SERVES or slot.rank in held)]
    waiting = [slot for slot in live if slot.kind and slot.rank not in held]
    if not waiting or any(slot.kind == "input" for slot in waiting) or all(slot.kind == END for slot in live):
        return None
    away = tuple(slot.rank for slot in live if slot not in waiting)
    ranks = tuple(slot.rank for slot in waiting)
    if away:
        return Stall("away", away, ranks, max(waits[rank] for rank in ranks), True)
    groups = Counter(map(_collective, waiting)).most_common()
    most, count = groups[0]
    clear = 2 * count > len(live)
    # Without a majority nobody knows who is right, and all are named.
    differing = tuple(slot.rank for slot in waiting if _collective(slot) != most or not clear)
    others = tuple(rank for rank in ranks if rank not in differing)
    why = "out of step" if len(groups) > 1 else "network"
    return Stall(why, differing, others, min(waits[rank] for rank in ranks), clear)


def _collective(slot: Slot) -> tuple[int, str]:
    return (0 if slot.kind == END else slot.done), slot.kind


class Case:
    """One stall, from its finding to its end."""

    def __init__(self, stall: Stall, slots: list[Slot], at: float) -> None:
        self.stall, self.slots, self.at = stall, slots, at
        self.file: str | None = None  # with every stack, in the run folder
        self.looks: dict[int, stacks.Look] = {}
        self.silent: set[str] = set()  # hosts of which nothing is heard
        self.lines: list[str] = []
        self.full = ""
        self.reported_at: float | None = None
        self.said = False  # on the screen
        self.say_next = 0.0
        self.spent: dict[int, stacks.Spent] = {}
        self.spent_at = 0.0
        self.alive: set[int] = set()  # by the last measure
        self.lived: dict[int, float] = {}  # when each blamed rank last showed a sign of life
        self.thread: threading.Thread | None = None


def report(case: Case, plan: Plan, folder: Path) -> list[str]:
    """What the user reads: who is waited for, what it is in, who waits where, and what will be done."""
    stall = case.stall
    lines = []
    if stall.why == "network":
        lines.append(f"stalled for {stall.seconds:.0f} s: all ranks are {_in(case, stall.waiting[0])}, and it does not "
                     "end: the network, or MPI, is stuck")
    else:
        blamed = ", ".join(name(case, rank, plan) for rank in stall.blamed[:3])
        blamed += f" and {len(stall.blamed) - 3} more" * (len(stall.blamed) > 3)
        if stall.why == "away":
            lines.append(f"stalled: the others have waited {stall.seconds:.0f} s for {blamed}")
        else:
            lines.append(f"stalled for {stall.seconds:.0f} s: out of step: {blamed}")
    for rank in stall.blamed[:3]:
        lines.append(f"rank {rank} {state_of(case, rank, folder)}")
        if case.slots[rank].kind != END:
            lines += ["  " + line for line in _place(case, rank)]
    waits: dict[str, list[int]] = {}
    for rank in stall.waiting:
        at = where(case, rank)
        waits.setdefault(_in(case, rank) + (f" at {at}" if at else ""), []).append(rank)
    for what, ranks in sorted(waits.items(), key=lambda item: -len(item[1]))[:3]:
        lines.append(f"{ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} {what}")
    return lines + _what_next(case, plan)


def signs_of_life(case: Case, plan: Plan) -> str:
    """What the blamed have been at since the report; nothing can be said of those in MPI."""
    does = {rank: "is at work" if rank in case.alive else "shows no sign of life" for rank in case.stall.blamed[:3]}
    return "".join(f", {name(case, rank, plan)} {what}" for rank, what in does.items() if case.stall.why == "away")


def events(case: Case, folder: Path) -> list[dict[str, Any]]:
    """The same for programs: one for each blamed rank."""
    stall = case.stall
    others = [{"rank": rank, "in": case.slots[rank].kind, "at": where(case, rank)} for rank in stall.waiting]
    about = [{"rank": rank, "host": case.slots[rank].host, "pid": case.slots[rank].pid,
              "state": state_of(case, rank, folder), "at": where(case, rank)} for rank in stall.blamed]
    return [{**one, "seconds": round(stall.seconds, 1), "why": stall.why, "others": others, "file": case.file}
            for one in about or [{"rank": None}]]


def full_text(case: Case, plan: Plan) -> str:
    """Every rank's stacks, the blamed ones' first."""
    parts = []
    for slot in sorted(case.slots, key=lambda slot: (slot.rank not in case.stall.blamed, slot.rank)):
        found = case.looks.get(slot.rank)
        head = (f"=== {name(case, slot.rank, plan)}, host {slot.host or 'unknown'}: "
                f"{'lost' if slot.gone else _in(case, slot.rank)}, waited {slot.waited:.1f} s in all")
        if found:
            head += (f"\nstate {found.state or 'none'}, {100 * found.busy:.0f} % of a core, in the kernel: "
                     f"{found.channel or '-'}; stacks taken {found.how}\n\n{found.stacks}")
        parts.append(head)
    return "\n\n".join(parts) + "\n"


def state_of(case: Case, rank: int, folder: Path) -> str:
    """What a blamed rank is doing, as the end of a sentence that begins with its number."""
    slot, found = case.slots[rank], case.looks.get(rank)
    if slot.kind == END:
        code = json.loads((folder / runfolder.exit_file(rank)).read_text())["code"]
        return f"has ended its script (exit code {code}), after collective {slot.done:,}"
    if not slot.pid:
        return "has not come up yet"
    if slot.host in case.silent:
        return f"is on {slot.host}, of which nothing is heard: the host is down, or cut off"
    if found is None:
        return f"could not be looked at: try py-spy dump --pid {slot.pid} on {slot.host}"
    if not found.state or found.state in "ZX":
        return "has died, and MPI has not told the others"
    if found.state == "T":
        return f"is stopped (SIGSTOP): kill -CONT {slot.pid} resumes it"
    if found.state == "t":
        return "is held by a debugger"
    if found.state == "D":
        return f"is in uninterruptible I/O ({found.channel or 'unknown'}): a file system or a device does not answer"
    if slot.kind:
        return f"is {_in(case, rank)}"
    if found.busy > BUSY:
        return f"is computing ({100 * found.busy:.0f} % of a core), perhaps something long"
    return f"is waiting for something itself ({found.channel or 'unknown'}), and uses no CPU"


def _place(case: Case, rank: int) -> list[str]:
    """Where a blamed rank's main thread is: its last step, and the script's lines that led there."""
    found = case.looks.get(rank)
    if found is None:
        return []
    frames, last = stacks.script_frames(found.stacks)[:3], stacks.innermost(found.stacks)
    if last is not None and last not in frames and not case.slots[rank].kind:
        frames = [last, *frames]
    if not frames:
        return [f"its stack was taken {found.how}"]
    return [f"{'at  ' if at == 0 else 'from'} {frame}" for at, frame in enumerate(frames)]


def where(case: Case, rank: int) -> str:
    """The script's line that a rank is at, if that is known."""
    if case.slots[rank].kind == END:
        return ""
    frames = stacks.script_frames(case.looks[rank].stacks) if rank in case.looks else []
    return str(frames[0]) if frames else ""


def letter(case: Case, rank: int) -> str:
    """The kernel's letter for the state a rank was found in."""
    return case.looks[rank].state if rank in case.looks else ""


def _in(case: Case, rank: int) -> str:
    slot = case.slots[rank]
    if slot.kind == END:
        return "at the end of the script"
    return f"in collective {slot.done + 1:,} ({slot.kind})" if slot.kind else f"in no collective, after {slot.done:,}"


def name(case: Case, rank: int, plan: Plan) -> str:
    """``rank 3 of 8 (node2, pid 4711)``"""
    slot = case.slots[rank]
    host = "" if slot.host in ("", plan.host) else f"{slot.host}, "
    return f"rank {rank} of {plan.ranks}" + (f" ({host}pid {slot.pid})" if slot.pid else "")


def ranks_text(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 3, 4``"""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _what_next(case: Case, plan: Plan) -> list[str]:
    """What will happen by itself; what happens at once needs no announcement."""
    if plan.on_stall is not None:
        return ["the run waits (--on-stall report)"] if plan.on_stall == "report" else []
    silent = any(case.slots[rank].host in case.silent for rank in case.stall.blamed)
    can_drop = case.stall.clear and plan.survives and not silent
    what = "such a rank is dropped" if can_drop else "the run is stopped"
    lives = " without a sign of life" if case.stall.why == "away" else ""
    return [f"after {MORE_PERIODS * plan.stall:g} s more{lives} {what} (see --on-stall)"]
