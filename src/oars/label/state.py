"""What is known of the rows: a fold of the log's events, in memory.

Classes have numbers in the order in which they were made. A renamed class keeps its number; a merged one stands for
another from then on. So labels need not be touched, and undoing either is exact. Every event that changes rows keeps
what they were before; undo puts that back where nobody has changed the row since.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from oars.label.errors import LabelError

HOW = ("human", "page", "model", "exam", "audit", "disputed")  # codes are places in this
DISPUTED = HOW.index("disputed")
UNDOABLE = ("label", "accept", "class", "rename", "merge")


@dataclasses.dataclass
class Change:
    """Rows that an event has changed, and what they were."""

    kind: str
    who: str
    text: str
    rows: np.ndarray
    before: np.ndarray
    after: np.ndarray
    names: tuple[list[str], dict[int, int]] | None = None  # of the classes, before
    names_after: tuple[list[str], dict[int, int]] | None = None


class State:
    """Rows are records of ``KNOWN``; ``last`` is the number of the last event."""

    KNOWN = np.dtype([("label", "i2"), ("how", "i1"), ("who", "i2"), ("event", "i8")])

    def __init__(self, rows: int, exam: np.ndarray) -> None:
        self.known = np.zeros(rows, self.KNOWN)
        self.known["label"] = -1
        self.exam = np.asarray(exam, np.int64)
        self.in_exam = np.zeros(rows, bool)
        self.in_exam[self.exam] = True
        self.names: list[str] = []
        self.merged: dict[int, int] = {}
        self.people: dict[str, int] = {}
        self.actions: dict[str, int] = {}
        self.called: dict[str, str] = {}
        self.disputes: dict[int, dict[str, int]] = {}
        self.last = 0
        self.version = 0  # of what the model learns from
        self.audits: dict[int, dict[str, Any]] = {}
        self._changes: dict[int, Change] = {}
        self._done: dict[str, list[int]] = {}
        self._undone: dict[str, list[int]] = {}
        self._history: dict[int, list[int]] = {}

    def grow(self, count: int) -> None:
        """Rows that have come after the last; none of them is of the exam."""
        more = np.zeros(count, self.KNOWN)
        more["label"] = -1
        self.known = np.concatenate([self.known, more])
        self.in_exam = np.concatenate([self.in_exam, np.zeros(count, bool)])

    # ---- classes -----------------------------------------------------------------------------------------------------

    def stands_for(self, number: int) -> int:
        """The class that a merged one has become."""
        while number in self.merged:
            number = self.merged[number]
        return number

    def classes(self) -> list[int]:
        """The numbers of the classes there are."""
        return [number for number in range(len(self.names)) if number not in self.merged]

    def number(self, name: str) -> int:
        """Of a class by its name."""
        for number in self.classes():
            if self.names[number] == name:
                return number
        raise LabelError(f"there is no class {name[:80]!r}: make it first", 404)

    def labels(self) -> np.ndarray:
        """The class of each row, -1 for none; disputed rows have none."""
        table = np.array([self.stands_for(n) for n in range(len(self.names))] + [-1], np.int64)
        labels = table[self.known["label"]]
        labels[self.known["how"] == DISPUTED] = -1
        return labels

    # ---- the fold ----------------------------------------------------------------------------------------------------

    def apply(self, n: int, who: str, kind: str, data: dict[str, Any]) -> None:
        """One event more."""
        self.last = n
        self.people.setdefault(who, len(self.people))
        self.actions[who] = self.actions.get(who, 0) + 1
        if kind == "undo":
            self._swap(data["of"], n, False)
        elif kind == "redo":
            self._swap(data["of"], n, True)
        elif kind == "person":
            self.called[who] = data["name"]
        elif kind == "audit":
            self.audits[data["class"]] = {**data, "event": n}
        elif kind in UNDOABLE:
            self._do(n, who, kind, data)
            self._done.setdefault(who, []).append(n)
            self._undone[who] = []

    def _do(self, n: int, who: str, kind: str, data: dict[str, Any]) -> None:
        rows = np.asarray(data.get("rows", ()), np.int64)
        names = (list(self.names), dict(self.merged))
        before = self.known[rows].copy()
        if kind == "class":
            self.names.append(data["name"])
        elif kind == "rename":
            self.names[data["class"]] = data["to"]
        elif kind == "merge":
            self.merged[data["class"]] = data["into"]
        else:
            self._label(n, who, rows, data)
        self._changes[n] = Change(kind, who, data.get("text", kind), rows, before, self.known[rows].copy(), names,
                                  (list(self.names), dict(self.merged)))
        for row in rows.tolist():
            self._history.setdefault(row, []).append(n)
        self.version += 1

    def _label(self, n: int, who: str, rows: np.ndarray, data: dict[str, Any]) -> None:
        label = data["class"]
        conflicts = {int(row): int(other) for row, other in data.get("conflicts", ())}
        by = {number: name for name, number in self.people.items()}
        for row, other in conflicts.items():
            known = self.known[row]
            said = self.disputes.setdefault(row, {})
            if known["how"] != DISPUTED:
                said[by[int(known["who"])]] = other
            said[who] = label
        self.known["label"][rows] = label
        self.known["how"][rows] = HOW.index(data["how"]) if label >= 0 else 0
        self.known["who"][rows] = self.people[who]
        self.known["event"][rows] = n
        if conflicts:
            self.known["how"][list(conflicts)] = DISPUTED

    def _swap(self, of: int, n: int, again: bool) -> None:
        """Undo, or redo, an event where its rows are still as it left them (or found them)."""
        change = self._changes[of]
        now = self.known[change.rows]
        here, there = (change.before, change.after) if again else (change.after, change.before)
        same = now == here
        self.known[change.rows[same]] = there[same]
        assert change.names is not None and change.names_after is not None
        if change.names != change.names_after:
            self._names_again(change, again)
        undone, done = self._undone.setdefault(change.who, []), self._done.setdefault(change.who, [])
        (undone if again else done).remove(of)
        (done if again else undone).append(of)
        for row in change.rows.tolist():
            self._history.setdefault(row, []).append(n)
        self.version += 1

    def _names_again(self, change: Change, again: bool) -> None:
        """Only what the event itself changed: others may have made classes since."""
        assert change.names is not None and change.names_after is not None
        (old, old_merged), (new, new_merged) = change.names, change.names_after
        if change.kind == "class":
            made = len(old)
            if again:
                self.merged.pop(made, None)
            else:
                self.merged[made] = -1
        for number in range(len(old)):
            if old[number] != new[number]:
                self.names[number] = new[number] if again else old[number]
        # ``hinders`` refuses the rest today; a log of before may have it, and must not make two classes each other.
        for number in set(new_merged) - set(old_merged):
            into = new_merged[number]
            if not again:
                if self.merged.get(number) == into:
                    del self.merged[number]
            elif number not in self.merged and self.stands_for(into) != number:
                self.merged[number] = into

    # ---- questions ---------------------------------------------------------------------------------------------------

    def hinders(self, of: int, again: bool) -> str | None:
        """Why an event cannot be undone (or done again): what others have done with its classes since."""
        change = self._changes[of]
        assert change.names is not None and change.names_after is not None
        (old, old_merged), (new, new_merged) = change.names, change.names_after
        if change.kind == "class":
            number = len(old)
            name = self.names[number]
            if not again:
                used = (self.known["label"] == number).any() or number in self.merged.values() or number in self.merged
                return f"the class {name} is in use: give its images another one first" if used else None
        elif change.kind == "rename":
            number = next(n for n in range(len(old)) if old[n] != new[n])
            left, name = (old[number], new[number]) if again else (new[number], old[number])
            if self.names[number] != left:
                return f"somebody has called {left} {self.names[number]} since"
        elif change.kind == "merge":
            number = next(iter(set(new_merged) - set(old_merged)))
            name, into = self.names[number], new_merged[number]
            if again:
                gone = [n for n in (number, into) if n in self.merged]
                return f"{self.names[gone[0]]} is no class of its own any more" if gone else None
        else:
            here, there = (change.before, change.after) if again else (change.after, change.before)
            found = np.unique(there["label"][self.known[change.rows] == here]).tolist()
            gone = [n for n in found if n >= 0 and self.stands_for(n) < 0]
            return f"the class {self.names[gone[0]]} was taken back by whoever made it" if gone else None
        same = [n for n in self.classes() if n != number and self.names[n] == name]
        return f"there is another class {name} by now: rename that one first" if same else None

    def next_undo(self, who: str) -> int | None:
        """The event that this person's undo takes back."""
        done = self._done.get(who)
        return done[-1] if done else None

    def next_redo(self, who: str) -> int | None:
        """The event that this person's redo does again."""
        undone = self._undone.get(who)
        return undone[-1] if undone else None

    def text(self, n: int | None) -> str | None:
        """What an event did, in words."""
        return None if n is None else self._changes[n].text

    def history(self, row: int) -> list[int]:
        """The events that changed a row."""
        return self._history.get(row, [])

    def change(self, n: int) -> Change | None:
        """What an event changed; None for undo and redo."""
        return self._changes.get(n)

    def name_of(self, person: int) -> str:
        """Of a person by number."""
        return self.shown(next((name for name, number in self.people.items() if number == person), ""))

    def shown(self, who: str) -> str:
        """What a person wants to be called."""
        return self.called.get(who, who)

    def disputed(self) -> np.ndarray:
        """Rows about which people disagree."""
        return np.flatnonzero(self.known["how"] == DISPUTED)

    def trains(self) -> np.ndarray:
        """Rows that the model may learn from: labelled, not disputed, not of the exam, not the model's own."""
        return np.flatnonzero((self.labels() >= 0) & ~self.in_exam & (self.known["how"] != HOW.index("model")))

    def open(self) -> np.ndarray:
        """Rows still to be labelled, those of the exam aside."""
        return np.flatnonzero((self.labels() < 0) & ~self.in_exam & (self.known["how"] != DISPUTED))
