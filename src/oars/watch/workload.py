"""Workloads: what one rank has to compute, and to send, in a step; from runs, or from a TOML file.

A rank's time alone is that of forward and backward, which depends on its rows, and the optimizer's. One run tells it
for one number of rows, and it is taken to grow with them. Runs with other batches tell it for other numbers; in between
it is interpolated, because it is no straight line (large batches do not fit caches). Times of ranks that shared a node
are first set right for what they did to each other there, by the machine's curves.

Steps that took more than twice the median are no jitter but something else (an evaluation, a checkpoint) and are left
out. Jitter is what a step differs by from those around it, in the calmest run: what changes slowly (a machine that
others use as well, a rank that moves between unlike cores) makes a run's figures less sure, and such runs count less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from oars.watch.machine import Fields, Line, Machine, read_toml
from oars.watch.runs import Run, WatchError, find

FEWEST = 8  # steps to take a time from
AROUND = 4  # steps before and after one, which it is compared with
MEETINGS = 6.0  # of a step, where only one rank was run: for the batch, the loss, the exchange
ALIKE = 1.1  # runs whose rows differ by less tell of the same number of them
STILL = np.ones(1)


@dataclass(frozen=True)
class Workload:
    """A training, for ``simulate``; times are those of a rank that is alone on its node."""

    name: str
    batch: float  # samples a step, of all ranks together (strong scaling keeps it)
    rows: float  # samples a step, of one rank (weak scaling keeps it)
    work: Line  # seconds of forward and backward, by rows
    update_seconds: float
    forward: float  # share of forward and backward that is over before the first gradients are there
    nbytes: float  # exchanged in a step
    buckets: int  # in which they are exchanged, one by one, as backward goes on; 0: as oars does between hosts
    meetings: float  # small collectives a step
    jitter: np.ndarray  # factors that a step's time varies by, of mean 1
    error: float  # standard deviation of what the times are off by, relative

    def varied(self, rng: np.random.Generator) -> Workload:
        """The workload as it may really be."""
        off = math.exp(self.error * rng.standard_normal())
        return self.faster(1 / off)

    def with_rows(self, rows: float) -> Workload:
        """The same with so many samples a rank."""
        return replace(self, rows=rows)

    def faster(self, times: float) -> Workload:
        """The same where a rank computes so many times as fast."""
        return replace(self, work=self.work.times(1 / times), update_seconds=self.update_seconds / times)


@dataclass
class Seen:
    """What one run tells."""

    run: Run
    ranks: int
    on_node: int  # ranks on its fullest host
    rows: float  # samples of a rank in a step
    seconds: float  # of a step
    busy: float  # seconds of it in which a rank did not talk, the mean of all ranks
    update: float  # the optimizer's share of that
    forward: float
    jitter: np.ndarray
    error: float


def load(names: list[str], machine: Machine) -> tuple[Workload, list[Seen]]:
    """The workload that runs (or one file) tell of."""
    if names[0].endswith(".toml"):
        if len(names) > 1:
            raise WatchError(f"{names[0]} is a workload: give it alone, or run folders")
        return from_file(Path(names[0])), []
    seen = [look(find(name)) for name in names]
    return from_runs(seen, machine), seen


def from_file(path: Path) -> Workload:
    """A workload somebody wrote down, for what was not run here."""
    look = Fields(path, table := read_toml(path))
    rows, fixed = look.number("batch", least=1), look.number("step_seconds", 0.0)
    return Workload(
        name=str(table.get("name", path.stem)), batch=rows, rows=rows,
        work=Line((0.0, 1.0), (fixed, fixed + look.number("sample_seconds"))),
        update_seconds=look.number("update_seconds", 0.0), forward=min(1.0, look.number("forward", 1 / 3)),
        nbytes=look.number("bytes"), buckets=int(look.number("buckets", 1, least=1)),
        meetings=look.number("meetings", 0.0), jitter=normal(look.number("jitter", 0.0)),
        error=look.number("error", 0.02))


def normal(deviation: float) -> np.ndarray:
    """Factors around 1, spread as a normal distribution of this standard deviation."""
    if not deviation:
        return STILL
    bell = NormalDist(1.0, deviation)
    factors = np.array([bell.inv_cdf((i + 0.5) / 65536) for i in range(65536)])
    return np.maximum(factors, 0.1)


def look(run: Run) -> Seen:
    """Read a run's times; WatchError where there are too few."""
    steps = run.steps
    times = np.diff(steps.time)
    share, rate = np.nan_to_num(np.array([steps.exchange_share[1:], steps.samples_per_s[1:]]))
    first = max(2, len(times) // 10)  # what has to warm up
    typical = np.arange(len(times)) >= first
    typical &= times <= 2 * np.median(times[typical]) if typical.any() else False
    times, share, rate = times[typical], share[typical], rate[typical]
    if len(times) < FEWEST or not run.times:
        raise WatchError(f"{run.name} has {len(steps.step)} steps, too few to take a time from: {FEWEST + 4} are "
                         "needed, and more are better")
    samples = round(float(np.median(times * rate)))
    if not samples:
        raise WatchError(f"{run.name} does not tell how many samples a step has, it makes its batches by hand: write a "
                         "workload file instead, see docs/predict.md")
    busy = np.maximum(times * (1 - share), 1e-9)
    around = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(busy, AROUND, "reflect"), 2 * AROUND + 1), 1)
    jitter = busy / around
    phases = [{p: t.seconds[p] for p in ("data", "forward", "backward", "update")} for t in run.times]
    totals = [sum(each.values()) for each in phases]
    work = [each["data"] + each["forward"] + each["backward"] for each in phases]
    blocks = [block.mean() for block in np.array_split(busy, 8)]
    hosts = run.plan.hosts
    return Seen(
        run=run, ranks=run.ranks, on_node=max(n for _, n in hosts) if hosts else run.ranks,
        rows=samples / run.ranks, seconds=float(times.mean()),
        busy=float(busy.mean()) * (float(np.mean(totals)) / totals[0] if totals[0] else 1.0),
        update=phases[0]["update"] / (totals[0] or 1.0),
        forward=(phases[0]["data"] + phases[0]["forward"]) / (work[0] or 1.0),
        jitter=jitter / jitter.mean(), error=max(0.01, float(np.std(blocks) / np.mean(blocks))))


