"""One clock: what a script's own code reads from ``time`` is the first rank's time, on every rank.

``while time.time() - start < budget:`` must end at the same step everywhere. Libraries, threads, forked workers,
what reads own samples and what the garbage collector calls get this process's own time: there ranks need not, and must
not, wait for each other. While a script is played it does not sleep.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from time import perf_counter  # as it is now, for who cannot import it before ``install``
from typing import TYPE_CHECKING, Any

from oars.adapt.python import random
from oars.adapt.replay.tape import tape

if TYPE_CHECKING:
    from oars.engine.world import World

__all__ = ["NAMES", "agreed", "perf_counter", "sleep"]

NAMES = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")


def agreed(name: str, world: World | None) -> Any:
    """Around ``time.<name>``; without a ``world`` only to record what it told (``oars.adapt.replay.tape``)."""
    def layer(clock: Callable[..., Any]) -> Any:
        pid = os.getpid()

        def one() -> Any:
            own = functools.partial(tape.shifted, name, clock)
            return own() if world is None else world.broadcast(own)

        @functools.wraps(clock)
        def read() -> Any:
            if os.getpid() != pid or not random.in_order() or random.inside():
                return clock()
            return one() if tape.busy else tape.time(name, one)

        return random.for_scripts(clock, read)

    return layer


def sleep(inner: Callable[..., Any]) -> Any:
    """Around ``time.sleep``: a script that is played does not sleep."""
    main = threading.main_thread()

    @functools.wraps(inner)
    def passed_over(seconds: float) -> None:
        if not tape.playing or threading.current_thread() is not main:
            inner(seconds)

    return random.for_scripts(inner, passed_over)
