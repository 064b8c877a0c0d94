"""``oars label --live``: a source that grows while an experiment runs. New images are guessed by the model.

A child process (``python -m oars.label.live DIR ROW BLOCK``) looks for new rows, reads them and sends what the features
are made of; the server writes that down, then lets the rows count. What was known of earlier rows never changes. What
is shown are shares, densities, and images to look at: never a verdict.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oars.data.errors import DataError
from oars.label import compute, pictures
from oars.label import folder as folder_
from oars.label.desk import Desk
from oars.label.folder import RECORD, Folder
from oars.label.head import clusters, nearest
from oars.label.learner import Rows
from oars.label.source import Source

FEWEST = 50  # images with which a project begins: they tell which pixels are dead, and what is usual
_BLOCK = 32  # images that are read at once
_PAUSE = 0.2  # seconds between looks at the source
_PATIENCE = 2.0  # seconds in which an image that is not complete may still become so
_SILENCE = 60.0  # seconds after which the child is taken for stuck
_BEHIND = 5.0  # seconds without having caught up, from which on this is said
_RECENT, _SHOWN, _POINTS, _BARS = 2000, 24, 120, 20
_SEEN = np.dtype([("time", "f8"), ("light", "f4"), ("spots", "f4"), ("far", "f4"), ("bad", "?")])


def wait(source: str, group: str | None) -> None:
    """Until there are enough images to begin with."""
    said = False
    while True:
        empty = os.path.isdir(source) and not any(os.scandir(source))
        if not empty and (len(Source(source, group, True).reader) >= FEWEST):
            return
        if not said:
            print(f"{source}: waiting for its first {FEWEST} images (Ctrl-C ends it)", flush=True)
            said = True
        time.sleep(0.5)


class Live:
    """Follows the source in a thread of its own until it is closed."""

    def __init__(self, desk: Desk, notify: Callable[[str], None]) -> None:
        self._desk, self._folder, self._notify = desk, desk.folder, notify
        self.note: str | None = None
        self._waiting, self._caught, self._said = 0, time.monotonic(), 0.0
        self._pace: deque[tuple[float, int]] = deque(maxlen=100)
        self._stuck = 0
        learner, base = desk.ready(), desk.folder.base
        self._look = learner.first()
        self._usual(learner.values(self._look)[:base])
        records = desk.folder.records()
        self._seen = Rows(self._of(records, learner.values(self._look)[base:base + len(records)]))
        self._ended = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._follow, name="live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; what has come is on disk."""
        self._ended.set()
        if self._child is not None:
            self._child.kill()
        self._thread.join(10)

    # ---- following ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        with open(self._folder.file(folder_.LIVE), "ab", buffering=0) as file:
            while not self._ended.is_set() and self._listen(file):
                self._ended.wait(1.0)

    def _listen(self, file: Any) -> bool:
        """To one child, until it ends; whether there should be another one."""
        begin, more_to_come = self._folder.rows, False
        file.truncate((begin - self._folder.base) * RECORD.itemsize)  # without half a record, of a full disk
        child = self._child = subprocess.Popen(
            [sys.executable, "-m", "oars.label.live", str(self._folder.path), str(begin),
             str(1 if self._stuck else _BLOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            while not self._ended.is_set():
                found, data = pictures.heard(child.stdout, _SILENCE)
                if "error" in found:
                    self.note = f"{found['error']}: it is followed no more; start oars label again to go on"
                    return False
                more_to_come = found["total"] > self._folder.rows
                self._take(file, np.frombuffer(data, RECORD), found["total"])
        except (EOFError, ValueError, KeyError):
            self.note = "the process that reads new images has ended; it is started again"
        except OSError as error:
            self.note = f"{error.filename or file.name}: {error.strerror}: new images cannot be noted"
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        # A child that ends twice at the same row, alone with it, has ended of it: the row is left out.
        self._stuck = self._stuck + 1 if self._folder.rows == begin and more_to_come else 0
        if self._stuck > 1 and not self._ended.is_set():
            self._take(file, np.array([(time.time(), 0, 1, 0, 0)], RECORD), self._folder.rows + 1)
            self._stuck = 0
        return True

    def _take(self, file: Any, records: np.ndarray, total: int) -> None:
        """Note new rows, on disk first; then they count."""
        now = time.monotonic()
        if len(records):
            if file.write(records.tobytes()) < records.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
            os.fdatasync(file.fileno())
            self.note = None
            more = {"radial": records["radial"], "spots": records["spots"],
                    "spots+radial": np.concatenate([records["spots"], records["radial"]], 1)}
            learner, rows = self._desk.ready(), self._folder.rows
            self._desk.grow(more, len(records))
            self._seen.add(self._of(records, learner.values(self._look)[rows:rows + len(records)]))
        self._waiting = max(0, total - self._folder.rows)
        self._caught = now if self._waiting <= _BLOCK else self._caught
        self._pace.append((now, self._folder.rows))
        if len(records) and now - self._said > 1:
            self._said = now
            self._notify("live")

    # ---- what is usual -----------------------------------------------------------------------------------------------

    def _usual(self, features: np.ndarray) -> None:
        """Groups of one half of the first images; how far the other half is from them tells what is usual."""
        half, other = features[::2], features[1::2]
        of, _ = clusters(half, max(2, min(20, len(half) // 10)), self._folder.seed)
        self._middles = np.stack([half[of == number].mean(0) for number in np.unique(of)])
        far = nearest(other, self._middles)[1]
        self._limit = 1.5 * float(np.quantile(far, 0.995)) + 1e-6
        first = {name: np.load(self._folder.feature(name), mmap_mode="r") for name in compute.NAMES}
        light, spots = _light(first["radial"]), _spots(first["spots"])
        self._range = {"light": (light.min(), light.max()), "spots": (spots.min(), spots.max())}

    def _of(self, records: np.ndarray, features: np.ndarray) -> np.ndarray:
        found = np.zeros(len(records), _SEEN)
        if len(records):
            found["time"], found["bad"] = records["time"], records["bad"]
            found["light"], found["spots"] = _light(records["radial"]), _spots(records["spots"])
            found["far"] = nearest(features, self._middles)[1]
        return found

    def _newest(self, seen: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
        """The most unusual of the newest rows that nobody has labelled yet, newest first."""
        at = np.arange(max(0, len(seen) - _RECENT), len(seen))
        at = at[(seen["bad"][at] | (seen["far"][at] > self._limit)) & (labels[at] < 0)]
        at = np.sort(at[np.argsort(-seen["far"][at], kind="stable")][:_SHOWN])[::-1]
        return [{"row": int(self._folder.base + one), "why": self._why(seen[one])} for one in at]

    def _why(self, one: np.ndarray) -> str:
        if one["bad"]:
            return "it cannot be read"
        for name, less, more in (("light", "darker", "brighter"), ("spots", "fewer spots", "more spots")):
            low, high = self._range[name]
            if not low <= one[name] <= high:
                return f"{less if one[name] < low else more} than all of the first {self._folder.base:,}"
        return f"unlike the first {self._folder.base:,}"

    # ---- what the page shows -----------------------------------------------------------------------------------------

    def overview(self) -> dict[str, Any]:
        """Everything that came since the project was made, by the newest model; labels count before guesses."""
        desk, guess = self._desk, self._desk.ready().guess
        with desk.lock:
            state, seen = desk.state, self._seen.values
            base, rows = self._folder.base, min(self._folder.rows, self._folder.base + len(seen))
            labels = state.labels()[base:rows]
            names = {number: state.names[number] for number in state.classes()}
            table = np.array([state.stands_for(n) for n in range(len(state.names))] + [-1], np.int64)
        seen = seen[:rows - base]
        kinds = labels if guess is None else np.where(labels >= 0, labels, table[guess.best[base:rows]])
        there = [] if guess is None else [n for n in names if (kinds == n).any()]
        times, hits = _bins(seen["time"], kinds, there)
        recent = seen[-_RECENT:]
        densities = {"radial intensity": _density(recent["light"]), "spot counts": _density(recent["spots"])}
        last = kinds[-500:]
        densities |= {f"the share of {names[n]}": _beta(int((last == n).sum()), len(last)) for n in there}
        counts, edges = np.histogram(guess.margin[base:rows][-_RECENT:] if guess is not None else (), _BARS, (0, 1))
        late = time.monotonic() - self._caught > _BEHIND
        return {"times": times, "shares": {names[n]: hits[at] for at, n in enumerate(there)},
                "changes": sorted((change for n in there for change in _changes(kinds == n, seen["time"], names[n])),
                                  key=lambda one: float(one["time"])),
                "margins": {"edges": edges.tolist(), "counts": counts.tolist()} if counts.any() else
                {"edges": [], "counts": []},
                "densities": densities, "newest": self._newest(seen, labels), "rate": self._rate(),
                "behind": self._waiting if late else 0, "processed": rows - base}

    def _rate(self) -> float:
        pace = [one for one in list(self._pace) if one[0] > time.monotonic() - 10]
        return round((pace[-1][1] - pace[0][1]) / max(1.0, pace[-1][0] - pace[0][0]), 1) if len(pace) > 1 else 0.0


def _light(radial: np.ndarray) -> np.ndarray:
    """The mean count of the rings; features are on its square root."""
    return np.asarray((radial[:, ::3] ** 2).mean(1), np.float32)


def _spots(spots: np.ndarray) -> np.ndarray:
    """How many pixels stand out from their ring."""
    return np.asarray(np.expm1(spots[:, 2]), np.float32)


def _bins(times: np.ndarray, kinds: np.ndarray, classes: list[int]) -> tuple[list[float], list[list[float]]]:
    """Shares of the classes in pieces of equally many images, so that all points are equally sure."""
    size = max(25, -(-len(times) // _POINTS))
    begins = np.arange(0, len(times) - size + 1, size)
    if not len(begins) or not classes:
        return [], [[] for _ in classes]
    counts = np.diff(np.r_[begins, len(times)])
    return (np.add.reduceat(times, begins) / counts).round(2).tolist(), [
        (np.add.reduceat((kinds == n).astype(np.int64), begins) / counts).round(4).tolist() for n in classes]


def _density(values: np.ndarray) -> dict[str, list[float]]:
    """A histogram, smoothed, of area 1."""
    if len(values) < 2:
        return {"x": [], "y": []}
    low, high = float(values.min()), float(values.max())
    counts, edges = np.histogram(values, 40, (low, max(high, low + 1e-3)), density=True)
    smooth = np.convolve(np.pad(counts, 1, "edge"), (0.25, 0.5, 0.25), "valid")
    return {"x": ((edges[1:] + edges[:-1]) / 2).tolist(), "y": smooth.tolist()}


def _beta(hits: int, total: int) -> dict[str, list[float]]:
    """Where a share may lie of which ``hits`` in ``total`` were seen: the density of a beta distribution."""
    x = np.linspace(0.0025, 0.9975, 200)
    whole = math.lgamma(total + 2) - math.lgamma(hits + 1) - math.lgamma(total - hits + 1)
    return {"x": x.tolist(), "y": np.exp(whole + hits * np.log(x) + (total - hits) * np.log1p(-x)).tolist()}


def _changes(hit: np.ndarray, times: np.ndarray, name: str) -> list[dict[str, Any]]:
    """Where the share of a class has changed: pieces are cut where two shares explain them far better than one.

    A likelihood ratio of 25 comes by chance once in millions; shares are looked at often, and in many places.
    """
    block = max(5, -(-len(hit) // 4000))
    sums = np.r_[0, np.cumsum(hit)][::block].astype(float)
    cuts: list[int] = []
    todo = [(0, len(sums) - 1)]
    least = -(-40 // block)
    while todo:
        low, high = todo.pop()
        at = np.arange(low + least, high - least + 1)
        if not len(at):
            continue
        left, right = _fit(sums[at] - sums[low], (at - low) * block), _fit(sums[high] - sums[at], (high - at) * block)
        gain = 2 * (left + right - _fit(sums[high] - sums[low], (high - low) * block))
        if gain.max() > 25:
            cut = int(at[gain.argmax()])
            cuts.append(cut)
            todo += [(low, cut), (cut, high)]
    ends = [0, *sorted(cuts), len(sums) - 1]
    share = [(sums[b] - sums[a]) / max(1, (b - a) * block) for a, b in zip(ends, ends[1:], strict=False)]
    return [{"time": round(float(times[cut * block]), 2), "class": name, "from": round(share[at], 4),
             "to": round(share[at + 1], 4)} for at, cut in enumerate(ends[1:-1])]


def _fit(hits: Any, total: Any) -> Any:
    """The logarithm of the likelihood with the share that was seen."""
    share = np.clip(hits / total, 1e-12, 1 - 1e-12)
    return hits * np.log(share) + (total - hits) * np.log1p(-share)


# ---- the child -------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Send what comes until the server goes."""
    out = pictures.begun()
    os.nice(5)
    folder = Folder(Path(argv[0]), json.loads((Path(argv[0]) / folder_.PROJECT).read_text()))
    try:
        _send(out, folder, int(argv[1]), int(argv[2]))
    except (DataError, OSError) as error:
        if not isinstance(error, BrokenPipeError):
            pictures.say(out, {"error": str(error)}, b"")
    return 0


def _send(out: Any, folder: Folder, at: int, block: int) -> None:
    source = Source(folder.source, folder.group, True)
    geometry = compute.geometry_of(source, folder.base)
    came: deque[tuple[int, float]] = deque()  # so many rows were there at this time
    looked, pause, total = 0.0, 0.0, 0
    while not select.select([sys.stdin], [], [], pause)[0]:  # its end is the server's
        if time.monotonic() - looked > _PAUSE:
            begun = time.monotonic()
            now = source.grown()
            if now < at:
                raise DataError(f"{folder.source}: has changed: it has {now} rows and had {at}")
            if now > total:
                came.append((now, time.time()))
            total, looked = now, time.monotonic()
            took = looked - begun
            pictures.say(out, {"total": total}, b"")
        while came and came[0][0] <= at:
            came.popleft()
        found = _read(source, geometry, at, min(total, at + block), came)
        if len(found):
            at += len(found)
            pictures.say(out, {"total": total}, found.tobytes())
        pause = 0.0 if len(found) else max(_PAUSE, 10 * took)  # listing a large folder takes long


def _read(source: Source, geometry: Any, begin: int, end: int, came: deque[tuple[int, float]]) -> np.ndarray:
    """Rows as records, up to the first one that is still being written."""
    images: list[np.ndarray | None] = []
    times: list[float] = []
    for row, image in zip(range(begin, end), compute.read(source, list(range(begin, end))), strict=True):
        since = next(when for rows, when in came if rows > row)
        if (image is None or not image.any()) and time.time() - since < _PATIENCE:
            break
        images.append(image)
        times.append(since)
    records = np.zeros(len(images), RECORD)
    if images:
        records["time"], records["bad"] = times, [image is None for image in images]
        for name, values in compute.features_of(images, geometry).items():
            records[name] = values
    return records


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
