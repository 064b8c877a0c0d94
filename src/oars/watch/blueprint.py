"""``oars evolve blueprint.toml train.py``: the widths of a script's layers, found within a budget.

A candidate is one run: its layers become as wide as the blueprint allows, at once, and are then cut while they train.
Each candidate is cut to another part. The first one runs to its end and shows what a run costs; then as many others as
the budget allows, by successive halving (``halving``). What was run is not run again, so a search that was interrupted
goes on with the same command.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from re import Pattern

from oars import runfolder
from oars.watch import cuts, halving, svg, terminal
from oars.watch.curves import loss_chart
from oars.watch.facts import number, verdict
from oars.watch.report import html_table, page, write
from oars.watch.runs import WatchError
from oars.watch.start import Trial, compiled, metric_name, metric_of, run_all, series_name

MIDDLE, OTHERS = 4, (6, 2, 5, 3, 7, 1)  # candidates, by eighths of the way down
TOGETHER = (6, 4, 1)  # how many others may run beside each other; one alone runs to its end
WORDS = {"metric", "best", "budget", "when", "widths"}


@dataclass
class Blueprint:
    """What a search may do."""

    widths: dict[str, tuple[int, int]]  # layers, as patterns -> from, to
    budget: float  # FLOPs
    pattern: Pattern | None
    largest: bool
    when: str | None

    def options(self, eighths: int) -> list[str]:
        """The options of the candidate that goes so many eighths of the way down."""
        ratio = max(low / high for low, high in self.widths.values())
        widen = [word for name, (_, high) in self.widths.items() for word in ("--widen", f"{name}={high}")]
        return [*widen, "--prune", f"{ratio ** (eighths / 8):.4f}", *(["--prune-when", self.when] if self.when else [])]


def read(path: Path) -> Blueprint:
    """A blueprint; WatchError for what is wrong in it."""
    try:
        fields = tomllib.loads(path.read_text())
    except OSError as error:
        raise WatchError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise WatchError(f"{path} is no TOML: {error}") from None
    if unknown := set(fields) - WORDS:
        raise WatchError(f"{path}: {sorted(unknown)[0]} is none of {', '.join(sorted(WORDS))}")
    widths = {}
    for name, text in fields.get("widths", {}).items():
        given = re.fullmatch(r"(\d+)\.\.(\d+)", str(text))
        if given is None or not 0 < int(given[1]) < int(given[2]):
            raise WatchError(f"{path}: the widths of {name} are {text!r}: write from..to, as in '48..384'")
        widths[name] = int(given[1]), int(given[2])
    if not widths:
        raise WatchError(f"{path} names no layers: [widths], and a line like 'body.*' = '48..384'")
    budget = fields.get("budget")
    if not isinstance(budget, (int, float)) or not budget > 0:
        raise WatchError(f"{path}: the budget is {budget!r}: FLOPs of the whole search, as in 4e14")
    if fields.get("best", "max") not in ("max", "min"):
        raise WatchError(f"{path}: best is {fields['best']!r}: max or min")
    metric = fields.get("metric")
    return Blueprint(widths, float(budget), compiled(metric), fields.get("best", "max" if metric else "min") == "max",
                     fields.get("when"))


def evolve(path: Path, script: list[str], ranks: int, name: str | None) -> int:
    """Run the candidates, print what was tried and what it cost; 1 if none came to a result."""
    plan = read(path)
    folder = series_name("evolve", name, script, {"script": script, "blueprint": path.read_text(), "ranks": ranks})
    first, *others = (Trial(f"{folder.name}-{eighths}", ranks, script, {"cut": str(eighths)}, plan.options(eighths))
                      for eighths in (MIDDLE, *OTHERS))
    tried = [first]
    cores = len(os.sched_getaffinity(0))
    rows = 0.0  # of a step, as the first candidate counted them

    def run(trials: list[Trial]) -> bool:
        """Run these as far as they are needed; whether the budget lasts for more."""
        run_all(iter(trials), max(1, cores // ranks), lambda _: ranks, say)
        return sum(_cost(trial, rows) for trial in tried) < plan.budget

    def say(trial: Trial) -> None:
        assert trial.run is not None
        value, why = metric_of(trial.run, plan.pattern)
        where = f" after step {trial.done:,}" if trial.until is not None else ""
        print(f"oars: {_widths(trial.run.folder)}: {why or number(value)}{where}, {_cost(trial, rows):.3g} FLOPs",
              flush=True)

    run([first])
    assert first.run is not None
    if refused := _refused(first.run.folder):
        raise WatchError(refused)
    rows = cuts.rows_a_step(first.run.folder)
    each = _cost(first, rows)
    if each > plan.budget:
        raise WatchError(f"the budget of {plan.budget:.3g} FLOPs is too small: one candidate takes {each:.3g}")
    count = next((count for count in TOGETHER if each * (1 + halving.cost(count)) <= plan.budget), 0)
    if count:
        tried += others[:count]
        halving.race(others[:count], first.done, run, plan.pattern, plan.largest)
    else:
        print(f"oars: {each:.3g} of {plan.budget:.3g} FLOPs are spent: not enough for another candidate")
    sweep = sum(2 * cuts.fixed_multiply_adds(trial.run.folder, first.done, rows) for trial in tried if trial.run)
    return _tell(plan, folder, [(trial, _result(plan, trial), _cost(trial, rows)) for trial in tried], sweep)


def _cost(trial: Trial, rows: float) -> float:
    """The FLOPs of a candidate so far: two for a multiply-add."""
    return 2 * (cuts.multiply_adds(trial.run.folder, rows) or 0.0) if trial.run is not None else 0.0


def _result(plan: Blueprint, trial: Trial) -> float | None:
    """A candidate's metric; None if it was stopped, or has failed."""
    if trial.run is None or trial.run.end.get("code") != 0:
        return None
    return metric_of(trial.run, plan.pattern)[0]


