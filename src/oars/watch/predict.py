"""``oars predict``: how fast a training would be on a machine, and on how many ranks, that one does not have.

The steps are simulated (``simulate``) for a workload (``workload``: from short runs, or from a file) on a machine
(``machine``: shipped, or measured by ``oars doctor --net``). The band holds 80 % of simulations in which every input is
off by as much as it may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from oars.watch import svg, terminal
from oars.watch.chart import Chart, Series
from oars.watch.facts import PAYS, number
from oars.watch.machine import Machine, find
from oars.watch.report import html_table, page, write
from oars.watch.runs import WatchError
from oars.watch.simulate import Step, Sync, formula, simulate
from oars.watch.workload import Seen, Workload, load

SEEDS = 16  # simulations behind a band; half as many from MANY ranks on, where each costs more and differs less
MANY = 10_000
HEAD = ["ranks", "nodes", "step", "80 % band", "formula", "samples/s", "speedup", "efficiency", "computing"]


@dataclass
class Point:
    """A prediction for one number of ranks; ``low`` and ``high`` are the band's ends."""

    ranks: int
    nodes: int
    seconds: float
    low: float
    high: float
    formula: float
    rate: float  # samples a second
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    computing: float  # share of the step


def predict(names: list[str], where: str, sizes: list[int], weak: bool, syncs: list[Sync], faster: float,
            out: Path | None) -> int:
    """Print the tables and the picture; write them to ``out`` as well."""
    machine = find(where)
    check_size(machine, max(sizes))
    training, seen = load(names, machine)
    lines = [summary(training, machine, weak), *checks(training, machine, seen)]
    training = training.faster(faster)
    series = {sync: [point(training, machine, n, sync, weak) for n in sizes] for sync in syncs}
    drawn = charts(series, weak)
    print("\n".join(lines))
    for chart in drawn:
        print(f"\n{terminal.draw(chart)}")
    endings = {sync: ending(training, machine, max(sizes), sync, weak) for sync in syncs}
    for sync, points in series.items():
        print(f"\n{sync}\n{terminal.table(HEAD, rows(points))}\n{endings[sync]}")
    if out is None:
        return 0
    if out.suffix.lower() == ".html":
        body = [*(f"<p>{escape(line)}</p>" for line in lines), *(svg.draw(chart) for chart in drawn)]
        for sync, points in series.items():
            body += [f"<h2>{escape(str(sync))}</h2>", html_table(HEAD, rows(points)), f"<p>{endings[sync]}</p>"]
        write(out, page(f"{training.name} on {machine.name}", body))
    else:
        from oars.watch.picture import save

        save(drawn, out)
    print(out)
    return 0


def check_size(machine: Machine, ranks: int) -> None:
    """Whether so many ranks can be thought of there."""
    room = machine.nodes * machine.ranks_per_node
    if ranks <= room:
        return
    what = f"{machine.nodes:,} node{'s' * (machine.nodes > 1)} of {machine.ranks_per_node}"
    if machine.hop.sizes == (0.0,):
        raise WatchError(f"{ranks:,} ranks do not fit {machine.name}: it is {what}, and has no network")
    print(f"oars: {machine.name} has {what} ranks: more than {room:,} are predicted as if it were larger")


def summary(training: Workload, machine: Machine, weak: bool) -> str:
    """What goes in, in one line."""
    size = f"{number(training.rows)} samples a rank" if weak else f"{number(training.batch)} samples"
    return (f"{training.name} on {machine.name}: {'weak' if weak else 'strong'} scaling, {size} a step; alone, a rank "
            f"takes {_time(training.work(training.rows))} for {number(training.rows)} samples and "
            f"{_time(training.update_seconds)} to update; {training.nbytes / 1e6:.4g} MB are exchanged in "
            f"{_buckets(training.buckets)}, with {training.meetings:.3g} meetings")


def _buckets(count: int) -> str:
    if not count:
        return "one piece on one host and in buckets during backward between hosts"
    return f"{count} bucket{'s' * (count > 1)}"


def checks(training: Workload, machine: Machine, seen: list[Seen]) -> list[str]:
    """How well the given runs themselves are met; and what in them cannot be compared."""
    lines = []
    for one in seen:
        model = typical(training.with_rows(one.rows), machine, one.ranks, Sync(), True).seconds
        lines.append(f"check: {one.run.name}, {one.ranks} rank{'s' * (one.ranks > 1)} of {number(one.rows)} samples: "
                     f"{1000 * one.seconds:.4g} ms a step measured, {1000 * model:.4g} by the model "
                     f"({100 * (model / one.seconds - 1):+.0f} %)")
    threads = {one.run.plan.threads for one in seen}
    if len(threads) > 1:
        counts = ", ".join(map(str, sorted(threads)))
        lines.append(f"oars: these runs had {counts} threads a rank: what they tell does not fit together; set "
                     "OMP_NUM_THREADS alike")
    return lines


