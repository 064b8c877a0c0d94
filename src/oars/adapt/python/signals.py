"""Signals and timers: what reaches one rank at some moment is given to the script on all ranks at the same place.

On one process a signal's handler runs between any two lines. Were it so on each rank by itself, one would leave the
loop a step before the others. So a handler of the script's is not run when the signal comes: that is noted, and where
the ranks meet next (an exchange of gradients, the begin of an epoch, a look at the clock, a sleep, the end) they agree
on what has come and run the handlers there. An exception from a handler is raised there, on all.

Alarms and interval timers run on the first rank alone, and so does the time of a ``threading.Timer``, whose function
is then called by every rank's own thread; so it is where the main thread waits for other threads. What the script
sends to itself (``raise_signal``, ``os.kill`` of its own number) comes at the same place anyway.

The command (``oars run``) is who gets a user's or a scheduler's signal: it passes on what the script has a handler for,
which a file in the run folder tells (``runfolder.handles``).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep  # as they are now: scripts are given another clock later
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from oars import runfolder
from oars.adapt.python import random

if TYPE_CHECKING:
    from types import FrameType

    from oars.engine.world import World

_set, _get = signal.signal, signal.getsignal
_setitimer, _getitimer = signal.setitimer, signal.getitimer
_TIMER_OF: dict[int, int] = {signal.SIGALRM: signal.ITIMER_REAL, signal.SIGVTALRM: signal.ITIMER_VIRTUAL,
                             signal.SIGPROF: signal.ITIMER_PROF}
_ECHO = 1.0  # seconds in which a signal that another rank has reported may come here too
_IDLE = 2.0  # seconds in which the main thread does nothing but wait for other threads
FOR_A_WHILE, FOR_EVER = "for a while", "for ever"
_WAITS = 1.0  # seconds for a timer's function, which may wait for the main thread


class Signals:
    """What has come to this rank and was not given to the script yet. ``signals`` is the only instance."""

    world: World

    def __init__(self) -> None:
        self._several = False  # whether there is a ``world``
        self.meets = False  # an adapter asks ``due`` where ranks meet, and then calls ``deliver``
        self._folder = Path()
        self._voice: Callable[[], bool] = lambda: False
        self._pid, self._alone = 0, False
        self._handlers: dict[int, Any] = {}  # the script's own
        self._at_first: dict[int, Any] = {}  # what was there before it, as the script may see it, by our own
        self._came: list[int] = []
        self._rung: list[Any] = []  # timers whose time is over, on the first rank
        self._echo: dict[int, float] = {}
        self._armed: dict[int, tuple[float, float]] = {}  # timer -> when it ends, and its interval
        self._timers: dict[Any, threading.Event] = {}  # timers that have been started -> when their function may run
        self._names: WeakKeyDictionary[threading.Thread, tuple[int, ...]] = WeakKeyDictionary()
        self._made: Counter[tuple[int, ...]] = Counter()  # timers, by the one whose function has started them
        self._over = False
        self._delivering = False

    def attach(self, world: World | None, folder: Path, voice: Callable[[], bool], alone: bool) -> None:
        """Where signals come to: this process, one of the ranks of ``world``, or ``alone``."""
        self._folder, self._voice, self._pid, self._alone = folder, voice, os.getpid(), alone
        if world is not None:
            self.world, self._several = world, True
            world.on_loss.append(self.lost)
            threading._register_atexit(self.end)  # type: ignore[attr-defined]

    def here(self) -> bool:
        """Whether this is the rank's process, not one that it has forked."""
        return os.getpid() == self._pid

    # -- what ranks agree on

    @property
    def due(self) -> bool:
        """Whether something waits to be given to the script."""
        return bool(self._came or self._rung)

    def deliver(self) -> None:
        """All ranks, at the same place: run the handlers of all that has come to any of them."""
        if self._delivering:
            return
        came, rung = list(self._came), list(self._rung)
        every = self.world.everybody((came, rung))
        del self._came[: len(came)], self._rung[: len(rung)]
        numbers = sorted({number for came_there, _ in every for number in came_there})
        self._echo.update((number, monotonic() + _ECHO) for number in numbers if number not in came)
        for timer in dict.fromkeys(timer for _, rung in every for timer in rung):
            self._release(timer)
        self._delivering = True
        try:
            for number in numbers:
                self._call(number)
        finally:
            self._delivering = False

    def _call(self, number: int) -> None:
        which = _TIMER_OF.get(number)
        if which is not None and not self._armed.get(which, (0.0, 1.0))[1]:
            self._armed[which] = 0.0, 0.0  # it has rung, and does so once
        handler = self._handlers.get(number)
        if callable(handler):
            handler(number, _scripts_frame())

    # -- signals

    def came(self, number: int, frame: FrameType | None) -> None:
        """The handler that stands for all of the script's."""
        if os.getpid() != self._pid or not self._together():
            self._call(number)
        elif self._echo.pop(number, 0.0) < monotonic():
            self._came.append(number)

    def _together(self) -> bool:
        return self._several and self.world.size > 1 and self.meets and not self._over

    def set(self, number: int, handler: Any) -> Any:
        """The script's ``signal.signal``."""
        before = self.get(number)
        kept = self._at_first.setdefault(int(number), _get(number))
        ours = callable(handler) and not isinstance(handler, signal.Handlers)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            handler, ours = kept, False
        _set(number, self.came if ours else handler)
        self._handlers[int(number)] = handler
        self._tell(int(number))
        return before

    def get(self, number: int) -> Any:
        """The script's ``signal.getsignal``."""
        found = self._handlers.get(int(number), _get(number))
        return signal.default_int_handler if getattr(found, "__qualname__", "") == "Ends.interrupt" else found

    def _tell(self, number: int) -> None:
        """The command passes on only what the script wants; to several ranks only if they can share it."""
        if os.getpid() != self._pid or not self._voice() or not (self.meets or self._alone):
            return
        mark, handler = self._folder / runfolder.handles(number), self._handlers[number]
        if handler is not signal.default_int_handler and (callable(handler) or handler == signal.SIG_IGN) \
                and handler != signal.SIG_DFL:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT, 0o666))
        else:
            mark.unlink(missing_ok=True)

    def to_itself(self, number: int) -> bool:
        """The script sends itself a signal: whether its handler was run, here and now on every rank."""
        if not self._together() or not callable(self._handlers.get(int(number))):
            return False
        if threading.current_thread() is not threading.main_thread():
            return self.world.rank != 0  # every rank's thread sends it, each at its own time: the first rank's counts
        if random.inside():
            return False
        self._call(int(number))
        return True

    # -- alarms

    def arm(self, which: int, seconds: float, interval: float) -> tuple[float, float]:
        """``setitimer``: on the first rank. What was left of the timer before is the same everywhere."""
        if not self._together() or not random.in_order() or random.inside():
            return _setitimer(which, seconds, interval)
        self._armed[which] = monotonic() + seconds if seconds else 0.0, interval
        left: tuple[float, float] = self.world.broadcast(lambda: _setitimer(which, seconds, interval))
        return left

    def lost(self, gone: list[int], phase: str) -> None:
        """If this is the first rank now, the timers are its."""
        if self.world.rank == 0:
            for which, (end, interval) in self._armed.items():
                if end and _getitimer(which)[0] == 0:
                    _setitimer(which, max(0.001, end - monotonic()), interval)

    # -- timers

    def started(self, timer: threading.Timer) -> None:
        """A ``Timer`` was started by the script: by main code, or by another timer's function."""
        owner = self._names.get(threading.current_thread())
        if not self._together() or (owner is None and (not random.in_order() or random.inside())):
            return
        by = owner or ()
        self._made[by] += 1
        self._names[timer] = (*by, self._made[by])
        self._timers[self._names[timer]] = threading.Event()

    def wait(self, timer: threading.Timer) -> bool:
        """In a timer's thread: until its function is to be called on every rank, or it was cancelled. False if this
        is no timer that the script has started."""
        name = self._names.get(timer)
        if name is None:
            return False
        released, until = self._timers[name], monotonic() + timer.interval
        announced, idle = False, monotonic()
        while not timer.finished.is_set() and not released.is_set():
            left = until - monotonic()
            waits = left <= 0 and _main_thread_waits()
            if not waits:
                idle = monotonic()
            if left <= 0 and (self._over or waits == FOR_EVER or monotonic() - idle > _IDLE):
                break  # the ranks do not meet before it has run, perhaps, and all are here
            if left <= 0 and self.world.rank == 0 and not announced:
                announced = True
                self._rung.append(name)
            timer.finished.wait(min(left, 0.05) if left > 0 else 0.005)
        if not timer.finished.is_set():
            try:
                timer.function(*timer.args, **timer.kwargs)
            finally:
                timer.finished.set()
        self._timers.pop(name, None)
        return True

    def _release(self, name: tuple[int, ...]) -> None:
        if (event := self._timers.get(name)) is None:
            return
        event.set()
        until = monotonic() + _WAITS
        while name in self._timers and monotonic() < until:
            sleep(0.0005)

    def begin(self) -> None:
        """An adapter is there that lets the ranks meet."""
        self.meets = True
        for number in self._handlers:
            self._tell(number)

    def end(self) -> None:
        """The script is over: what comes now comes to each rank by itself."""
        self._over = True


