"""``oars explain``: what of a run was split, what was not and why, what to change, and whether more ranks would gain.

Read from what the run has recorded. A gather's time was measured where it happened. What every rank did alike (a model
that is replicated, batches that are read whole) could have taken each of N ranks an Nth: the rest is what it cost. The
estimate for other numbers of ranks: what was split takes them less, in proportion; messages, and what every rank does
alike, take them the same. Runs of the same script on other numbers of ranks, which lie beside it, say it better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oars.watch.facts import PAYS, number, size
from oars.watch.runs import PHASES, Run, all_runs

FEWEST = 8  # steps to take a time from
SHORT = 0.005  # seconds: a step that computes less spends most on calls, which take as long for fewer rows
MOST = 12  # places that are listed
LITTLE = 0.001  # of the time: not listed
WAITING = 0.02  # of the time in steps: worth a word

SPLITS = "oars splits batches in PyTorch, Keras, and TensorFlow 1 sessions under --tf1"
_LOOKS = {"__array__", "__dlpack__", "numpy", "tolist", "item", "repr", "str", "format", "getitem", "pickle",
          "iteration", "thread"}
_OURS = {"snapshot", "growing", "lineage", "backward"}


@dataclass
class Place:
    """Something that was gathered, or that every rank did alike."""

    seconds: float | None  # that each rank lost by it, if that is known
    most: bool  # it may be less
    at: str  # file:line
    what: str
    change: str

    def cost(self, run: Run) -> str:
        """``1.2 s, 3.4 % of the time``"""
        if self.seconds is None:
            return "not measured"
        total = run.seconds
        share = f", {100 * self.seconds / total:.1f} % of the time" if total and self.seconds <= total else ""
        return f"{'at most ' * self.most}{number(self.seconds)} s{share}"

    def little(self, run: Run) -> bool:
        """Whether it is not worth a change."""
        return self.seconds is not None and self.seconds < LITTLE * (run.seconds or 0.0)


@dataclass
class Spent:
    """Seconds of a rank, the mean of all: in what is split where it can be, in what every rank does, in messages."""

    data: float
    model: float
    rest: float
    exchange: float
    forward: float  # of ``model``, and
    backward: float
    steps: int

    @property
    def total(self) -> float:
        return self.data + self.model + self.rest + self.exchange


def show(run: Run) -> None:
    """Print all of it."""
    print(run.command)
    print(split(run))
    found = places(run)
    if found:
        print("\nWhat was not split, by the time that it cost:")
    listed = [place for place in found[:MOST] if place is found[0] or not place.little(run)]
    for place in listed:
        print(f"  {place.cost(run)}{', at ' * bool(place.at)}{place.at}")
        print(f"    {place.what}\n    to change: {place.change}")
    if left := [place for place in found if place not in listed]:
        print(f"  … and {len(left)} more, together {number(sum(place.seconds or 0.0 for place in left))} s")
    print("\n" + "\n".join([*step_time(run), *verdict(run)]))


def section(run: Run) -> tuple[list[str], list[list[str]], list[str]]:
    """The same for a report: what stands above the table, its rows, what stands below."""
    rows = [[place.cost(run), place.at, place.what, place.change] for place in places(run)]
    return [split(run)], rows, [*step_time(run), *verdict(run)]


def split(run: Run) -> str:
    """How many steps were split, in one line."""
    steps, known = run.summary.get("steps") or 0, run.summary.get("split_steps")
    if _ranks(run) < 2:
        return "one rank: there was nothing to split, and nobody to exchange with"
    if known is None:
        return "the run has not come to its end, which writes how many steps were split"
    if not steps:
        if run.summary.get("split"):
            return "part of the work was split, but no optimizer's step was seen"
        return f"nothing was split: no optimizer's step was seen ({SPLITS})"
    if not known:
        return f"none of {steps:,} steps was split: every rank did all of the work"
    return f"{known:,} of {steps:,} steps were split: what takes time in them was computed on own rows alone"


def places(run: Run) -> list[Place]:
    """What was gathered, and what every rank did alike: what cost most comes first."""
    found = [*_gathers(run), *_alike(run)] if _ranks(run) > 1 else []
    return sorted(found, key=lambda place: -1.0 if place.seconds is None else place.seconds, reverse=True)


def _gathers(run: Run) -> Iterator[Place]:
    for gather in run.summary.get("gathers") or []:
        at, _, operation = str(gather["site"]).partition(" ")
        often = f"{gather['times']:,} times" if gather["times"] > 1 else "once"
        yield Place(float(gather["seconds"]), False, at, f"gathered for {operation}: {often}, {size(gather['bytes'])}",
                    _advice(operation))


def _advice(operation: str) -> str:
    """What to do about an operation that needs all rows."""
    if operation in _LOOKS:
        return "look at the values less often (every 100 steps, say), or at a sum or a mean of them"
    if operation in _OURS:
        return "nothing: this belongs to snapshots and to ranks that come or die"
    if operation == "keep":
        return "delete the model's results before optimizer.step(): what is left is gathered, in case it is used later"
    if operation == "call":
        return ("call the module without hooks on gradients, nested tensors or torch.jit, and with at least a row "
                "for each rank")
    return (f"let {operation} work on each row by itself (along another dimension than the batch's), or call it less "
            "often; where it must see all rows, leave it")


def _alike(run: Run) -> Iterator[Place]:
    spent, timed = _spent(run), {str(e["site"]): e for e in run.summary.get("replicated") or []}
    ranks, steps = _ranks(run), run.summary.get("steps") or 0
    whole = 1 - (run.summary.get("split_steps") or 0) / steps if steps else 1.0  # the share of steps without a split
    for event in run.events:
        if event["event"] != "notice" or not event.get("change"):
            continue
        text, at, lost = str(event["text"]), str(event.get("at", "")), event.get("lost")
        here = next((e for site, e in timed.items() if f"{at} {text.split(' ')[0]}" == site), None)
        seconds: float | None = None
        if here is not None:
            seconds = _replicated(here, spent) * (1 - 1 / ranks)
        elif spent is not None and lost == "exchange":
            seconds = spent.exchange
        elif spent is not None and lost in ("data", "model"):
            seconds = (spent.data if lost == "data" else whole * spent.model) * (1 - 1 / ranks)
        yield Place(seconds, here is None, at, text, str(event["change"]))


def _replicated(calls: dict[str, Any], spent: Spent | None) -> float:
    """Seconds of a model that every rank computes, with its share of all backward passes."""
    forward, backward = float(calls["seconds"]), 0.0
    if spent is not None and spent.forward:
        backward = spent.backward * min(1.0, float(calls["tracked_seconds"]) / spent.forward)
    return forward + backward


def step_time(run: Run) -> list[str]:
    """What a step's time went into, and what of it was waiting."""
    spent = _spent(run)
    if spent is None or not spent.total:
        return []
    step, lines = spent.total / spent.steps, []
    if spent.forward or spent.backward:
        parts = {p: sum(t.seconds[p] for t in run.times) / len(run.times) for p in PHASES}
    else:
        parts = {"computing": spent.model, "exchange": spent.exchange}
    shares = ", ".join(f"{name} {100 * seconds / spent.total:.1f} %" for name, seconds in parts.items())
    lines.append(f"a step took {1000 * step:.3g} ms: {shares}")
    if len(run.times) > 1:
        last = min(run.times, key=lambda t: t.seconds["exchange"])
        waited = sum(t.seconds["exchange"] for t in run.times) / len(run.times) - last.seconds["exchange"]
        if waited > WAITING * spent.total:
            lines.append(f"{100 * waited / spent.total:.1f} % of the step, or more, was waiting for rank {last.rank}, "
                         "the slowest")
    return lines


