"""Ranks that died of a signal of their own making (an abort, a segmentation fault): which one Python wrote down."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from oars import runfolder

_CRASHES = {"Aborted": signal.SIGABRT, "Segmentation fault": signal.SIGSEGV, "Bus error": signal.SIGBUS,
            "Floating-point exception": signal.SIGFPE, "Floating point exception": signal.SIGFPE,
            "Illegal instruction": signal.SIGILL}


def signal_of(folder: Path, rank: int) -> signal.Signals | None:
    """The signal that this rank has died of, if Python's fault handler has seen one."""
    try:
        text = (folder / runfolder.fatal(rank)).read_text(errors="replace")
    except OSError:
        return None
    said = re.match("Fatal Python error: (.*)", text)
    return _CRASHES.get(said[1]) if said else None
