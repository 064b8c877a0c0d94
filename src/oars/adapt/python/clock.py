"""One clock: what a script's own code reads of the time is the first rank's, on every rank: from ``time``, from
``datetime``, and what it has used of the processor and of memory (``os.times``, ``resource.getrusage``).

``while time.time() - start < budget:`` must end at the same step everywhere. Libraries, threads, forked workers,
what reads own samples and what the garbage collector calls get this process's own time: there ranks need not, and must
not, wait for each other. While a script is played it does not sleep.
"""

from __future__ import annotations

import datetime
import functools
import os
import threading
import time
from collections.abc import Callable
from time import perf_counter  # as it is now, for who cannot import it before ``install``
from typing import TYPE_CHECKING, Any

from oars.adapt.python import random
from oars.adapt.python.patching import Layer
from oars.adapt.python.signals import signals
from oars.adapt.replay.tape import tape

if TYPE_CHECKING:
    from oars.engine.world import World

__all__ = ["NAMES", "PRESENT", "agreed", "at_present", "datetimes", "now", "of_the_first", "perf_counter", "sleep"]

NAMES = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")
PRESENT = {"localtime": 0, "gmtime": 0, "ctime": 0, "strftime": 1}  # where each takes a moment; without, it is now
_time, _localtime = time.time, time.localtime


def agreed(name: str, world: World | None) -> Layer:
    """Around ``time.<name>``; without a ``world`` only to record what it gave (``oars.adapt.replay.tape``)."""
    return lambda clock: random.for_scripts(clock, _reading(name, clock, world))


def now(world: World | None) -> Callable[[], float]:
    """``time.time`` as a script reads it."""
    return _reading("time", _time, world)


def _reading(name: str, clock: Callable[..., Any], world: World | None) -> Any:
    pid = os.getpid()

    def one() -> Any:
        own = functools.partial(tape.shifted, name, clock)
        return own() if world is None else _first_ranks(world, own)

    @functools.wraps(clock)
    def read() -> Any:
        if os.getpid() != pid or not random.in_order() or random.inside():
            return clock()
        return one() if tape.busy else tape.time(name, one)

    return read


def _first_ranks(world: World, own: Callable[[], Any]) -> Any:
    """What the first rank reads; a place where all ranks meet, so that signals come to the script here as well."""
    value, due = world.broadcast(lambda: (own(), signals.due))
    if due:
        signals.deliver()
    return value


def of_the_first(world: World) -> Layer:
    """Around a clock that only tells how long a process has worked."""
    def layer(used: Callable[..., Any]) -> Any:
        pid = os.getpid()

        @functools.wraps(used)
        def read(*args: Any) -> Any:
            own = functools.partial(used, *args)
            return _first_ranks(world, own) if _together(pid) else own()

        return random.for_scripts(used, read)

    return layer


def _together(pid: int) -> bool:
    return os.getpid() == pid and random.in_order() and not random.inside() and not tape.playing


def at_present(name: str, moment: Callable[[], float]) -> Layer:
    """Around a function of ``time`` that asks for the present moment where none is given."""
    at = PRESENT[name]

    def layer(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if len(args) > at and args[at] is not None:
                return function(*args)
            return function(*args[:at], moment() if at == 0 else _localtime(moment()))

        return random.for_scripts(function, call)

    return layer


def datetimes(moment: Callable[[], float]) -> dict[str, Any]:
    """``datetime.now`` and the like, for the class itself: it stays the one that values are of. (``today`` asks
    ``time.time``.)"""
    utc, known = datetime.UTC, vars(datetime.datetime)
    functions: dict[str, Any] = {"now": lambda cls, tz=None: cls.fromtimestamp(moment(), tz),
                                 "utcnow": lambda cls: cls.fromtimestamp(moment(), utc).replace(tzinfo=None)}
    return {name: classmethod(random.for_scripts(
        lambda cls, *args, true=known[name], **kw: true.__get__(None, cls)(*args, **kw), function))
        for name, function in functions.items()}


def sleep(world: World | None, played: bool) -> Layer:
    """Around ``time.sleep``: a script that is ``played`` does not sleep; one that sleeps on the ranks of ``world`` may
    be waiting for a signal: when it wakes, it is given what has come."""
    def layer(inner: Callable[..., Any]) -> Any:
        main, pid = threading.main_thread(), os.getpid()

        @functools.wraps(inner)
        def asleep(seconds: float) -> None:
            if played and tape.playing and threading.current_thread() is main:
                return
            inner(seconds)
            if world is not None and signals.meets and _together(pid):
                _first_ranks(world, lambda: None)

        return random.for_scripts(inner, asleep)

    return layer