signals = Signals()


def handlers(inner: Callable[..., Any]) -> Any:
    """Around ``signal.signal``."""
    def set_(signalnum: int, handler: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or not signals.here():
            return inner(signalnum, handler)
        return signals.set(signalnum, handler)

    return random.for_scripts(inner, set_)


def known_handlers(inner: Callable[..., Any]) -> Any:
    """Around ``signal.getsignal``."""
    return random.for_scripts(inner, signals.get)


def raised(inner: Callable[..., Any]) -> Any:
    """Around ``signal.raise_signal``."""
    def raise_signal(signalnum: int) -> None:
        if not signals.to_itself(signalnum):
            inner(signalnum)

    return random.for_scripts(inner, raise_signal)


def killed(inner: Callable[..., Any]) -> Any:
    """Around ``os.kill``."""
    def kill(pid: int, number: int) -> None:
        if pid != os.getpid() or not signals.here() or not number or not signals.to_itself(number):
            inner(pid, number)

    return random.for_scripts(inner, kill)


def alarms(inner: Callable[..., Any]) -> Any:
    """Around ``signal.alarm``."""
    def alarm(seconds: int) -> int:
        left, _ = signals.arm(signal.ITIMER_REAL, float(seconds), 0.0)
        return round(left + 0.499)

    return random.for_scripts(inner, alarm)


def interval_timers(inner: Callable[..., Any]) -> Any:
    """Around ``signal.setitimer``."""
    def setitimer(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        return signals.arm(which, seconds, interval)

    return random.for_scripts(inner, setitimer)


def timer_started(inner: Callable[..., Any]) -> Any:
    """Around ``threading.Timer.start``."""
    @functools.wraps(inner)
    def of_a_library(self: threading.Timer) -> None:
        threading.Thread.start(self)  # as it is by then: adapters have layers of their own around it

    @functools.wraps(inner)
    def start(self: threading.Timer) -> None:
        signals.started(self)
        threading.Thread.start(self)

    return random.for_scripts(of_a_library, start)


def timer_run(inner: Callable[..., Any]) -> Any:
    """Around ``threading.Timer.run``."""
    @functools.wraps(inner)
    def run(self: threading.Timer) -> None:
        if not signals.wait(self):
            inner(self)

    return run


def _main_thread_waits() -> str:
    """Whether the script's main thread waits for another one: a join, an event, a queue."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename != threading.__file__:
        return ""
    return FOR_EVER if frame.f_locals.get("timeout") in (None, -1) else FOR_A_WHILE


def _scripts_frame() -> Any:
    """Where the script is: what its handler gets as the frame."""
    frame: Any = sys._getframe(2)
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return frame
