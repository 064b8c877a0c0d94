"""What is wrong with the data, in one line each, and what to do about it: ``raise``, ``skip`` or ``quarantine``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from oars.data.errors import DataError
from oars.data.shards import write_whole

POLICIES = ("raise", "skip", "quarantine")


class Bad(NamedTuple):
    """One bad row; ``row`` and ``byte`` are -1 where they mean nothing."""

    file: str
    row: int
    byte: int
    reason: str

    def __str__(self) -> str:
        place = [f"row {self.row}"] * (self.row >= 0) + [f"byte {self.byte}"] * (self.byte >= 0)
        return f"{self.file}{', ' if place else ''}{', '.join(place)}: {self.reason}"


def one_line(error: Exception) -> str:
    """What an error of somebody else's says, short."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_policy(on_bad: str) -> None:
    """``on_bad`` is one of the three."""
    if on_bad not in POLICIES:
        raise ValueError(f"on_bad={on_bad!r} is not one of {', '.join(POLICIES)}")


def act_on(found: list[Bad], on_bad: str, beside: str) -> None:
    """Bad rows were found while ``beside`` was opened: raise, or write them down, or let them be skipped."""
    if found and on_bad == "raise":
        more = f" (and {len(found) - 1} more; on_bad='skip' leaves them out)" if len(found) > 1 else ""
        raise DataError(f"{found[0]}{more}")
    if found and on_bad == "quarantine":
        write(found, beside)


def write(found: Iterable[Bad], beside: str) -> Path:
    """List bad rows in ``NAME.bad.jsonl`` next to the data, whole or not at all."""
    target = Path(os.path.abspath(beside)).with_name(Path(os.path.abspath(beside)).name + ".bad.jsonl")
    try:
        write_whole(target, "".join(json.dumps(bad._asdict()) + "\n" for bad in found).encode())
    except OSError as error:
        raise DataError(
            f"{target}: the list of bad rows cannot be written here ({error.strerror}); use on_bad='skip' "
            "or make the folder writable"
        ) from None
    return target


def counted(found: Iterable[Bad]) -> str:
    """``3 bad rows left out (2 wrong number of fields, 1 not UTF-8)``, empty without any."""
    kinds = Counter(bad.reason.split(":")[0].split(" (")[0] for bad in found)
    total = sum(kinds.values())
    if not total:
        return ""
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{total} bad row{'s' * (total > 1)} left out ({named})"
