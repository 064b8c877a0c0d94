"""What ``--prune`` has done in a run, from its run folder: widths, multiply-adds, and step times around each cut."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from oars import runfolder
from oars.watch.chart import Chart, Series

AROUND = 50  # steps before and behind a cut whose times are compared


class CutMade(NamedTuple):
    """One cut."""

    number: int
    step: int  # after which it was made
    widths: dict[str, int]
    parameters_before: int
    parameters: int
    operations_before: int  # multiply-adds of one sample's forward
    operations: int


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines; none if there is no such file."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    except OSError:
        return []


def cuts_of(folder: Path) -> list[CutMade]:
    """The cuts of a run, each once, though a resumed run may have made one again."""
    found = {}
    for event in lines_of(folder / runfolder.EVENTS):
        if event["event"] == "cut":
            found[event["cut"]] = CutMade(event["cut"], event["step"], event["widths"], event["parameters_before"],
                                          event["parameters"], event["operations_before"], event["operations"])
    return [found[number] for number in sorted(found)]


def layers_of(folder: Path) -> dict[str, str]:
    """Each layer that was looked at, with the reason why it is left alone; "" if it can be cut."""
    found = [event["layers"] for event in lines_of(folder / runfolder.EVENTS) if event["event"] == "prunable"]
    return found[-1] if found else {}


def step_times(folder: Path) -> dict[int, float]:
    """Seconds of each step, by its number."""
    steps = lines_of(folder / runfolder.METRICS)
    return {b["step"]: b["time"] - a["time"] for a, b in zip(steps, steps[1:], strict=False)
            if b["step"] == a["step"] + 1}


def around(times: dict[int, float], first: int, last: int) -> float | None:
    """The usual time of a step, of those from ``first`` to ``last``."""
    there = [times[step] for step in range(first, last + 1) if step in times]
    return median(there) if there else None


def closing(folder: Path) -> str:
    """What the cuts were, in one line."""
    cuts = cuts_of(folder)
    if not cuts:
        return "no cut was made: the training ended before one was due"
    times = step_times(folder)
    first, last = cuts[0].step, cuts[-1].step
    before, after = around(times, first - AROUND, first), around(times, last + 2, last + 1 + 4 * AROUND)
    line = (f"{len(cuts)} cut{'s' * (len(cuts) > 1)}, {cuts[0].parameters_before:,} \N{RIGHTWARDS ARROW} "
            f"{cuts[-1].parameters:,} parameters")
    if before and after:
        line += f", step {1e3 * before:.3g} \N{RIGHTWARDS ARROW} {1e3 * after:.3g} ms"
    return f"{line}; the small network is {folder / runfolder.small(0)}"


def multiply_adds(folder: Path, rows: float = 0.0) -> float | None:
    """What a run's training took: three times the forward's (the backward takes two); None if nothing has changed in
    it. ``rows`` are those of a step in a run that was stopped and has not counted them."""
    changes = [e for e in lines_of(folder / runfolder.EVENTS) if e["event"] in ("cut", "widened")]
    steps = lines_of(folder / runfolder.METRICS)
    if not changes or not steps:
        return None
    total, at = 0.0, 0
    for change in changes:
        total += (change["step"] - at) * change["operations_before"]
        at = change["step"]
    return 3 * (rows or rows_a_step(folder)) * (total + (len(steps) - at) * changes[-1]["operations"])


def whole_multiply_adds(folder: Path) -> float:
    """What the same run would have taken at its largest widths."""
    changes = [e for e in lines_of(folder / runfolder.EVENTS) if e["event"] in ("cut", "widened")]
    steps = len(lines_of(folder / runfolder.METRICS))
    largest = max((max(e["operations_before"], e["operations"]) for e in changes), default=0)
    return 3.0 * rows_a_step(folder) * steps * largest


def fixed_multiply_adds(folder: Path, steps: int, rows: float) -> float:
    """What a network of this run's last widths would have taken from the beginning."""
    changes = [e for e in lines_of(folder / runfolder.EVENTS) if e["event"] in ("cut", "widened")]
    return 3.0 * rows * steps * changes[-1]["operations"] if changes else 0.0


def rows_a_step(folder: Path) -> float:
    """The samples of a usual step of a run that has ended."""
    steps = len(lines_of(folder / runfolder.METRICS))
    try:
        return float(json.loads((folder / runfolder.SUMMARY).read_text())["samples"]) / max(1, steps)
    except (OSError, ValueError, KeyError):
        return 0.0


def charts(folder: Path) -> list[Chart]:
    """Widths over the steps, and the share of samples that each pass has left out."""
    cuts = cuts_of(folder)
    names = dict.fromkeys(name for cut in cuts for name in cut.widths)
    lines = [Series(name, [float(cut.step) for cut in cuts if name in cut.widths],
                    [float(cut.widths[name]) for cut in cuts if name in cut.widths], points=True) for name in names]
    thinned = [event for event in lines_of(folder / runfolder.EVENTS) if event["event"] == "thinned"]
    shares = Series("left out", [float(e["pass"]) for e in thinned], [100 * e["left_out"] / e["of"] for e in thinned],
                    points=True)
    both = (Chart("Widths of the layers that are cut", "step", "units", lines, zero=True),
            Chart("Samples left out", "pass", "share (%)", [shares], zero=True))
    return [chart for chart in both if chart.drawable()]


def rows(folder: Path) -> list[list[str]]:
    """A line for each cut: parameters, multiply-adds, and step time and loss before it and behind."""
    times = step_times(folder)
    losses = {line["step"]: line["loss"] for line in lines_of(folder / runfolder.METRICS) if line["loss"] is not None}
    cuts = cuts_of(folder)
    found = []
    for cut, following in zip_longest(cuts, cuts[1:]):
        end = min(cut.step + AROUND, following.step) if following is not None else cut.step + AROUND
        first = cut.step - AROUND
        time = [around(times, first, cut.step), around(times, cut.step + 2, end)]
        loss = [around(losses, first, cut.step), around(losses, cut.step + 1, end)]
        found.append([str(cut.number), f"{cut.step:,}", f"{cut.parameters:,}", f"{cut.operations:,}",
                      *(f"{1e3 * value:.3g}" if value else "" for value in time),
                      *(f"{value:.4g}" if value is not None else "" for value in loss)])
    return found


HEAD = ["cut", "after step", "parameters", "multiply-adds", "ms a step before", "behind", "loss before", "behind"]


def layer_lines(folder: Path) -> list[str]:
    """Which layers can be cut, and why the others cannot."""
    layers = layers_of(folder)
    if not layers:
        return ["--prune: no layer was looked at: no model was trained"]
    can = [name for name, why in layers.items() if not why]
    return [f"--prune can cut {len(can)} of {len(layers)} layers: {', '.join(can)}",
            *(f"  {name} is left alone: {why}" for name, why in layers.items() if why)]
