"""Successive halving: many candidates begin, and only those that are best on the way are run to their end.

All make a quarter of the steps, the better half of them a half, and the better half of these all. A candidate that
stops keeps its snapshot: the next round goes on with it, and so does the same command after an interruption.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from re import Pattern

from oars.watch.runs import Run
from oars.watch.start import STOPPED, Trial, metrics_of

PARTS = (4, 2)  # after the fourth part of the steps half of the candidates stop, and again after the half


def cost(count: int) -> float:
    """What so many candidates take together, in runs that are not stopped."""
    total, before = 0.0, 0.0
    for part in PARTS:
        total += count * (1 / part - before)
        before, count = 1 / part, max(1, count // 2)
    return total + count * (1 - before)


def race(trials: list[Trial], steps: int, run: Callable[[list[Trial]], bool], pattern: Pattern | None,
         largest: bool) -> None:
    """Run candidates, round by round. ``run`` makes what ``until`` says of each; False if the rest is not to be run."""
    for part in PARTS:
        if len(trials) > 1:
            for trial in trials:
                trial.until = max(1, steps // part)
            if not run(trials):
                return
            scores = worth([trial.run for trial in trials if trial.run is not None], steps // part, pattern, largest)
            order = sorted(range(len(trials)), key=lambda i: scores[i])
            trials = [trials[i] for i in sorted(order[:max(1, len(trials) // 2)])]
    for trial in trials:
        trial.until = None
    run(trials)


def worth(runs: list[Run], step: int, pattern: Pattern | None, largest: bool) -> list[float]:
    """What runs had come to at a step: the smaller, the better. Lines of the output tell no step, so of each run as
    many are read as of the run with the fewest; without a line that tells the metric, it is the loss."""
    good = [not run.end.get("code") or str(run.state(set())) == STOPPED for run in runs]
    values = [metrics_of(run, pattern)[1] for run in runs] if pattern is not None else []
    fewest = min((len(each) for each, fine in zip(values, good, strict=False) if fine), default=0)
    found = []
    for number, (run, fine) in enumerate(zip(runs, good, strict=True)):
        if fewest:
            value = values[number][fewest - 1] if fine else math.inf
            value = -value if largest else value
        else:
            losses = [loss for at, loss in zip(run.steps.step, run.steps.loss, strict=True) if at <= step]
            last = losses[-max(1, len(losses) // 20):]
            value = sum(last) / len(last) if last else math.inf
        found.append(value if fine and not math.isnan(value) else math.inf)
    return found
