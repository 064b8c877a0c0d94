"""When a network is cut: the options of ``--prune``, and what a run's clock and loss say to them."""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from oars.plan import Pruning
from oars.runfolder import UsageError

CUTS = 8
WIDEN_WHEN = "10steps"  # by then optimizers know what is large
PLATEAU = 3  # means of LONGEST losses, one after the other, that are not lower than the lowest before ...
LOWER = 0.01  # ... by this share
SCORES = ("wv", "w", "random")
WHEN = "0.5..3passes"
STEP_OF_WIDTH = 8  # widths that are multiples of this compute fast; the last ones are
BACK_WITHIN = 0.05  # the loss has to come back so near to where it was lowest before a cut
LONGEST = 100  # steps over which losses are averaged
LEAST_RATE = 0.3  # of the learning rate's peak: below it there is no time left to recover


def widening(texts: list[str]) -> dict[str, int]:
    """``--widen`` as an entry of the plan; UsageError for what it cannot be."""
    found = {}
    for text in texts:
        pattern, _, wide = text.rpartition("=")
        if not pattern or not wide.isdecimal() or not int(wide):
            raise UsageError(f"--widen {text} is no layer and width: use a name or a pattern, as in 'body.*=384'")
        found[pattern] = int(wide)
    return found


def widening_when(text: str | None) -> int:
    """``--widen-when`` as an entry of the plan: steps, 0 for a plateau; UsageError for what it cannot be."""
    given = re.fullmatch(r"([1-9]\d*)steps|plateau", text or WIDEN_WHEN)
    if given is None:
        raise UsageError(f"--widen-when {text} is no time: use a number of steps, as in 500steps, or plateau")
    return int(given[1] or 0)


def never() -> Pruning:
    """The plan of a run that does not cut."""
    return {"keep": 1.0, "first": math.inf, "last": math.inf, "unit": "steps", "score": "w"}


def pruning(keep: str | None, when: str | None, score: str | None) -> Pruning | None:
    """The options as an entry of the plan; UsageError for what they cannot be."""
    if keep is None:
        for option, value in (("--prune-when", when), ("--prune-score", score)):
            if value is not None:
                raise UsageError(f"{option} {value} is for --prune, which says how much of each layer is kept: "
                                 "--prune 1/3")
        return None
    try:
        part = float(Fraction(keep))
    except (ValueError, ZeroDivisionError):
        part = math.nan
    if not 0 < part < 1:
        raise UsageError(f"--prune {keep} is no part of a layer's units: use a fraction between 0 and 1, as in 1/3")
    given = re.fullmatch(r"(\d+(?:\.\d+)?)\.\.(\d+(?:\.\d+)?)(passes|steps)", when or WHEN)
    if given is None or float(given[1]) > float(given[2]):
        raise UsageError(f"--prune-when {when} is no time of cuts: use 0.5..3passes or 200..2000steps")
    return {"keep": part, "first": float(given[1]), "last": float(given[2]), "unit": given[3], "score": score or "wv"}


def width(original: int, keep: float, cut: int) -> int:
    """How many units a layer has after this cut (the first is 1). On the way any number will do."""
    last = max(1, math.ceil(original * keep / STEP_OF_WIDTH - 1e-9)) * STEP_OF_WIDTH
    return min(original, max(last, math.ceil(original * keep ** (cut / CUTS) - 1e-9)))


@dataclass
class Pass:
    """One iteration over a loader."""

    length: int | None = None
    given: int = 0  # batches


