"""What the user sees of a run: the voice's output as it comes, a status line out of its way, the closing lines.

The voice writes to files; its bytes are copied from there to this terminal. The status line is drawn only while the
script is silent and its last byte was a newline, and is erased before the next byte, so a progress bar never meets it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.plan import Plan
from oars.rank.notebook_file import is_notebook
from oars.watch import cuts, explain
from oars.watch.facts import size
from oars.watch.runs import Run

SILENT_FOR = 0.3  # seconds without output before the status line may appear
REDRAW_EVERY = 0.25
ERASE = b"\r\x1b[K"
# What Open MPI says in a rank when another dies: while it waits in a non-blocking collective or, where deaths are not
# survived, before it ends. We say it better, and mpirun.log has it too. And TensorFlow at the end of each data set.
_NOISE = re.compile(rb"NBC_Progress: an error \d+ was found during schedule [^\n]*\n\n?"
                    rb"|Error in NBC_Start_round\(\) \(-?\d+\)\n"
                    rb"|^\[[^\]:\s]+:\d+\] \*\*\* [^\n]*\n"
                    rb"|(?:\d{4}-\d\d-\d\d [\d:.]+: )?[IWE][\d :.]*(?:tensorflow/core/framework/)?local_rendezvous\.cc:"
                    rb"\d+\] Local rendezvous is aborting[^\n]*\n(?:\s+\[\[[^\n]*\n)?", re.M)


class Screen:
    """Copies the voice's two files to stdout and stderr, and draws the status line on a terminal."""

    def __init__(self, folder: Path, show: bool, quiet: bool, one_stream: bool, resumed: bool = False) -> None:
        self.folder = folder
        self.show = show
        self._one_stream = one_stream
        # A resumed run's files go on: what they held before was shown then.
        self._starts = {p.name: p.stat().st_size for p in folder.glob("rank-*.*")} if resumed else {}
        self.begin()
        self._status = show and not quiet and os.isatty(2)
        self._shared_with_stdout = one_stream or os.isatty(1)  # else stdout does not move this terminal's cursor
        self._drawn = b""
        self._at_line_start = True
        self._wrote_at = self._drew_at = 0.0

    def begin(self) -> None:
        """Read rank 0's files from their beginning."""
        self.voice = 0
        self._files = [_Tail(self.folder / runfolder.log(0), 1, self._starts)]
        if not self._one_stream:
            self._files.append(_Tail(self.folder / runfolder.err(0), 2, self._starts))

    def update(self, to_the_end: bool = False) -> bool:
        """Copy what is new, if there is something; redraw the status line if it is time."""
        if not self.show:
            return False
        new = False
        for tail in self._files:
            reads = 0  # a script that prints faster than we copy must not keep us from watching it
            while (to_the_end or reads < 16) and (data := tail.read()):
                self.write(tail.target, data)
                reads, new = reads + 1, True
        now = time.monotonic()
        if (self._status and self._at_line_start and now - self._wrote_at >= SILENT_FOR
                and now - self._drew_at >= REDRAW_EVERY):
            self._drew_at = now
            self._draw(status_text(self.folder))
        return new

    def follow(self, rank: int) -> None:
        """The voice died: show what ``rank`` writes, from where the dead one stopped."""
        if self.show:
            self.update(to_the_end=True)
        self.voice = rank
        names = (runfolder.log, runfolder.err)  # the first alone, where both are one stream
        for tail, name in zip(self._files, names, strict=False):
            tail.go_on_with(self.folder / name(rank))

    def write(self, target: int, data: bytes) -> None:
        """Put bytes on stdout (1) or stderr (2), the status line out of the way."""
        self.erase()
        if target == 2 and not self._at_line_start and data.startswith(b"oars: "):
            data = b"\n" + data  # a bar on stdout has begun this line
        if target == 2 or self._shared_with_stdout:
            self._at_line_start = data.endswith(b"\n")
            self._wrote_at = time.monotonic()
        view = memoryview(data)
        while view:
            view = view[os.write(target, view):]

    def say(self, line: str) -> None:
        """One line of ours on stderr, never glued to the script's last one."""
        start = "" if self._at_line_start else "\n"
        self.write(2, f"{start}oars: {line}\n".encode())

    def erase(self) -> None:
        """Take the status line away."""
        if self._drawn:
            self._drawn = b""
            os.write(2, ERASE)

    def _draw(self, text: str) -> None:
        line = text.encode()[: max(0, os.get_terminal_size(2).columns - 1)]
        if line and line != self._drawn:
            os.write(2, ERASE + line)
            self._drawn = line


