"""One clock: what a script's own code reads from ``time`` is the first rank's time, on every rank.

``while time.time() - start < budget:`` must end at the same step everywhere. Libraries, threads, forked workers,
what reads own samples and what the garbage collector calls get this process's own time: there ranks need not, and must
not, wait for each other. While a script is played it does not sleep.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from time import perf_counter  # as it is now, for who cannot import it before ``install``
from typing import Any

from oars.adapt.python import random
from oars.adapt.replay.tape import tape

__all__ = ["install", "pass_over_sleep", "perf_counter"]

_NAMES = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")


def install(world: Any) -> None:
    """Patch ``time``'s clocks; on one rank, only to record what they told (``oars.adapt.replay.tape``)."""
    pid = os.getpid()
    random.watch_collector()

    def agreed(name: str, clock: Any) -> Any:
        def one() -> Any:
            own = functools.partial(tape.shifted, name, clock)
            return own() if world is None else world.broadcast(own)

        @functools.wraps(clock)
        def read() -> Any:
            if os.getpid() != pid or not random.in_order() or random.inside():
                return clock()
            return one() if tape.busy else tape.time(name, one)

        return read

    for name in _NAMES:
        true = getattr(time, name)
        setattr(time, name, random.for_scripts(true, agreed(name, true)))


def pass_over_sleep() -> None:
    """A script that is played does not sleep; to be called before it begins."""
    sleep, main = time.sleep, threading.main_thread()

    @functools.wraps(sleep)
    def passed_over(seconds: float) -> None:
        if tape.playing and threading.current_thread() is main:
            return
        if not tape.playing:
            time.sleep = sleep
        sleep(seconds)

    time.sleep = random.for_scripts(sleep, passed_over)