class Clock:
    """How far the training is, in passes over the loader that feeds it, and in steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.passes = 0  # that are over
        self.current: Pass | None = None  # the one that the last step was made in
        self.source = Pass()  # the one that gave the last batch

    def batch(self, of: Pass) -> None:
        """A loader has given a batch."""
        of.given += 1
        self.source = of

    def step(self) -> None:
        """The optimizer has stepped."""
        self.steps += 1
        if self.source is not self.current:
            self.passes += self.current is not None
            self.current = self.source

    def now(self, unit: str) -> float | None:
        """The time in ``unit``; None if nobody can tell."""
        if unit == "steps":
            return float(self.steps)
        if self.current is None or not self.current.length or not self.current.given:
            return None
        return self.passes + min(1.0, self.current.given / self.current.length)

    def state(self) -> dict[str, Any]:
        """What a snapshot holds of it."""
        at = self.current or Pass()
        return {"steps": self.steps, "passes": self.passes, "length": at.length, "given": at.given,
                "begun": self.current is not None}

    def restore(self, state: dict[str, Any], source: Pass) -> None:
        """Go on from a snapshot; ``source`` is the iteration that the script was in there."""
        self.steps, self.passes = state["steps"], state["passes"]
        self.current = Pass(state["length"], state["given"]) if state["begun"] else None
        if self.current is not None and state["length"] and state["given"] < state["length"]:
            source.length, source.given = state["length"], state["given"]
            self.current = source
        self.source = source


class Schedule:
    """When the next cut is due, and whether the training can bear it."""

    def __init__(self, plan: Pruning) -> None:
        self.plan, self.clock = plan, Clock()
        self.done = 0  # cuts
        self.over = ""  # why there are no more
        self._peak = 0.0  # of the learning rate
        self._rate = 0.0
        self._losses: deque[Any] = deque(maxlen=LONGEST)  # the last ones, as tensors: reading them would wait
        self._before: float | None = None  # the lowest loss before a cut: what each cut costs must not add up
        self._last = 0.0  # when the last cut was, in steps
        self._window = 20  # steps over which a loss is the mean
        self._lowest: float | None = None  # mean of LONGEST losses
        self._still = 0  # how many after it were not lower

    def step(self, loss: Any, rate: float | None) -> None:
        """The optimizer has stepped, with this loss (a detached tensor of one number, or None)."""
        self.clock.step()
        if rate is not None:
            self._rate, self._peak = rate, max(rate, self._peak)
        if loss is not None:
            self._losses.append(loss.double())
        if self.clock.steps % LONGEST == 0 and self._losses:
            mean = sum(map(float, self._losses)) / len(self._losses)
            lower = self._lowest is None or mean < self._lowest - LOWER * abs(self._lowest)
            self._still = 0 if lower else self._still + 1
            self._lowest = mean if self._lowest is None else min(mean, self._lowest)

    def still(self) -> bool:
        """Whether the loss has stopped falling."""
        return self._still >= PLATEAU

    def _loss(self) -> float | None:
        """The mean of the last steps' losses."""
        last = [float(loss) for loss in itertools.islice(reversed(self._losses), self._window)]
        return sum(last) / len(last) if last else None

    def due_at(self, cut: int) -> float:
        """When this cut (the first is 1) is due, in the plan's unit."""
        first, last = self.plan["first"], self.plan["last"]
        return first + (last - first) * (cut - 1) / (CUTS - 1)

    def due(self) -> bool:
        """Whether it is time; the loss is not looked at yet."""
        if self.over or self.done >= CUTS:
            return False
        now = self.clock.now(self.plan["unit"])
        return now is not None and now >= self.due_at(self.done + 1) and (
            not self.done or self.clock.steps - self._last >= self._window)

    def bears(self) -> bool:
        """Whether the training can bear the next cut now; ``over`` says why it will not any more."""
        if self._peak and self._rate < LEAST_RATE * self._peak:
            self.over = (f"cuts end after {self.done} of {CUTS}: the learning rate is below {LEAST_RATE:.0%} of its "
                         "peak, so there is no time left to recover; cut earlier (--prune-when)")
            return False
        loss = self._loss()
        if self._before is None or loss is None:
            return True
        if loss <= self._before + BACK_WITHIN * abs(self._before):
            return True
        now = self.clock.now(self.plan["unit"])
        if now is not None and now > 2 * self.plan["last"] - self.plan["first"]:
            self.over = (f"cuts end after {self.done} of {CUTS}: the loss is {loss:.4g}, and was {self._before:.4g} "
                         "before a cut; keep more (--prune)")
        return False

    def end(self, why: str) -> None:
        """There are no more cuts."""
        self.over = why

    def made(self) -> None:
        """The cut was made."""
        self.done += 1
        loss = self._loss()
        self._before = loss if loss is None or self._before is None else min(loss, self._before)
        now = self.clock.now(self.plan["unit"]) or 0.0
        between = (self.plan["last"] - self.plan["first"]) / (CUTS - 1)
        steps = between * self.clock.steps / now if now else 0.0
        self._last, self._window = self.clock.steps, min(LONGEST, max(4, round(steps / 3)))

    def state(self) -> dict[str, Any]:
        """What a snapshot holds of it."""
        return {"clock": self.clock.state(), "done": self.done, "over": self.over, "peak": self._peak,
                "losses": [float(loss) for loss in self._losses], "before": self._before, "last": self._last,
                "window": self._window, "lowest": self._lowest, "still": self._still}

    def restore(self, state: dict[str, Any], source: Pass) -> None:
        """Go on from a snapshot."""
        self.clock.restore(state["clock"], source)
        self.done, self.over, self._peak, self._before = state["done"], state["over"], state["peak"], state["before"]
        self._last, self._window = state["last"], state["window"]
        self._losses = deque(state["losses"], LONGEST)
        self._lowest, self._still = state["lowest"], state["still"]
