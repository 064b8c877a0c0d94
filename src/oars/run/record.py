"""What a run leaves behind: ``metrics.jsonl``, ``events.jsonl`` and ``summary.json`` in the run folder.

Every rank has a Record; only the voice's writes. Adapters call it, watchers read the files.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Record:
    """Collects steps, notices and gathers, and writes them for the voice."""

    def __init__(self, folder: Path, voice: bool) -> None:
        self.folder = folder
        self.voice = voice
        self.steps = 0
        self.samples = 0
        self.gathers: dict[str, list[float]] = {}  # "file:line operation" -> [times, seconds, bytes]
        self._said: set[str] = set()

    def step(self, loss: Any, samples: int) -> None:
        """One optimizer step was done: its global loss (a number, a tensor or None) and how many samples went in."""
        self.steps += 1
        self.samples += samples

    def notice(self, text: str) -> None:
        """Tell the user one line, once per distinct text."""
        if text not in self._said:
            self._said.add(text)
            self.event("notice", text=text)
            if self.voice:
                print(f"oars: {text}", file=sys.stderr, flush=True)

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

    def close(self) -> None:
        """Write what the closing line needs."""
