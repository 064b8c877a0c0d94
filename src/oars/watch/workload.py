"""Workloads: what one rank has to compute, and to send, in a step; from runs, or from a TOML file.

A rank's time alone is ``step_seconds + rows * sample_seconds`` for forward and backward, and ``update_seconds`` for the
optimizer. One run tells only their sum, and all of it is taken to grow with the rows; runs with different batches per
rank tell them apart. Times of ranks that shared a node are first set right for what they did to each other there, by
the machine's curves. Steps that took more than twice the median are no jitter but something else (an evaluation, a
checkpoint) and are left out. Jitter is what a step differs by from those around it; what changes slowly (a machine that
others use as well) makes a run's figures less sure, and such runs count less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from oars.watch.machine import Fields, Machine, read_toml
from oars.watch.runs import Run, WatchError, find

FEWEST = 8  # steps to take a time from
AROUND = 4  # steps before and after one, which it is compared with
MEETINGS = 3.0  # of a step, where only one rank was run: the loss, the exchange's two
STILL = np.ones(1)


@dataclass(frozen=True)
class Workload:
    """A training, for ``simulate``; times are those of a rank that is alone on its node."""

    name: str
    batch: float  # samples a step, of all ranks together (strong scaling keeps it)
    rows: float  # samples a step, of one rank (weak scaling keeps it)
    sample_seconds: float
    step_seconds: float
    update_seconds: float
    forward: float  # share of forward and backward that is over before the first gradients are there
    nbytes: float  # exchanged in a step
    buckets: int  # in which they are exchanged, one by one, as backward goes on
    meetings: float  # small collectives a step
    jitter: np.ndarray  # factors that a step's time varies by, of mean 1
    error: float  # standard deviation of what the times are off by, relative

    def varied(self, rng: np.random.Generator) -> Workload:
        """The workload as it may really be."""
        off = math.exp(self.error * rng.standard_normal())
        return replace(self, sample_seconds=off * self.sample_seconds, step_seconds=off * self.step_seconds,
                       update_seconds=off * self.update_seconds)

    def with_rows(self, rows: float) -> Workload:
        """The same with so many samples a rank."""
        return replace(self, rows=rows)

    def faster(self, times: float) -> Workload:
        """The same where a rank computes so many times as fast."""
        return replace(self, sample_seconds=self.sample_seconds / times, step_seconds=self.step_seconds / times,
                       update_seconds=self.update_seconds / times)


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
    look = Fields(path, told := read_toml(path))
    rows = look.number("batch", least=1)
    return Workload(
        name=str(told.get("name", path.stem)), batch=rows, rows=rows,
        sample_seconds=look.number("sample_seconds"), step_seconds=look.number("step_seconds", 0.0),
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
    busy = times * (1 - share)
    around = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(busy, AROUND, "reflect"), 2 * AROUND + 1), 1)
    jitter = busy / around
    phases = [{p: t.seconds[p] for p in ("data", "forward", "backward", "update")} for t in run.times]
    totals = [sum(each.values()) for each in phases]
    work = [each["data"] + each["forward"] + each["backward"] for each in phases]
    blocks = [block.mean() for block in np.array_split(busy, 8)]
    hosts = run.plan.get("hosts")
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
    per_row, fixed = fit([s.rows for s in seen], work, sure)
    first, widest = seen[0], max(seen, key=lambda s: s.ranks)
    told = widest.run.summary
    if not told.get("exchange_bytes"):
        raise WatchError(f"{widest.run.name} does not tell how much ranks exchange: give a run on two ranks or more "
                         "that came to its end")
    return Workload(
        name=first.run.what, batch=first.rows * first.ranks, rows=first.rows, sample_seconds=per_row,
        step_seconds=fixed, update_seconds=float(np.average(updates, weights=sure**2)), forward=first.forward,
        nbytes=float(told["exchange_bytes"]), buckets=1,
        meetings=float(told.get("meetings") or MEETINGS) if widest.ranks > 1 else MEETINGS,
        jitter=own_jitter(np.concatenate([s.jitter for s in seen]), machine), error=float(1 / np.sqrt(np.sum(sure**2))))


def own_jitter(seen: np.ndarray, machine: Machine) -> np.ndarray:
    """Jitter without what a node's cores differ by: a rank that moves between them shows that as jitter, and it is
    simulated by itself, as the ranks' spread."""
    cores = max(0.0, max(machine.spread) ** 2 - machine.spread[0] ** 2)
    left = math.sqrt(max(0.0, 1 - cores / variance)) if (variance := float(seen.var())) else 0.0
    return np.sort(1 + left * (seen - 1)) if left else STILL


def fit(rows: list[float], seconds: list[float], sure: np.ndarray) -> tuple[float, float]:
    """Seconds a row and seconds besides, neither below 0, that come nearest (by their ratios, the surer ones first)."""
    x, y = np.array(rows), np.array(seconds)
    through = float(np.average(y / x, weights=sure**2)), 0.0
    if np.ptp(x) < 0.05 * x.max():
        return through
    design = np.stack([x, np.ones_like(x)], 1) / y[:, None]
    slope, rest = np.linalg.lstsq(design * sure[:, None], sure, rcond=None)[0]
    if rest < 0:
        return through
    return (float(slope), float(rest)) if slope > 0 else (0.0, float(np.average(y, weights=sure**2)))