class _Tail:
    """A file that grows, read from where the last read ended."""

    def __init__(self, path: Path, target: int, starts: dict[str, int]) -> None:
        self.path, self.target, self._starts = path, target, starts
        self._fd: int | None = None
        self._lines, self._begun = 0, b""  # whole lines shown, and what was shown of the next

    def read(self) -> bytes:
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                return b""
            os.lseek(self._fd, self._starts.get(self.path.name, 0), os.SEEK_SET)
        data = _NOISE.sub(b"", os.read(self._fd, 1 << 16))
        self._lines += data.count(b"\n")
        self._begun = (self._begun + data).rpartition(b"\n")[2]
        return data

    def go_on_with(self, path: Path) -> None:
        """Read another rank's file, behind as many lines as were shown: all ranks write the same ones."""
        if self._fd is not None:
            os.close(self._fd)
        # The file of a rank that joined began as a copy of the one we have read so far.
        self._starts.setdefault(path.name, self._starts.get(self.path.name, 0))
        self.path, self._fd = path, os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
        with open(path, "rb") as file:
            file.seek(self._starts.get(path.name, 0))
            lines = 0
            while lines < self._lines and (line := file.readline()):
                lines += not _NOISE.match(line + b"\n")
            if file.read(len(self._begun)) != self._begun:  # a progress bar, say: begin its line anew
                file.seek(-len(self._begun), os.SEEK_CUR)
            os.lseek(self._fd, file.tell(), os.SEEK_SET)


def status_text(folder: Path) -> str:
    """``step 120  loss 0.3421  812 samples/s``, from the last second of ``metrics.jsonl``."""
    steps = last_steps(folder)
    if not steps:
        return ""
    last, text = steps[-1], f"step {steps[-1]['step']}"
    if last["loss"] is not None:
        text += f"  loss {last['loss']:.4g}"
    recent = [step for step in steps if step["samples_per_s"] and step["time"] >= last["time"] - 1]
    seconds = sum(step["seconds"] for step in recent)
    if seconds:
        text += f"  {sum(step['samples_per_s'] * step['seconds'] for step in recent) / seconds:,.0f} samples/s"
    return text


def last_steps(folder: Path) -> list[dict[str, Any]]:
    """The last steps written to ``metrics.jsonl``, each with the seconds it took."""
    try:
        with open(folder / runfolder.METRICS, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 32768))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return []
    steps = [json.loads(line) for line in lines if line.startswith(b"{")]
    before = None
    for step in steps:
        step["seconds"] = step["time"] - before if before is not None else 0.0
        before = step["time"]
    return steps


def closing_lines(folder: Path, plan: Plan, code: int) -> list[str]:
    """What the run was, in one line, and one more for each gather that cost more than 2 % of the time."""
    ranks = plan.ranks
    parts = [f"{ranks} rank{'s' * (ranks > 1)}"]
    try:
        summary = json.loads((folder / runfolder.SUMMARY).read_text())
    except (OSError, ValueError):  # the voice was killed
        steps = last_steps(folder)
        summary = {"steps": steps[-1]["step"] if steps else 0, "seconds": None, "gathers": []}
    parts.append(f"{summary['steps']:,} step{'s' * (summary['steps'] != 1)}")
    seconds = summary["seconds"]
    if seconds:
        if summary["samples"]:
            parts.append(f"{summary['samples_per_s']:,.0f} samples/s")
        else:  # batches made by hand, whose rows nobody counted
            parts.append(f"{(summary['steps'] - 1) / seconds:,.3g} steps/s")
        if ranks > 1:
            parts.append(f"{100 * summary['exchange_seconds'] / seconds:.1f} % of the time in exchange")
    if summary.get("joined"):
        parts.append(f"{summary['joined']} joined")
    if summary.get("losses"):
        parts.append(f"{summary['losses']} death{'s' * (summary['losses'] > 1)} survived")
    if code:
        parts.append(f"exit code {code}")
    lines = [", ".join([*parts, str(folder)])]
    if ranks > 1 and not code and not summary.get("split", True):
        nothing = "no step was split" if summary["steps"] else "nothing was split"
        why = explain.SPLITS
        if explain.places(Run(folder)):
            name = folder.name if folder.parent == Path(runfolder.RUNS) else folder
            why = f"why, and what to change: oars explain {name}"
        lines.append(f"{nothing}: every rank did all of the work ({why})")
    for gather in sorted(summary["gathers"], key=lambda gather: -gather["seconds"]):
        if seconds and gather["seconds"] > 0.02 * seconds:
            where, _, operation = gather["site"].partition(" ")
            share = f"{100 * gather['seconds'] / seconds:.1f} % of the time"
            if gather["seconds"] > seconds:  # the time of steps: much was before them, or behind
                share = f"{gather['seconds']:.1f} s"
            lines.append(f"gathered at {where} ({operation}): {share}, {gather['times']:,} times, "
                         f"{size(gather['bytes'])}")
    copy = folder / runfolder.executed(plan.script)
    if is_notebook(plan.script, plan.module) and copy.exists():
        lines.append(f"the executed notebook: {copy}")
    if plan.prune is not None and not code:
        lines.append(cuts.closing(folder))
    return lines


def complain(line: str) -> None:
    """One line about something the user can put right."""
    print(f"oars: {line}", file=sys.stderr)
