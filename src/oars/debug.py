"""``OARS_LOG=debug oars run …``: what a rank decided and why, in ``rank-<r>.debug`` of the run folder.

Callers ask first, so that nothing is put into words while it is off: ``if debug.on: debug.say(...)``.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import time as clock  # as it is now: scripts are given another one later

on = False
_file = -1


def begin(path: Path) -> None:
    """Write to ``path`` from now on, if the user asked for it."""
    global on, _file
    if os.environ.get("OARS_LOG") == "debug":
        _file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        on = True


def say(text: str) -> None:
    """One line, with the time in seconds."""
    os.write(_file, f"{clock():.4f} {text}\n".encode(errors="replace"))
