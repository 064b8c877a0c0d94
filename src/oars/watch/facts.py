"""What there is to say about a run in a few words, for lists, tables and reports."""

from __future__ import annotations

import math
import time

from oars.watch.runs import Run

PAYS = 1.1  # twice the ranks must give so many times the samples a second


def facts(run: Run, going: set[int]) -> dict[str, str]:
    """The columns of ``oars compare`` and the first table of a report."""
    losses = [loss for loss in run.steps.loss if math.isfinite(loss)]
    share = run.summary.get("exchange_seconds")
    seconds = run.seconds
    return {
        "state": verdict(run, going),
        "ranks": str(run.ranks),
        "steps": f"{run.last.get('step') or run.summary.get('steps') or 0:,}",
        "last loss": number(run.last.get("loss")),
        "smallest loss": number(min(losses)) if losses else "",
        "samples/s": number(run.rate),
        "seconds": number(seconds),
        "exchange": f"{100 * share / seconds:.1f} %" if share is not None and seconds and run.ranks > 1 else "",
        "deaths": str(run.summary.get("losses") or sum(len(e.get("ranks", [])) for e in run.events
                                                       if e["event"] == "lost") or ""),
        "started": when(run.started),
    }


def verdict(run: Run, going: set[int]) -> str:
    """The run's state, and that its loss is not finite any more."""
    state, loss = run.state(going), run.last.get("loss")
    return f"{state}, diverged" if isinstance(loss, float) and not math.isfinite(loss) else state


def number(value: object) -> str:
    """A number to read, NaN and infinities by name, nothing where nothing is known."""
    if not isinstance(value, (int, float)):
        return ""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size(nbytes: int) -> str:
    """Bytes to read."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} bytes"


def when(seconds: float | None) -> str:
    """A date to read."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""
