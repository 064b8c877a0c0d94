"""``oars scale``: the same script on several numbers of ranks, and how much faster it gets, results beside speed.

Every rank has the same number of cores on whatever N, so that N ranks have N times what one has. Strong scaling: the
script's batch is shared by the ranks, the training stays the same. Weak: every rank has a batch of the script's size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from re import Pattern
from statistics import median

from oars import runfolder
from oars.watch import svg, terminal
from oars.watch.chart import Chart, Series
from oars.watch.curves import charts
from oars.watch.facts import number
from oars.watch.report import html_table, page, write
from oars.watch.runs import Run, WatchError
from oars.watch.start import Trial, gpus, metric_name, metric_of, run_all, series_name

HEAD = ["ranks", "seconds", "samples/s", "speedup", "efficiency", "exchange", "loss", "replicas"]


@dataclass
class Point:
    """What the repeats on one number of ranks gave: medians."""

    ranks: int
    seconds: float
    rate: float  # samples a second; steps a second where nobody counted samples
    unit: str
    exchange: float
    loss: float | None
    metric: float | None
    agree: str


def scale(script: list[str], options: list[str], sizes: list[int], weak: bool, repeats: int, name: str | None,
          pattern: Pattern | None, out: Path | None) -> int:
    """Run, print the table and the picture, write the report; 1 if a run failed or the weights of ranks differ."""
    spec = {"script": script, "ranks": sizes, "weak": weak, "repeats": repeats, "options": options}
    folder = series_name("scale", name, script, spec)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, cores // max(sizes))
    if max(sizes) > cores:
        print(f"oars: {max(sizes)} ranks on {cores} cores share them: times on more ranks than cores show no scaling")
    if 0 < max(sizes) < len(gpus()):
        print(f"oars: {max(sizes)} of {len(gpus())} GPUs are used at most: the others sit idle")
    options = [*options, "--batch", "keep"] if weak else options
    trials = (Trial(f"{folder.name}-n{n}-r{repeat}", n, script, {"ranks": str(n)}, options)
              for repeat in range(1, repeats + 1) for n in sizes)
    done = run_all(trials, 1, lambda trial: trial.ranks * each, _said)
    points, failed = [], []
    for n in sizes:
        mine = [t for t in done if t.ranks == n and t.run is not None]
        good = [t.run for t in mine if t.run is not None and t.run.end.get("code") == 0 and t.run.seconds]
        failed += [t for t in mine if t.run not in good]
        if good:
            points.append(_point(n, good, pattern))
        busy = [t.busy_cores for t in mine if t.busy_cores is not None]
        if busy and median(busy) < 0.5 * min(cores, n * each):
            print(f"oars: on {n} rank{'s' * (n > 1)} {median(busy):.1f} of {min(cores, n * each)} cores were busy: "
                  "the others sat idle")
    for trial in failed:
        assert trial.run is not None
        print(f"oars: {trial.run.name}: {trial.run.state(set())}, or too few steps to time; see {trial.run.folder}")
    if not points:
        raise WatchError("no run came to a good end with more than one step, so there is nothing to compare")
    runs = [t.run for t in done if t.run is not None][:len(sizes)]
    return _tell(points, metric_name(pattern) if pattern else "", weak, each, runs, folder, out, bool(failed))


def _tell(points: list[Point], metric: str, weak: bool, each: int, runs: list[Run], folder: Path, out: Path | None,
          failed: bool) -> int:
    kind = "weak" if weak else "strong"
    head, rows = _table(points, metric)
    text = f"{kind} scaling, {each} core{'s' * (each > 1)} a rank, against {points[0].ranks} rank" \
           f"{'s' * (points[0].ranks > 1)}"
    drawn = _chart(points, kind)
    print(f"{terminal.draw(drawn)}\n\n{text}\n{terminal.table(head, rows)}")
    unequal = [p.ranks for p in points if p.agree not in ("agree", "")]
    for ranks in unequal:
        print(f"oars: on {ranks} ranks the replicas ended with different weights: this is no data-parallel training")
    body = [f"<p>{text}.</p>", svg.draw(drawn), html_table(head, rows), "<h2>Curves</h2>",
            *(svg.draw(chart) for chart in charts(runs)), f"<pre>{escape(runs[0].what)}</pre>"]
    write(folder / runfolder.REPORT, page(folder.name, body))
    if out is not None:
        from oars.watch.picture import save

        save([drawn], out)
        print(out)
    print(folder / runfolder.REPORT)
    return 1 if failed or unequal else 0


def _said(trial: Trial) -> None:
    assert trial.run is not None
    print(f"oars: {trial.run.name}: {trial.run.state(set())}, {number(trial.run.seconds)} s", flush=True)


def _point(ranks: int, runs: list[Run], pattern: Pattern | None) -> Point:
    rates = [float(run.rate or 0) for run in runs]
    unit = "samples/s"
    if not all(rates):  # batches made by hand
        rates, unit = [(len(run.steps.step) - 1) / (run.seconds or 1) for run in runs], "steps/s"
    shares = [float(run.summary.get("exchange_seconds") or 0) / (run.seconds or 1) for run in runs]
    return Point(ranks, median(float(run.seconds or 0) for run in runs), median(rates), unit, median(shares),
                 metric_of(runs[-1], None)[0], metric_of(runs[-1], pattern)[0] if pattern else None,
                 _agree(runs[-1], ranks))


def _agree(run: Run, ranks: int) -> str:
    """Whether all ranks ended with the same weights, to the bit."""
    if ranks == 1:
        return ""
    try:
        digests = {(run.folder / runfolder.weights_digest(rank)).read_text() for rank in range(ranks)}
    except OSError:
        return "unknown"
    return "agree" if len(digests) == 1 else "differ"


def _table(points: list[Point], metric: str) -> tuple[list[str], list[list[str]]]:
    first = points[0]
    head = [points[0].unit if name == "samples/s" else name for name in HEAD]
    rows = []
    for p in points:
        speedup = p.rate / first.rate if first.rate else 0.0
        rows.append([str(p.ranks), f"{p.seconds:.2f}", number(p.rate), f"{speedup:.2f}",
                     f"{100 * speedup * first.ranks / p.ranks:.0f} %", f"{100 * p.exchange:.1f} %", number(p.loss),
                     p.agree])
        if metric:
            rows[-1].insert(7, number(p.metric))
    return (head[:7] + [metric] + head[7:] if metric else head), rows


def _chart(points: list[Point], kind: str) -> Chart:
    base = points[0]
    xs = [float(p.ranks) for p in points]
    speedups = [p.rate / base.rate * base.ranks if base.rate else 0.0 for p in points]
    lines = [Series("measured", xs, speedups, points=True),
             Series("ideal", xs, xs, reference=True)]
    return Chart(f"Speedup ({kind} scaling)", "ranks", "times as fast as one rank", lines, zero=True)