def verdict(run: Run) -> list[str]:
    """Whether more ranks would gain, and from which batch on."""
    ranks, lines, beside = _ranks(run), [], _beside(run)
    if run.rate:
        lines = [f"measured: {other.name} made {number(other.rate)} samples/s on {_width(other)}; this run made "
                 f"{run.rate / other.rate:.2f} times as many on {_width(run)}" for other in beside if other.rate]
    spent = _spent(run)
    if ranks < 2:
        half = (spent.data + spent.model) / 2 / spent.steps if spent is not None and spent.steps >= FEWEST else SHORT
        if half < SHORT:
            return [*lines, *_too_short(half, "of two ranks each would compute")]
        return [*lines, "whether more ranks would gain is seen with a run on two: oars run -n 2"]
    if run.summary.get("split") is False:
        return [*lines, "more ranks would not gain: each of them would do all of the work"
                + ", until what stands above is changed" * bool(places(run))]
    if spent is None or spent.steps < FEWEST:
        return [*lines, f"whether more ranks would gain cannot be said: {FEWEST} steps are needed for that"]
    one = next((other.rate for other in beside if other.ranks == 1), None)
    return [*lines, *_estimate(run, spent, ranks, run.rate / one if run.rate and one else None)]


def _estimate(run: Run, spent: Spent, ranks: int, measured: float | None) -> list[str]:
    """What the times of one run tell of other numbers of ranks, and of other batches; ``measured`` is how many times as
    fast as one rank it was, where there is such a run."""
    read_whole = any(event.get("lost") == "data" for event in run.events)
    steps, whole = run.summary.get("steps") or 0, 0.0
    if steps:
        whole = 1 - (run.summary.get("split_steps") or 0) / steps
    models = sum(_replicated(calls, spent) for calls in run.summary.get("replicated") or [])
    alike = min(spent.model, max(models, whole * spent.model)) + spent.rest + (spent.data if read_whole else 0.0)
    shared = spent.total - spent.exchange - alike  # the time that an Nth of the rows takes
    if shared <= 0:
        return ["more ranks would not gain: what is split takes no time"]
    gain = measured or (ranks * shared + alike) / spent.total
    more = spent.total / (shared / 2 + alike + spent.exchange)
    if shared < SHORT * spent.steps:
        return _too_short(shared / spent.steps, "a rank computes")
    lines = []
    if not measured:
        lines.append(f"estimated: {ranks} ranks make {gain:.1f} times the samples/s of one rank with as many threads")
    pays = min(more, gain * more) >= PAYS  # compared with these ranks, and with one
    lines.append(f"estimated: {2 * ranks} ranks, if each has cores of its own, would make {more:.2f} times the "
                 f"samples/s of {ranks}: more ranks would {'not ' * (not pays)}gain")
    if not pays:
        of_one = ((PAYS - 1) * alike + PAYS * spent.exchange) / (shared * (ranks - PAYS))
        of_twice = (PAYS - 1) * (alike + spent.exchange) / (shared * (1 - PAYS / 2))
        if (times := max(of_one, of_twice)) > 1:
            lines.append(f"it would pay from batches of about {_batch(run, times)} on (a larger batch is another "
                         "training: see --batch keep and --scale-lr)")
    return lines


