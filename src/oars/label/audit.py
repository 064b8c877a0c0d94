"""Audits: whether the model's guesses for a class may be accepted without a look at each.

A person looks at 300 random images that would be accepted, among which are planted ones: of other classes, labelled by
people one by one. They are not shown which are which. Errors that are found give an upper bound of the share of errors;
planted ones that are overlooked raise it. Guesses are accepted only if that bound is small, and only those that stood
there when the audit was drawn.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from typing import Any

import numpy as np

from oars.label import chances
from oars.label.desk import Actor, Desk
from oars.label.errors import LabelError
from oars.label.state import HOW

SHOWN, PLANTED, FEWEST_PLANTED = 300, 15, 5
LARGEST, FOUND = 0.02, 0.8  # of errors; of planted ones


class Audits:
    """The draws that are on somebody's screen. They are kept in memory: after a restart the page draws again."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def draw(self, name: str) -> dict[str, Any]:
        """300 guesses of a class and the planted ones, in random order; or why there is no audit."""
        desk, guess = self._desk, self._desk.ready().guess
        with desk.lock:
            state, number = desk.state, desk.state.number(name)
            passed = [state.names[n] for n in sorted(state.audits) if self.passed(n)]
            if guess is None:
                return {"rows": [], "passed": passed, "refused": "the model has not seen two classes yet: label first"}
            still = state.open()
            would = still[guess.best[still] == number]
            labels = state.labels()
            sure = (labels >= 0) & (labels != number) & np.isin(state.known["how"], (0, HOW.index("audit")))
            known = np.flatnonzero(sure & ~state.in_exam)
        if not len(would):
            return {"rows": [], "passed": passed, "refused": f"the model guesses no {name} among what is left"}
        if len(known) < FEWEST_PLANTED:
            return {"rows": [], "passed": passed, "refused": f"label at least {FEWEST_PLANTED} of other classes one by "
                    "one first (Boundary): they are hidden in the audit to see what is overlooked"}
        rng = np.random.default_rng((desk.folder.seed, state.last, number))
        # The planted ones that look most like the class: the others would be found by anybody.
        alike = known[np.argsort(-_chance(guess, known, number), kind="stable")][:3 * PLANTED]
        planted = rng.permutation(alike)[:PLANTED]
        shown = rng.permutation(would)[:SHOWN]
        rows = rng.permutation(np.concatenate([shown, planted]))
        self._drawn[number] = rows, planted, would
        return {"rows": rows.tolist(), "passed": passed, "refused": None}

    def judge(self, who: Actor, name: str, rows: list[int], wrong: list[int]) -> dict[str, Any]:
        """What the person has clicked as wrong; writes the outcome down."""
        desk = self._desk
        number = desk.state.number(name)
        drawn = self._drawn.get(number)
        if drawn is None or sorted(rows) != sorted(drawn[0].tolist()):
            raise LabelError("this audit is not the newest one: open it again", 409)
        if not set(wrong) <= set(rows):
            raise LabelError("a row that was not shown is said to be wrong")
        _, planted, would = drawn
        seen = len(rows) - len(planted)
        errors = len(set(wrong) - set(planted.tolist()))
        found = len(set(wrong) & set(planted.tolist()))
        share = found / len(planted)
        bound = min(1.0, chances.upper(errors, seen) / max(share, 1e-9))
        passed = share >= FOUND and bound <= LARGEST
        rest = np.setdiff1d(would, wrong)
        outcome = {"class": number, "errors": errors, "planted": len(planted), "found": found, "passed": passed,
                   "upper": round(bound, 4), "version": desk.state.version,
                   "accepts": _packed(rest) if passed else ""}
        event = desk.add(who, "audit", outcome, learns=False)
        self._drawn.pop(number, None)  # only now: a stale audit, or a full disk, must not lose the newest draw
        return {"event": event, "errors": errors, "planted": len(planted), "found": found, "passed": passed,
                "upper": outcome["upper"]}

    def accept(self, who: Actor, name: str) -> dict[str, Any]:
        """The guesses that were audited become labels."""
        desk = self._desk
        with desk.lock:
            number = desk.state.number(name)
            if not self.passed(number):
                raise LabelError(f"the audit of {name} has not passed: its guesses are not accepted", 409)
            rows = np.intersect1d(_unpacked(desk.state.audits[number]["accepts"]), desk.state.open())
            if not len(rows):
                raise LabelError(f"nothing is left to accept as {name}", 409)
            event = desk.add(who, "accept", {"rows": rows.tolist(), "class": number, "how": "model",
                                             "text": f"{len(rows)} guesses of {name} accepted"})
            return {"event": event, "accepted": len(rows)}

    def passed(self, number: int) -> bool:
        """Whether the newest audit of a class was passed."""
        return bool(self._desk.state.audits.get(number, {}).get("passed"))


def _chance(guess: Any, rows: np.ndarray, number: int) -> np.ndarray:
    at = np.flatnonzero(guess.head.classes == number)
    chance = guess.head.chances(guess.features[rows])
    return chance[:, at[0]] if len(at) else np.zeros(len(rows))


def _packed(rows: np.ndarray) -> str:
    return b64encode(zlib.compress(np.diff(rows, prepend=0).astype("<i4").tobytes())).decode()


def _unpacked(text: str) -> np.ndarray:
    return np.cumsum(np.frombuffer(zlib.decompress(b64decode(text)), "<i4"), dtype=np.int64)
