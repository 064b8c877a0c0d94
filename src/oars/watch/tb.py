"""TensorBoard event files, ``RUN/tb``, made from ``metrics.jsonl``; training does not pay for them.

``update`` adds what is new: ``oars run`` calls it when a run has ended, ``oars board`` every few seconds. A file of
events is a row of records (``oars.records``), each an ``Event`` in protocol buffers' wire format.
"""

from __future__ import annotations

import fcntl
import json
import math
import struct
from pathlib import Path

from oars import runfolder
from oars.records import field, record, varint

TAGS = {"loss": "train/loss", "lr": "train/learning_rate", "grad_norm": "train/gradient_norm",
        "samples_per_s": "speed/samples_per_s", "exchange_share": "speed/exchange_share"}
POINTS = 1000  # of a series are added at a time at most: TensorBoard shows no more
LINES = 50_000  # are looked at for them, so that the end of a run of a million steps does not wait for it


def update(folder: Path) -> None:
    """Bring a run's event file up to date."""
    metrics = folder / runfolder.METRICS
    if not metrics.exists():
        return
    tb = folder / runfolder.TENSORBOARD
    tb.mkdir(exist_ok=True)
    events = tb / "events.out.tfevents.0000000000.oars"
    with open(tb / ".upto.json", "a+") as note, open(metrics, "rb") as file:
        fcntl.flock(note, fcntl.LOCK_EX)  # one at a time
        note.seek(0)
        begin = _known(note.read(), file)
        if begin == 0 and events.exists():  # the run was resumed from an earlier step: what came later is not true
            events.unlink()
        file.seek(begin)
        data = file.read()
        data = data[:data.rfind(b"\n") + 1]
        if not data:
            return
        lines = data.splitlines()
        new = b"" if events.exists() else record(_event(0.0, 0, field(3, b"brain.Event:2")))
        with open(events, "ab") as out:
            out.write(new + _scalars(lines))
        note.truncate(0)
        note.write(json.dumps({"upto": begin + len(data), "last": lines[-1].decode(errors="replace")}))


def _known(text: str, file: object) -> int:
    """How much of ``metrics.jsonl`` has been converted; 0 if it is not the file it was."""
    try:
        mark = json.loads(text)
        upto, last = int(mark["upto"]), mark["last"].encode() + b"\n"
    except (ValueError, KeyError, TypeError):
        return 0
    file.seek(max(0, upto - len(last)))  # type: ignore[attr-defined]
    return upto if file.read(len(last)) == last else 0  # type: ignore[attr-defined]


def _scalars(lines: list[bytes]) -> bytes:
    """Records of every series' values, every so many of them that there are not too many; the last is among them."""
    lines = lines[::-1][::len(lines) // LINES + 1][::-1]
    series: dict[str, list[tuple[float, int, float]]] = {tag: [] for tag in TAGS.values()}
    for line in lines:
        try:
            entry = json.loads(line)
            step, when = int(entry["step"]), float(entry["time"])
        except (ValueError, KeyError, TypeError):
            continue
        which = entry.get("optimizer") or 0  # the first one's go by the plain names
        for name, tag in TAGS.items():
            tag += f", optimizer {which + 1}" if which else ""
            value = entry.get(name)
            if isinstance(value, list):  # the rates of several groups
                value = value[0] if value else None
            if isinstance(value, (int, float)):
                series.setdefault(tag, []).append((when, step, value))
    out = []
    for tag, points in series.items():
        for when, step, value in points[::-1][::-(-len(points) // POINTS) or 1][::-1]:
            summary = field(1, field(1, tag.encode()) + _float(2, value))
            out.append(record(_event(when, step, field(5, summary))))
    return b"".join(out)


def _event(when: float, step: int, rest: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", when) + b"\x10" + varint(step) + rest


def _float(number: int, value: float) -> bytes:
    if math.isfinite(value):
        value = max(-3.4e38, min(3.4e38, value))  # what a float of four bytes holds
    return bytes([number << 3 | 5]) + struct.pack("<f", value)


def update_quietly(folder: Path) -> None:
    """``update``, for a run that must not fail for it: a full disk costs the events."""
    try:
        update(folder)
    except OSError:
        pass
