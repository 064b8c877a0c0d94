"""Many tasks over a few processes, with a progress bar.

Processes are plain forks with a pipe each. A worker that loses its parent (kill -9) notices and ends, so no orphan goes
on writing; a worker that is killed is an error of one line, never a wait without end; Ctrl-C ends all of them at once.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from oars.data.errors import DataError

# A fork is there at once. Elsewhere than on Linux it is not safe, and each worker starts a Python of its own.
_context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_parent: int | None = None
_report: Callable[[int, int], None] = lambda items, size: None  # noqa: E731


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def zipped(data: bytes) -> bytes:
    """gzip, without the time and the name that it usually notes."""
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=0, compresslevel=6) as file:
        file.write(data)
    return out.getvalue()


def advance(items: int, size: int = 0) -> None:
    """Called by a worker as it goes: so many items (of so many bytes) more are done."""
    if _parent is not None and os.getppid() != _parent:
        os._exit(1)  # nobody waits for the rest
    _report(items, size)


def each(function: Callable[[Any], Any], tasks: Iterable[Any], workers: int, bar: Bar | None = None) -> Iterator[Any]:
    """The results of ``function(task)`` in the order of the tasks; ``function`` must be importable."""
    waiting = enumerate(tasks)
    pool = [_Worker(function) for _ in range(workers)]
    busy: dict[Any, tuple[_Worker, int]] = {}
    early: dict[int, Any] = {}
    due = 0
    try:
        with bar or contextlib.nullcontext():
            for worker in pool:
                _next(worker, waiting, busy)
            while busy:
                for pipe in multiprocessing.connection.wait(list(busy)):
                    worker, number = busy[pipe]
                    kind, value = worker.receive()
                    if kind == "progress":
                        if bar:
                            bar.advance(*value)
                        continue
                    del busy[pipe]
                    _next(worker, waiting, busy)
                    early[number] = value
                while due in early:
                    yield early.pop(due)
                    due += 1
    finally:
        for worker in pool:
            worker.end()


def _next(worker: _Worker, waiting: Iterator[tuple[int, Any]], busy: dict[Any, tuple[_Worker, int]]) -> None:
    for number, task in waiting:
        worker.give(task)
        busy[worker.pipe] = worker, number
        return


class _Worker:
    """One process."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(function, theirs, os.getpid()), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the child has said what it does about them
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def give(self, task: Any) -> None:
        """Have it begin with a task."""
        try:
            self.pipe.send(task)
        except OSError:
            raise self._lost() from None

    def receive(self) -> tuple[str, Any]:
        """What it has to say; errors are raised here."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if kind == "error":
            raise DataError(value)
        if kind == "bug":
            raise RuntimeError(value)
        return kind, value

    def _lost(self) -> DataError:
        self._process.join(5)
        return DataError(f"a worker process ended ({_why(self._process.exitcode)}); what is done is kept: run the same "
                         "command again to go on")

    def end(self) -> None:
        """Stop it, whatever it does."""
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _why(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}, perhaps by the system for lack of memory" if name == "SIGKILL" else name
    return f"exit code {code}"


def _serve(function: Callable[[Any], Any], pipe: Any, parent: int) -> None:
    """A worker's life."""
    global _parent, _report
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _parent, done = parent, [0, 0]

    def report(items: int, size: int) -> None:
        done[0] += items
        done[1] += size
        if done[0] >= 16 or done[1] >= 1 << 22:  # a message for every image would cost
            pipe.send(("progress", (done[0], done[1])))
            done[:] = 0, 0

    _report = report
    while True:
        while not pipe.poll(0.2):
            if os.getppid() != parent:
                os._exit(1)
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = "done", function(task)
        except DataError as error:
            answer = "error", str(error)
        except Exception:
            answer = "bug", traceback.format_exc()
        pipe.send(("progress", (done[0], done[1])))
        done[:] = 0, 0
        pipe.send(answer)


class Bar:
    """A progress bar on a terminal: how much is done, how fast, how long it will take. Elsewhere, nothing."""

    def __init__(self, title: str, total: int, unit: str = "images", size: int | None = None) -> None:
        self._title, self._total, self._unit, self._size = title, total, unit, size
        self._done = self._bytes = 0
        self._shown: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._shown = progress.Progress(
                progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[rate]}"), progress.TimeRemainingColumn(),
                console=Console(stderr=True))
            self._shown.add_task(self._title, total=self._total, rate="")
            self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._shown.stop()

    def advance(self, items: int, size: int = 0) -> None:
        """So much more is done."""
        self._done, self._bytes = self._done + items, self._bytes + size
        if self._shown:
            task = self._shown.tasks[0]
            took = task.elapsed or 1e-9
            rate = f"{self._done / took:,.0f} {self._unit}/s"
            rate += f", {self._bytes / took / 1e6:,.0f} MB/s" if self._bytes else ""
            self._shown.update(0, completed=self._done, rate=rate)
