"""One clock: what a script's own code reads from ``time`` is the first rank's time, on every rank.

``while time.time() - start < budget:`` must end at the same step everywhere. Libraries, threads, forked workers and
what reads own samples get this process's own time: there ranks need not, and must not, wait for each other.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

from oars.adapt import random

_NAMES = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")


def install(world: Any) -> None:
    """Patch ``time``'s clocks; nothing on one rank."""
    if world is None:
        return
    pid, main = os.getpid(), threading.main_thread()

    def agreed(clock: Any) -> Any:
        @functools.wraps(clock)
        def read() -> Any:
            if os.getpid() != pid or threading.current_thread() is not main or random.inside():
                return clock()
            return world.broadcast(clock)

        return read

    for name in _NAMES:
        true = getattr(time, name)
        setattr(time, name, random.for_scripts(true, agreed(true)))
