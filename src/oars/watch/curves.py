"""Which charts a run has, and how runs compare."""

from __future__ import annotations

import math
from statistics import median_low
from typing import Any

from oars.watch.chart import Chart, Series, spans_decades
from oars.watch.runs import RankTimes, Run, Steps

SLOW = 1.1  # a rank whose own work takes this many times the median's keeps the others waiting

_QUIET = {"notice"}


def loss_chart(runs: list[Run], names: list[str] | None = None) -> Chart:
    """The losses of runs over steps."""
    lines = [Series(label, [float(s) for s in steps.step], steps.loss)
             for run, name in zip(runs, names or [run.name for run in runs], strict=True)
             for label, steps in _each(run, name)]
    every = [y for line in lines for y in line.finite()[1]]
    events = [(float(e["step"]), described(e)) for e in runs[0].events if "step" in e] if len(runs) == 1 else []
    return Chart("Loss", "step", "loss", lines, log_y=spans_decades(every), events=events)


def _each(run: Run, name: str) -> list[tuple[str, Steps]]:
    """A run's steps, of each of its optimizers by themselves."""
    every = run.steps.of_each_optimizer()
    return [(name if len(every) == 1 else f"{name}, optimizer {i}", steps) for i, steps in enumerate(every, 1)]


def charts(runs: list[Run]) -> list[Chart]:
    """Everything that can be drawn of these runs: loss, throughput, learning rate, gradients."""
    found = [loss_chart(runs)]
    found.append(_over_time(runs))
    for title, unit, column in (("Learning rate", "learning rate", "lr"),
                                ("Norm of the gradients", "2-norm", "grad_norm"),
                                ("Time in exchange", "share of the step (%)", "exchange_share")):
        lines = []
        for name, steps in (pair for run in runs for pair in _each(run, run.name)):
            pairs = [(float(s), v) for s, v in zip(steps.step, getattr(steps, column), strict=True)
                     if not math.isnan(v)]
            scale = 100 if column == "exchange_share" else 1
            lines.append(Series(name, [s for s, _ in pairs], [scale * v for _, v in pairs]))
        every = [y for line in lines for y in line.finite()[1]]
        if every and (column != "exchange_share" or any(every)):
            found.append(Chart(title, "step", unit, lines, log_y=column != "exchange_share" and spans_decades(every),
                               zero=column == "exchange_share"))
    return [chart for chart in found if chart.drawable()]


def _over_time(runs: list[Run]) -> Chart:
    """Samples a second over the time since each run's start, faults marked."""
    lines, events = [], []
    for run in runs:
        begin = run.started if run.started is not None else (run.steps.time or [0.0])[0]
        lines += [Series(name, *_rates(steps, begin)) for name, steps in _each(run, run.name)]
        if len(runs) == 1:
            events = [(float(e["time"]) - begin, described(e)) for e in run.events
                      if e["event"] not in _QUIET and isinstance(e.get("time"), (int, float))]
    return Chart("Throughput", "seconds since the start", "samples/s", lines, zero=True, events=events)


def _rates(steps: Steps, begin: float) -> tuple[list[float], list[float]]:
    """Samples a second, a mean over each of at most 200 stretches: single steps say little."""
    xs: list[float] = []
    ys: list[float] = []
    each = max(1, len(steps.step) // 200)
    for at in range(0, len(steps.step), each):
        part = [(t, b, r) for b, t, r in zip(steps.time[max(0, at - 1):], steps.time[max(1, at):at + each],
                                             steps.samples_per_s[max(1, at):at + each], strict=False)
                if math.isfinite(r)]
        seconds = sum(t - b for t, b, _ in part)
        if seconds > 0:
            xs.append(part[-1][0] - begin)
            ys.append(sum((t - b) * r for t, b, r in part) / seconds)
    return xs, ys


def described(event: dict[str, Any]) -> str:
    """An event in words."""
    kind = str(event["event"])
    if kind == "lost":
        ranks = ", ".join(map(str, event.get("ranks", [])))
        return f"step {event.get('step')}: rank {ranks} died, {event.get('left')} go on"
    if kind == "recovered":
        return f"step {event.get('step')}: done again, {1000 * float(event.get('seconds', 0)):.3g} ms after the death"
    if kind == "cut":
        return f"step {event.get('step')}: cut {event.get('cut')}, {event.get('parameters'):,} parameters are left"
    if kind == "prunable":
        layers = event.get("layers", {})
        return f"{sum(not why for why in layers.values())} of {len(layers)} layers can be cut"
    if kind == "thinned":
        return f"pass {event.get('pass')}: {event.get('left_out')} of {event.get('of')} samples left out"
    if kind == "notice":
        return str(event.get("text", ""))
    rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("event", "time"))
    return f"{kind}: {rest}" if rest else kind


def slow_ranks(times: list[RankTimes]) -> set[int]:
    """Ranks whose own work takes clearly longer than that of the others."""
    if len(times) < 2:
        return set()
    usual = median_low(t.busy for t in times)
    return {t.rank for t in times if t.busy > SLOW * usual}
