"""One clock: what a script's own code reads of the time is the first rank's, on every rank: from ``time``, from
``datetime``, and what it has used of the processor and of memory (``os.times``, ``resource.getrusage``).

``while time.time() - start < budget:`` must end at the same step everywhere. Libraries, threads, forked workers,
what reads own samples and what the garbage collector calls get this process's own time: there ranks need not, and must
not, wait for each other. While a script is played it does not sleep.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
import os
import threading
import time
from time import perf_counter  # as it is now, for who cannot import it before ``install``
from typing import Any

from oars.adapt.python import random
from oars.adapt.python.imports import when_imported
from oars.adapt.python.signals import signals
from oars.adapt.replay.tape import tape

__all__ = ["install", "pass_over_sleep", "perf_counter"]

_time, _localtime = time.time, time.localtime
_NAMES = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")


def install(world: Any) -> None:
    """Patch ``time``'s clocks; on one rank, only to record what they told (``oars.adapt.replay.tape``)."""
    pid = os.getpid()
    random.watch_collector()

    def agreed(name: str, clock: Any) -> Any:
        def one() -> Any:
            own = functools.partial(tape.shifted, name, clock)
            return own() if world is None else _first_ranks(world, own)

        @functools.wraps(clock)
        def read() -> Any:
            if os.getpid() != pid or not random.in_order() or random.inside():
                return clock()
            return one() if tape.busy else tape.time(name, one)

        return read

    for name in _NAMES:
        true = getattr(time, name)
        setattr(time, name, random.for_scripts(true, agreed(name, true)))
    now = agreed("time", _time)
    for name, at in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("strftime", 1)):
        setattr(time, name, random.for_scripts(getattr(time, name), _of(getattr(time, name), at, now)))
    _patch_datetime(now)
    if world is None:
        return

    def of_the_first(used: Any) -> Any:
        @functools.wraps(used)
        def read(*args: Any) -> Any:
            own = functools.partial(used, *args)
            together = os.getpid() == pid and random.in_order() and not random.inside() and not tape.playing
            return _first_ranks(world, own) if together else own()

        return random.for_scripts(used, read)

    os.times = of_the_first(os.times)
    for name in ("thread_time", "thread_time_ns", "process_time_ns"):
        setattr(time, name, of_the_first(getattr(time, name)))
    when_imported("resource", lambda resource: setattr(resource, "getrusage", of_the_first(resource.getrusage)))


def _first_ranks(world: Any, own: Any) -> Any:
    """What the first rank reads; a place where all ranks meet, so that signals come to the script here as well."""
    told, due = world.broadcast(lambda: (own(), signals.due))
    if due:
        signals.deliver()
    return told


def _of(function: Any, at: int, now: Any) -> Any:
    """A function of ``time`` that asks for the present moment where none is given, as its argument ``at``."""
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if len(args) > at and args[at] is not None:
            return function(*args)
        return function(*args[:at], now() if at == 0 else _localtime(now()))

    return call


def _patch_datetime(now: Any) -> None:
    """``datetime.now`` and the like, in the class itself: it stays the one that values are of."""
    utc = datetime.UTC
    functions: dict[str, Any] = {"now": lambda cls, tz=None: cls.fromtimestamp(now(), tz),
                                 "utcnow": lambda cls: cls.fromtimestamp(now(), utc).replace(tzinfo=None)}
    names = gc.get_referents(vars(datetime.datetime))[0]
    if type(names) is not dict or not functions.keys() <= names.keys():  # this Python keeps them elsewhere
        return
    for name, function in functions.items():  # (``today`` asks ``time.time``)
        true = names[name]
        names[name] = classmethod(random.for_scripts(
            lambda cls, *args, true=true, **kw: true.__get__(None, cls)(*args, **kw), function))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))


def meet_asleep(world: Any) -> None:
    """A script that sleeps may be waiting for a signal: when it wakes, it is given what has come."""
    true, pid = time.sleep, os.getpid()

    @functools.wraps(true)
    def sleep(seconds: float) -> None:
        true(seconds)
        if signals.meets and os.getpid() == pid and random.in_order() and not random.inside() and not tape.playing:
            _first_ranks(world, lambda: None)

    time.sleep = random.for_scripts(true, sleep)


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