def from_runs(seen: list[Seen], machine: Machine) -> Workload:
    """One workload out of what several runs tell."""
    work = [s.busy * (1 - s.update) * machine.at("speed", s.on_node) for s in seen]
    updates = [s.busy * s.update * machine.at("memory", s.on_node) for s in seen]
    sure = np.array([1 / s.error for s in seen])
    first, widest = seen[0], max(seen, key=lambda s: s.ranks)
    summary = widest.run.summary
    if not summary.get("exchange_bytes"):
        raise WatchError(f"{widest.run.name} does not tell how much ranks exchange: give a run on two ranks or more "
                         "that came to its end")
    return Workload(
        name=first.run.what, batch=first.rows * first.ranks, rows=first.rows,
        work=through([s.rows for s in seen], work, sure),
        update_seconds=float(np.average(updates, weights=sure**2)), forward=first.forward,
        nbytes=float(summary["exchange_bytes"]),
        buckets=0 if widest.on_node == widest.ranks or summary.get("ahead_bytes") else 1,
        meetings=float(summary.get("meetings") or MEETINGS) if widest.ranks > 1 else MEETINGS,
        jitter=np.sort(min((s.jitter for s in seen), key=np.std)), error=float(1 / np.sqrt(np.sum(sure**2))))


def through(rows: list[float], seconds: list[float], sure: np.ndarray) -> Line:
    """Seconds by rows, through what was measured; runs with about as many rows are taken together. On to no rows it
    goes as the first two numbers of them lead, or to 0 if there is only one."""
    groups: list[list[int]] = []
    for i in np.argsort(rows):
        if groups and rows[i] <= ALIKE * rows[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    weights = [sure[group] ** 2 for group in groups]
    known = [(float(np.average(np.array(rows)[group], weights=weight)),
              float(np.average(np.array(seconds)[group], weights=weight)))
             for group, weight in zip(groups, weights, strict=True)]
    none = 0.0
    if len(known) > 1:
        (x0, y0), (x1, y1) = known[:2]
        none = min(y0, max(0.0, y0 - (y1 - y0) / (x1 - x0) * x0))
    return Line((0.0, *(x for x, _ in known)), (none, *(y for _, y in known)))