def _too_short(seconds: float, who: str) -> list[str]:
    return [f"more ranks would not gain: {who} {1000 * seconds:.2g} ms in a step, and calls take most of that, "
            "however few the rows",
            f"it may pay where a rank computes {1000 * SHORT:.0f} ms or more: with a larger batch or network"]


def _batch(run: Run, times: float) -> str:
    samples, steps = run.summary.get("samples") or 0, run.summary.get("steps") or 0
    if not samples or not steps:
        return f"{times:.2g} times the size"
    needed = times * samples / steps
    unit = 10 ** max(0, math.floor(math.log10(needed)) - 1)
    return f"{unit * math.ceil(needed / unit):,} samples (now {samples / steps:,.0f})"


def _beside(run: Run) -> list[Run]:
    """Runs of the same on other numbers of ranks: the newest of each."""
    def kind(one: Run) -> tuple:
        plan = one.plan
        return one.what, plan.cwd, plan.batch, plan.sync, plan.wire

    newest = {other.ranks: other for other in all_runs(run.folder.absolute().parent)
              if other.ranks != run.ranks and kind(other) == kind(run) and (other.summary.get("steps") or 0) > FEWEST}
    return [newest[ranks] for ranks in sorted(newest)]


def _width(run: Run) -> str:
    """``2 ranks of 1 thread``"""
    ranks, threads = run.ranks, run.plan.threads
    return f"{ranks} rank{'s' * (ranks > 1)}" + f" of {threads} thread{'s' * (threads > 1)}" * bool(threads)


def _ranks(run: Run) -> int:
    """Those that train."""
    return run.ranks - run.plan.servers


def _spent(run: Run) -> Spent | None:
    """Of the ranks whose phases were recorded; else of the run, where computing is one."""
    times = [t for t in run.times if sum(t.seconds.values()) > 0]
    if times:
        mean = {p: sum(t.seconds[p] for t in times) / len(times) for p in PHASES}
        return Spent(mean["data"], mean["forward"] + mean["backward"], mean["update"] + mean["other"], mean["exchange"],
                     mean["forward"], mean["backward"], max(1, max(t.steps for t in times) - 1))
    seconds, exchange = run.summary.get("seconds"), run.summary.get("exchange_seconds")
    if not seconds:
        return None
    steps = max(1, (run.summary.get("steps") or 0) - 1)
    return Spent(0.0, seconds - (exchange or 0.0), 0.0, exchange or 0.0, 0.0, 0.0, steps)