def _refused(folder: Path) -> str:
    """The line with which a run was refused at its first step."""
    try:
        return str(json.loads((folder / runfolder.error(0)).read_text()).get("usage", ""))
    except (OSError, ValueError):
        return ""


def _widths(folder: Path) -> str:
    made = cuts.cuts_of(folder)
    return ", ".join(f"{name} {width}" for name, width in made[-1].widths.items()) if made else "no cut was made"


def _tell(plan: Blueprint, folder: Path, tried: list[tuple[Trial, float | None, float]], sweep: float) -> int:
    good = sorted((each for each in tried if each[1] is not None), key=lambda each: each[1] or 0.0,
                  reverse=plan.largest)
    rows = [["best" if each is good[0] else "", number(each[1]), f"{each[2]:.3g}", _widths(each[0].run.folder),
             each[0].run.name] for each in good if each[0].run is not None]
    rows += [["", f"stopped after step {trial.done:,}" if trial.can_go_on() else verdict(trial.run, set()),
              f"{cost:.3g}", _widths(trial.run.folder), trial.run.name]
             for trial, value, cost in tried if value is None and trial.run is not None]
    head = ["", metric_name(plan.pattern), "FLOPs", "widths", "run"]
    print("\n" + terminal.table(head, rows))
    spent = sum(cost for _, _, cost in tried)
    runs = [each[0].run for each in tried if each[0].run is not None]
    whole = max((cuts.whole_multiply_adds(run.folder) for run in runs), default=0.0)
    beside = (f"{spent:.3g} FLOPs in all; one run at the full widths takes {2 * whole:.3g}, a sweep of these "
              f"{len(tried)} widths from the beginning {sweep:.3g}")
    print(beside)
    charts = [loss_chart([each[0].run for each in good if each[0].run is not None])] if good else []
    write(folder / runfolder.REPORT, page(folder.name, [
        f"<p>{beside}.</p>", *(svg.draw(chart) for chart in charts if chart.drawable()), html_table(head, rows)]))
    print(folder / runfolder.REPORT)
    return 0 if good else 1