def point(training: Workload, machine: Machine, ranks: int, sync: Sync, weak: bool) -> Point:
    """The prediction for one number of ranks."""
    step, alone = typical(training, machine, ranks, sync, weak), simulated(training, machine, 1, Sync(), weak, 0)
    share = ranks if not weak else 1
    efficiency, spread = alone.seconds / step.seconds / share, []
    for seed in range(1, 1 + (SEEDS if ranks < MANY else SEEDS // 2)):
        rng = np.random.default_rng(seed)
        load, on = training.varied(rng), machine.varied(rng)
        once = simulated(load, on, ranks, sync, weak, seed).seconds
        spread.append((once, simulated(load, on, 1, Sync(), weak, seed).seconds / once / share))
    low, high = np.quantile(np.array(spread), [0.1, 0.9], axis=0)
    low, high = np.minimum(low, [step.seconds, efficiency]), np.maximum(high, [step.seconds, efficiency])
    samples = training.rows * ranks if weak else training.batch
    return Point(ranks, machine.split(ranks)[0], step.seconds, low[0], high[0],
                 formula(training, machine, ranks, sync, weak), samples / step.seconds, efficiency, low[1], high[1],
                 step.computing / step.seconds)


def simulated(training: Workload, machine: Machine, ranks: int, sync: Sync, weak: bool, seed: int) -> Step:
    """One simulation, the same for the same seed."""
    return simulate(training, machine, ranks, sync, weak, np.random.default_rng([seed, ranks]))


def typical(training: Workload, machine: Machine, ranks: int, sync: Sync, weak: bool) -> Step:
    """The mean of some simulations: few ranks may happen to be quick or slow ones."""
    steps = [simulated(training, machine, ranks, sync, weak, seed) for seed in range(12 if ranks < MANY else 2)]
    return Step(float(np.mean([s.seconds for s in steps])), float(np.mean([s.computing for s in steps])))


def ending(training: Workload, machine: Machine, most: int, sync: Sync, weak: bool) -> str:
    """The number of ranks beyond which more do not pay. A doubling that does not pay may be followed by some that do:
    where one node becomes two, say."""
    sizes = [2**k for k in range(max(2, most).bit_length())]
    rates = [(n if weak else 1) / typical(training, machine, n, sync, weak).seconds for n in sizes]
    gains = [after / before for before, after in zip(rates, rates[1:], strict=False)]
    last = max((k + 1 for k, gain in enumerate(gains) if gain >= PAYS), default=0)
    if last == len(gains):
        return f"more ranks pay up to {sizes[last]:,}, as far as this was looked at"
    return (f"beyond {sizes[last]:,} rank{'s' * (last > 0)} more do not pay: twice as many give {gains[last]:.2f} "
            "times the samples a second")


def rows(points: list[Point]) -> list[list[str]]:
    """The table."""
    return [[f"{p.ranks:,}", f"{p.nodes:,}", _time(p.seconds), f"{_time(p.low)} to {_time(p.high)}", _time(p.formula),
             number(p.rate), f"{p.efficiency * p.ranks:,.4g}", f"{100 * p.efficiency:.1f} %",
             f"{100 * p.computing:.0f} %"] for p in points]


def _time(seconds: float) -> str:
    size, unit = (1.0, "s") if seconds >= 1 or not seconds else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * size:.4g} {unit}"


def charts(series: dict[Sync, list[Point]], weak: bool) -> list[Chart]:
    """Samples a second and efficiency, by ranks."""
    kind = "weak" if weak else "strong"
    rates, shares = [], []
    for sync, points in series.items():
        xs = [float(p.ranks) for p in points]
        rates.append(Series(str(sync), xs, [p.rate for p in points], points=True,
                            low=[p.rate * p.seconds / p.high for p in points],
                            high=[p.rate * p.seconds / p.low for p in points]))
        shares.append(Series(str(sync), xs, [100 * p.efficiency for p in points], points=True,
                             low=[100 * p.efficiency_low for p in points],
                             high=[100 * p.efficiency_high for p in points]))
    first = next(iter(series.values()))[0]
    one = first.rate / first.ranks / first.efficiency  # a rank alone
    xs = rates[0].x
    rates.append(Series("ideal", xs, [one * x for x in xs], reference=True))
    wide = max(xs) / min(xs) > 32
    return [Chart(f"Predicted throughput ({kind} scaling)", "ranks", "samples/s", rates, log_x=wide, log_y=wide,
                  zero=not wide),
            Chart(f"Predicted efficiency ({kind} scaling)", "ranks", "% of as many times one rank", shares, log_x=wide,
                  zero=True)]
