"""Errors that one rank meets on its own rows, and what all ranks make of them together.

A rank that cannot go on says so by revoking the communicator, as after a death: nothing is sent while all goes well.
Then all ranks meet and tell where they are. If all are in the same operation on rows, all do it again on the whole
batch (``Whole``), which raises what one process would raise, and where. If the others are further (the operation was
not known to look at its values, so nobody waited for its end), all raise the error of the first rank that failed.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from oars.engine import Astray


class Whole(BaseException):
    """A rank could not do an operation on its rows: all are to do it on the whole batch. Ours to catch, not a script's;
    ``error`` is that of the first rank that failed. ``inner``: all are in the same one of the operations that a model's
    call is made of, else in the same call."""

    def __init__(self, error: BaseException, inner: bool) -> None:
        super().__init__(str(error))
        self.error, self.inner = error, inner


class Parted(Exception):
    """This rank is in another meeting than others."""


PARTED = "(the script does not do the same on every rank: it reads something that differs between ranks)"


class OutOfStep(RuntimeError):
    """What needs all ranks was asked for where they are not in step: in a thread, a forked child, or a read."""


class Report(NamedTuple):
    """Where a rank is, and what it met there."""

    rank: int
    place: tuple | None  # the operation on rows that it is in, and in which one inside of that; None: in none
    error: bytes  # pickled; empty: nothing
    meeting: str  # what it came to


def report(rank: int, place: tuple | None, error: BaseException | None, meeting: str) -> Report:
    """A rank's own."""
    return Report(rank, place, b"" if error is None else pickled(error), meeting)


def judged(reports: list[Report], rank: int, mine: BaseException | None) -> BaseException:
    """What a rank is to raise; the same on all."""
    first = next(r for r in reports if r.error)
    if any(isinstance(pickle.loads(r.error), Parted) for r in reports if r.error):
        where = ", ".join(f"rank {r.rank} in {r.meeting}" for r in reports)
        return Astray(f"oars: the ranks are out of step: {where} {PARTED}")
    error = mine if mine is not None and first.rank == rank else pickle.loads(first.error)
    if first.place is not None and all(r.place is not None and r.place[0] == first.place[0] for r in reports):
        return Whole(error, len({r.place for r in reports}) == 1)
    return error


def pickled(error: BaseException) -> bytes:
    """An exception as it can be raised elsewhere; one that cannot be passed on as it is becomes a RuntimeError."""
    try:
        data = pickle.dumps(error)
        again: Any = pickle.loads(data)
        if type(again) is type(error) and str(again) == str(error):
            return data
    except Exception:  # the script's own class: it may do anything
        pass
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
