"""``oars report``: one HTML file about one run or several, with everything in it, to be opened anywhere, offline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path

from oars.watch import cuts, explain, svg
from oars.watch.curves import charts, described, slow_ranks
from oars.watch.facts import facts
from oars.watch.runs import Run, WatchError, locked

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.6em;margin-bottom:.2em} h2{margin-top:2em;border-bottom:1px solid #ddd;font-size:1.25em}
svg{width:100%;height:auto;display:block;margin:1em 0}
table{border-collapse:collapse;margin:1em 0;font-size:14px} td,th{padding:.25em .8em;text-align:left;vertical-align:top;
border-bottom:1px solid #eee} td.n{text-align:right;font-variant-numeric:tabular-nums}
pre,code{background:#f6f6f6;font-size:14px} pre{padding:.6em;overflow-x:auto;white-space:pre-wrap}
.bad{color:#a00;font-weight:600} .note{color:#555}
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML page."""
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
            f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n" + "\n".join(body) + "</body></html>\n")


def html_table(head: list[str], rows: list[list[str]]) -> str:
    """A table; cells that begin with a digit are set to the right, and what went wrong is marked."""
    def cell(text: str) -> str:
        kind = " class=n" if text[:1].isdigit() or text[:1] == "-" else ""
        bad = text.startswith(("failed", "killed", "diverged", "NaN", "no metric"))
        return f"<td{kind}>" + (f"<span class=bad>{escape(text)}</span>" if bad else escape(text)) + "</td>"

    lines = ["".join(cell(text) for text in row) for row in rows]
    return ("<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
            + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>")


def report(runs: list[Run], out: Path) -> None:
    """Write the page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = [f"<p class=note>{escape(time.strftime('Written %Y-%m-%d %H:%M'))} by oars report.</p>"]
    if len(runs) == 1:
        body += _one(runs[0])
    else:
        going = locked()
        found = [facts(run, going) for run in runs]
        rows = [[run.name, *f.values()] for run, f in zip(runs, found, strict=True)]
        body.append(html_table(["run", *found[0]], rows))
        body += [svg.draw(chart) for chart in charts(runs)] or ["<p>None of these runs made a step.</p>"]
        for run in runs:
            body += [f"<h2>{escape(run.name)}</h2>", f"<pre>{escape(run.command)}</pre>", *_times(run), *_events(run)]
    write(out, page(title, body))


def write(out: Path, text: str) -> None:
    """Write a page, or say in one line why not."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WatchError(f"cannot write {out}: {error.strerror}") from None


def _one(run: Run) -> list[str]:
    known = [[name, value] for name, value in facts(run, locked()).items() if value]
    body = [f"<pre>{escape(run.command)}</pre>", html_table(["", ""], known), "<h2>Curves</h2>"]
    body += [svg.draw(chart) for chart in charts([run])] or ["<p>This run made no step.</p>"]
    body += [svg.draw(chart) for chart in cuts.charts(run.folder)]
    if made := cuts.rows(run.folder):
        body += ["<h2>Cuts</h2>", html_table(cuts.HEAD, made)]
    body += _times(run) or ["<p class=note>Where the time went was not recorded.</p>"]
    body += _events(run)
    body += _split(run)
    plan = {k: v for k, v in run.written.items() if k != "versions"}
    body += ["<h2>Configuration</h2>", f"<pre>{escape(json.dumps(plan, indent=1))}</pre>", "<h2>Environment</h2>",
             html_table(["", ""], [[str(k), str(v)] for k, v in run.plan.versions.items()])]
    return body


def _split(run: Run) -> list[str]:
    above, rows, below = explain.section(run)
    table = [html_table(["cost", "where", "what was not split", "to change"], rows)] if rows else []
    return ["<h2>What was split</h2>", *(f"<p>{escape(line)}</p>" for line in above), *table,
            *(f"<p>{escape(line)}</p>" for line in below)]


def _times(run: Run) -> list[str]:
    times = run.times
    if not times:
        return []
    slow = slow_ranks(times)
    body = ["<h2>Time</h2>", svg.bars(times, slow)]
    if slow:
        body.append(f"<p class=bad>The others wait for rank {', '.join(map(str, sorted(slow)))}: "
                    "its own work takes more than 1.1 times the median's.</p>")
    body.append(html_table(["rank", "memory", "GPU memory"], [
        [str(t.rank), *(f"{m / 2**20:,.0f} MiB" if m else "" for m in (t.memory, t.device_memory))] for t in times]))
    return body


def _events(run: Run) -> list[str]:
    if not run.events:
        return []
    begin = run.started or 0.0
    return ["<h2>Events</h2>", html_table(["seconds since the start", "what"], [
        [f"{float(e['time']) - begin:.2f}" if isinstance(e.get("time"), (int, float)) else "", described(e)]
        for e in run.events])]
