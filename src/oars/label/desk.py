"""What the page can do, one thing at a time: each method is an action or a question, whoever asks over HTTP.

An action is checked, written to the log, then applied to the state; so what was answered is on disk. Questions read the
state under the same lock. Where this needs images it asks ``pictures``, outside the lock.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from oars.label import choose
from oars.label.chances import wilson
from oars.label.errors import LabelError, Repeated
from oars.label.folder import Folder
from oars.label.learner import Learner
from oars.label.state import DISPUTED, HOW, State

LONGEST = 80  # letters of a class's name
MOST_CLASSES = 200
SERVER = "oars"  # who made the classes of the command line


@dataclasses.dataclass(frozen=True)
class Actor:
    """Who acts, and the page's own name for the action, if it gave one."""

    name: str
    action: str | None = None


class Desk:
    """A project that is open."""

    def __init__(self, folder: Folder, notify: Callable[[str], None]) -> None:
        self.folder, self.notify = folder, notify
        self.log = folder.log()
        self.lock = threading.RLock()
        self.state = State(folder.rows, folder.exam)
        self.when: dict[int, float] = {}
        for n, at, who, kind, data in self.log.events():
            self.when[n] = at
            self.state.apply(n, who, kind, data)
        self._actions = self.log.actions()
        self.learner: Learner | None = None  # until features are there

    def learn(self, candidates: dict[str, np.ndarray], chosen: str | None) -> None:
        """Begin to guess: the features are there."""
        self.learner = Learner(candidates, chosen, self.folder.seed, self._labelled, lambda: self.notify("model"),
                               self.folder.base)

    def grow(self, more: dict[str, np.ndarray], count: int) -> None:
        """Rows that have come: the model first, so that each row of the state has a guess."""
        self.ready().grow(more)
        with self.lock:
            self.state.grow(count)
            self.folder.rows += count

    def close(self) -> None:
        """Nothing more is written."""
        if self.learner:
            self.learner.end()
        self.log.close()

    def _labelled(self) -> tuple[int, np.ndarray, np.ndarray]:
        with self.lock:
            rows = self.state.trains()
            return self.state.version, rows, self.state.labels()[rows]

    def add(self, who: Actor, kind: str, data: dict[str, Any], learns: bool = True) -> int:
        """Write an event down, then let it count."""
        with self.lock:
            self.once(who)
            n = self.log.add(who.name, kind, data, who.action)
            self.state.apply(n, who.name, kind, data)
            if who.action is not None:
                self._actions[who.action] = n
        if learns and self.learner:
            self.learner.again()
        self.notify(kind)
        return n

    def once(self, who: Actor) -> None:
        """Refuse an action that was done already."""
        if who.action is not None and (event := self._actions.get(who.action)) is not None:
            raise Repeated(event)

    # ---- actions -----------------------------------------------------------------------------------------------------

    def label(self, who: Actor, rows: list[int], name: str | None, how: str, seen: int,
              final: bool = False) -> dict[str, Any]:
        """Give rows a class, or take it away; what others have said since ``seen`` is not overwritten but disputed.
        With ``final`` this label counts, and ends the dispute."""
        if how not in ("human", "page", "exam", "audit"):
            raise LabelError(f"how={how!r} is none of human, page, exam, audit")
        chosen = self._rows(rows)
        with self.lock:
            state = self.state
            number = -1 if name is None else state.number(name)
            inside = state.in_exam[chosen]
            if how == "exam" and not inside.all():
                raise LabelError(f"row {chosen[~inside][0]} is not in the exam")
            skipped = int(inside.sum()) if how != "exam" else 0
            chosen = chosen if how == "exam" else chosen[~inside]
            if not len(chosen):
                raise LabelError("these rows are the exam's: label them there")
            labels, known = state.labels()[chosen], state.known[chosen]
            me = state.people.get(who.name, -1)
            newer = (known["event"] > seen) & (known["who"] != me) & (not final)
            clash = newer & ((known["how"] == DISPUTED) | ((labels >= 0) & (labels != number)))
            conflicts = [(int(row), int(other)) for row, other in zip(chosen[clash], known["label"][clash],
                                                                      strict=True)]
            text = f"{len(chosen)} {'row' if len(chosen) == 1 else 'rows'} {name or 'without a label'}"
            event = self.add(who, "label", {"rows": chosen.tolist(), "class": number, "how": how, "text": text,
                                            "conflicts": conflicts})
            return {"event": event, "changed": int(len(chosen) - clash.sum()), "skipped": skipped, "conflicts": [
                {"row": row, "class": self._name(other), "by": self.state.name_of(int(by))}
                for (row, other), by in zip(conflicts, known["who"][clash], strict=True)]}

    def add_class(self, who: Actor, name: str) -> dict[str, Any]:
        """A new class."""
        with self.lock:
            name = self._new_name(name)
            if len(self.state.classes()) >= MOST_CLASSES:
                raise LabelError(f"there are {MOST_CLASSES} classes already: merge some")
            return {"event": self.add(who, "class", {"name": name, "text": f"class {name}"})}

    def rename(self, who: Actor, old: str, new: str) -> dict[str, Any]:
        """Another name for a class; that of another class merges the two."""
        with self.lock:
            number = self.state.number(old)
            try:
                into = self.state.number(new)
            except LabelError:
                new = self._new_name(new)
                return {"event": self.add(who, "rename", {"class": number, "to": new, "text": f"{old} is now {new}"})}
            if into == number:
                raise LabelError(f"{old} has this name already")
            return {"event": self.add(who, "merge", {"class": number, "into": into, "text": f"{old} is part of {new}"})}

    def call(self, who: Actor, name: str) -> None:
        """What a person wants to be called; labels of before are theirs still."""
        name = name.strip()
        if not name or len(name) > 40 or not name.isprintable():
            raise LabelError("a name has 1 to 40 printable letters")
        with self.lock:
            taken = {self.state.shown(one) for one in self.state.people if one != who.name} | {SERVER}
            if name in taken:
                raise LabelError(f"somebody is called {name} already", 409)
            self.add(who, "person", {"name": name}, learns=False)

    def undo(self, who: Actor, again: bool) -> dict[str, Any]:
        """Take this person's last action back, or do it again."""
        with self.lock:
            of = self.state.next_redo(who.name) if again else self.state.next_undo(who.name)
            if of is None:
                raise LabelError(f"there is nothing to {'redo' if again else 'undo'}", 409)
            if (why := self.state.hinders(of, again)) is not None:
                raise LabelError(why, 409)
            what = self.state.text(of)
            return {"event": self.add(who, "redo" if again else "undo", {"of": of}), "what": what}

    def _new_name(self, name: str) -> str:
        name = name.strip()
        if not name or len(name) > LONGEST or not name.isprintable():
            raise LabelError(f"a class's name has 1 to {LONGEST} printable letters")
        if any(self.state.names[number] == name for number in self.state.classes()):
            raise LabelError(f"there is a class {name} already", 409)
        return name

    def _rows(self, rows: list[int]) -> np.ndarray:
        if not rows:
            raise LabelError("no rows are named")
        chosen = np.unique(np.asarray(rows, np.int64))
        if chosen[0] < 0 or chosen[-1] >= self.folder.rows:
            raise LabelError(f"row {chosen[-1] if chosen[-1] >= self.folder.rows else chosen[0]} of {self.folder.rows}")
        return chosen

    def _name(self, number: int) -> str | None:
        number = self.state.stands_for(number)
        return self.state.names[number] if number >= 0 else None

    # ---- questions ---------------------------------------------------------------------------------------------------

    def overview(self, who: str) -> dict[str, Any]:
        """What every screen shows."""
        with self.lock:
            state, labels = self.state, self.state.labels()
            counts = {how: np.bincount(labels[(labels >= 0) & (state.known["how"] == code)],
                                       minlength=len(state.names)) for code, how in enumerate(HOW)}
            classes = [{"name": state.names[n], "key": str(at + 1) if at < 9 else None,
                        "human": int(counts["human"][n] + counts["audit"][n]), "page": int(counts["page"][n]),
                        "model": int(counts["model"][n]), "exam": int(counts["exam"][n])}
                       for at, n in enumerate(state.classes())]
            done = int(((labels >= 0) & (state.known["how"] != HOW.index("exam"))).sum())
            undo = state.next_undo(who)
            return {"rows": self.folder.rows, "event": state.last, "person": state.shown(who), "classes": classes,
                    "labelled": done, "left": len(state.open()), "disputed": len(state.disputed()), "exam": self.exam(),
                    "model": self._model(), "features": self.learner.table() if self.learner else [],
                    "undo": {"can": undo is not None, "redo": state.next_redo(who) is not None,
                             "what": state.text(undo)},
                    "people": [{"name": state.shown(name), "actions": state.actions[name]} for name in state.people
                               if name != SERVER]}

    def _model(self) -> dict[str, Any]:
        learner = self.learner
        guess = learner.guess if learner else None
        return {"labels": guess.labels if guess else 0, "version": guess.version if guess else 0,
                "features": learner.name if learner else None, "separates": learner.separates if learner else None,
                "busy": learner.busy if learner else False}

    def exam(self) -> dict[str, Any]:
        """How well the model does on images that it never learns from and whose guess nobody saw."""
        labels = self.state.labels()[self.state.exam]
        done = labels >= 0
        found: dict[str, Any] = {"done": int(done.sum()), "total": len(labels), "balanced": None, "accuracy": None,
                                 "low": None, "high": None}
        guess = self.learner.guess if self.learner else None
        if guess is not None and done.any():
            truth, right = labels[done], guess.best[self.state.exam][done] == labels[done]
            low, high = wilson(int(right.sum()), int(done.sum()))
            found |= {"accuracy": round(float(right.mean()), 4), "low": round(low, 4), "high": round(high, 4),
                      "balanced": round(float(np.mean([right[truth == n].mean() for n in np.unique(truth)])), 4)}
        return found

    def next_exam(self) -> dict[str, Any]:
        """The next image of the exam; in an order that does not depend on the images."""
        with self.lock:
            order = np.random.default_rng(self.folder.seed).permutation(self.state.exam)
            still = order[self.state.labels()[order] < 0]
            return {"row": int(still[0]) if len(still) else None, "done": len(order) - len(still), "total": len(order)}

    def ready(self) -> Learner:
        """What chooses rows, once there are features."""
        if self.learner is None:
            raise LabelError("the images are still being read for the first time; try again soon", 503)
        return self.learner

    def groups(self, size: int, count: int) -> dict[str, Any]:
        """Pages of alike rows without a label."""
        learner = self.ready()
        with self.lock:
            still, event = self.state.open(), self.state.last
        found = choose.groups(learner, still, size, count) if len(still) else []
        return {"event": event, "groups": [{**group, "guess": None if group["guess"] is None
                                            else self._name(group["guess"])} for group in found]}

    def split(self, rows: list[int]) -> dict[str, Any]:
        """A group cut in two; nothing is written."""
        parts = choose.split(self.ready(), self._rows(rows))
        guess = self.ready().guess
        return {"groups": [{"id": f"split-{part[0]}-{len(part)}", "rows": part.tolist(), "p": None, "guess": self._name(
            int(np.bincount(guess.best[part]).argmax())) if guess else None} for part in parts]}

    def boundary(self, count: int) -> dict[str, Any]:
        """The rows whose label would teach most, with what the model thinks of them."""
        learner = self.ready()
        with self.lock:
            still, labelled = self.state.open(), self.state.trains()
        guess = learner.guess
        return {"rows": [{"row": row, **self._thinks(guess, row)}
                         for row in choose.boundary(learner, still, labelled, count)]}

    def _thinks(self, guess: Any, row: int) -> dict[str, Any]:
        if guess is None:
            return {"guess": None, "second": None, "p": None, "margin": None}
        return {"guess": self._name(int(guess.best[row])), "second": self._name(int(guess.second[row])),
                "p": round(float(guess.p[row]), 4), "margin": round(float(guess.margin[row]), 4)}

    def near(self, row: int, count: int) -> dict[str, Any]:
        """The most alike rows."""
        learner = self.ready()
        name = learner.name  # it may change while we search
        values = learner.values(name)[:self.folder.rows]
        return {"rows": choose.near(values, learner.norms(name)[:len(values)], int(self._rows([row])[0]), count)}

    def about(self, row: int) -> dict[str, Any]:
        """One row: its label, its history. A row of the exam has no guess to show."""
        self._rows([row])
        with self.lock:
            state, known = self.state, self.state.known[row]
            guess = self.learner.guess if self.learner and not state.in_exam[row] else None
            label = int(state.labels()[row])
            history = []
            for n in state.history(row):
                change = state.change(n)
                at = 0 if change is None else int(np.flatnonzero(change.rows == row)[0])
                after = None if change is None else change.after[at]
                history.append({"event": n, "by": state.shown(change.who) if change else "", "at": self.when.get(n),
                                "how": HOW[after["how"]] if after is not None else "undo",
                                "class": self._name(int(after["label"])) if after is not None else None})
            said = label >= 0 or known["how"] == DISPUTED
            return {"row": row, "class": self._name(label), "how": HOW[known["how"]] if said else None,
                    "by": state.name_of(int(known["who"])) if said else None, "history": history,
                    **{key: self._thinks(guess, row)[key] for key in ("guess", "p")}}

    def disputes(self) -> dict[str, Any]:
        """Rows about which people disagree, and who said what."""
        with self.lock:
            state = self.state
            return {"rows": [{"row": row, "labels": [{"by": state.shown(who), "class": self._name(label)}
                                                     for who, label in state.disputes.get(row, {}).items()]}
                             for row in state.disputed().tolist()]}
