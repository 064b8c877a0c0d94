"""What a run has made and appended to, noted beside its snapshots while it goes on.

A snapshot's header says what there was before it. A run that is killed has often gone on behind its last snapshot, and
a resumed script must not find what was made there. So there is a log that only grows, over all parts of a run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from oars import runfolder


def note(folder: Path, made: Iterable[str], appended: Mapping[str, int] | None = None) -> None:
    """These were not there before the run; those it appends to were as long before. A run without snapshots notes
    nothing."""
    lines = [[path, None] for path in made] + [[path, length] for path, length in (appended or {}).items()]
    try:
        log = os.open(_log(folder), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return
    try:
        os.write(log, "".join(json.dumps(line) + "\n" for line in lines).encode())
    finally:
        os.close(log)


def noted(folder: Path) -> tuple[set[str], dict[str, int]]:
    """What all parts of the run have made so far, and the lengths of what they append to."""
    made: set[str] = set()
    appended: dict[str, int] = {}
    try:
        lines = _log(folder).read_bytes().split(b"\n")[:-1]  # if the last one is cut short, its file was not made
    except FileNotFoundError:
        lines = []
    for path, length in map(json.loads, lines):
        if length is None:
            made.add(path)
        else:
            appended.setdefault(path, length)
    return made, appended


def _log(folder: Path) -> Path:
    return folder / runfolder.SNAPSHOTS / runfolder.MADE
