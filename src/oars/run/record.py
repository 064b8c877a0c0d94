"""What a run leaves behind: ``metrics.jsonl``, ``events.jsonl`` and ``summary.json`` in the run folder.

Every rank has a Record; only the voice's writes. Adapters call it, watchers read the files. ``step`` is on the
training loop's path, so it only appends to a list; the lines are formatted and written a few times a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FLUSH_EVERY = 0.25  # seconds: what a status line can show, and what a killed run may lose


class Record:
    """Collects steps, notices and gathers, and writes them for the voice."""

    def __init__(self, folder: Path, voice: bool, world: Any = None) -> None:
        self.folder = folder
        self.voice = voice
        self.steps = 0
        self.samples = 0
        self.gathers: dict[str, list[float]] = {}  # "file:line operation" -> [times, seconds, bytes]
        self.interrupted = False  # Ctrl-C was pressed; for an adapter that polls, see ``polls``
        self.taken = False  # KeyboardInterrupt was raised for it
        self.polls = False  # set by an adapter that looks at ``interrupted`` and will raise on all ranks together
        self.played = False  # what the script does now it has done before: nothing is written
        self._world = world
        self._said: set[str] = set()
        self._pid = os.getpid()
        self._pending: list[tuple[int, Any, int, float, float]] = []
        self._flush_at = 0.0
        self._file: Any = None
        self._last: tuple[float, float] | None = None  # time and exchange seconds of the last step written
        self._resumed_at = 0  # samples
        self._first_step: tuple[float, float, int] | None = None  # its end, exchange seconds, samples
        self._last_step = (0.0, 0.0)

    def step(self, loss: Any, samples: int) -> None:
        """One optimizer step was done: its global loss (a number, a tensor or None) and how many samples went in."""
        if self.played:
            return
        self.steps += 1
        self.samples += samples
        if not self.voice:
            return
        if loss is not None and not isinstance(loss, float):
            loss = _frozen(loss)
        now = time.time()
        self._pending.append((self.steps, loss, samples, now, self._world.seconds if self._world is not None else 0.0))
        if now >= self._flush_at:
            self.flush()

    def notice(self, text: str) -> None:
        """Tell the user one line, once per distinct text."""
        if text not in self._said:
            self._said.add(text)
            if self.played:
                return
            self.event("notice", text=text)
            if self.voice:
                print(f"oars: {text}", file=sys.__stderr__, flush=True)

    def gather(self, site: str, seconds: float, nbytes: int) -> None:
        """Rows were gathered at ``site`` (``file:line operation``)."""
        entry = self.gathers.setdefault(site, [0, 0.0, 0])
        entry[0] += 1
        entry[1] += seconds
        entry[2] += nbytes

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to ``events.jsonl``."""
        if self.voice:
            with open(self.folder / "events.jsonl", "a") as f:
                f.write(json.dumps({"time": time.time(), "event": kind, **fields}) + "\n")

    def raise_interrupt(self) -> None:
        """KeyboardInterrupt, here and now; the supervisor then gives the script time to end (see rank.py)."""
        self.interrupted, self.taken = False, True
        mark = self.folder / f"interrupted-{self._world.rank if self._world is not None else 0}"
        mark.touch()
        raise KeyboardInterrupt

    def resume(self, steps: int, samples: int) -> None:
        """Go on after this many steps; what ``metrics.jsonl`` tells of later ones is cut."""
        self.played, self.steps, self.samples, self._resumed_at = False, steps, samples, samples
        path, part = self.folder / "metrics.jsonl", self.folder / ".metrics.jsonl.part"
        if self.voice and path.exists():
            with open(path) as old, open(part, "w") as new:
                new.writelines(line for line in old if line.endswith("}\n") and json.loads(line)["step"] <= steps)
            os.replace(part, path)

    def flush(self) -> None:
        """Write the steps collected so far."""
        pending, self._pending = self._pending, []
        self._flush_at = time.time() + FLUSH_EVERY
        if not pending or os.getpid() != self._pid:
            return
        lines = []
        for step, loss, samples, now, exchange in pending:
            rate: float | None = None
            share: float | None = None
            if self._first_step is None:
                self._first_step = (now, exchange, samples)
            if self._last is not None and now > self._last[0]:
                seconds = now - self._last[0]
                rate, share = samples / seconds, (exchange - self._last[1]) / seconds
            self._last = (now, exchange)
            lines.append(
                f'{{"step": {step}, "loss": {_number(loss)}, "samples_per_s": {_number(rate, ".6g")}, '
                f'"exchange_share": {_number(share, ".4f")}, "time": {now:.6f}}}\n'
            )
        self._last_step = self._last or (0.0, 0.0)
        if self._file is None:
            self._file = open(self.folder / "metrics.jsonl", "a")
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Write what the closing line needs."""
        if not self.voice or os.getpid() != self._pid:
            return
        self.flush()
        seconds = exchange = rate = None
        if self._first_step is not None and self._last_step[0] > self._first_step[0]:
            seconds = self._last_step[0] - self._first_step[0]
            exchange = self._last_step[1] - self._first_step[1]
            counted = self.samples - self._resumed_at - self._first_step[2]  # the first step's time is not known
            rate = counted / seconds
        summary = {
            "ranks": self._world.size if self._world is not None else 1,
            "steps": self.steps,
            "samples": self.samples,
            "seconds": seconds,
            "samples_per_s": rate,
            "exchange_seconds": exchange,
            "gathers": [
                {"site": site, "times": int(times), "seconds": spent, "bytes": int(nbytes)}
                for site, (times, spent, nbytes) in self.gathers.items()
            ],
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _frozen(loss: Any) -> Any:
    """A loss that later in-place changes cannot reach; a device's tensor stays there, so that nothing waits for it."""
    device = getattr(loss, "device", None)
    if device is not None and getattr(device, "type", "cpu") != "cpu":
        return loss.detach().clone()
    return loss.item() if hasattr(loss, "item") else loss


def _number(value: Any, spec: str = "") -> str:
    """JSON, with every digit of a loss (NaN and Infinity as Python's json reads them)."""
    if value is None:
        return "null"
    value = float(value)
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return format(value, spec) if spec else repr(value)
