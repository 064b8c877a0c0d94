"""What runs beside the requests: the child that computes features, the model, the map, ``labels.csv``; and news."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from oars.label import export, features
from oars.label import folder as folder_
from oars.label.audit import Audits
from oars.label.compute import NAMES, finals_of
from oars.label.desk import Desk
from oars.label.errors import LabelError
from oars.label.folder import Folder
from oars.label.layout import layout
from oars.label.live import Live
from oars.label.pictures import Pictures
from oars.label.pixels import THUMB, pooled
from oars.label.tune import Tuning

_LOOK = 0.3  # seconds between looks at what the child has done
_CSV = 2.0  # seconds after an action until labels.csv is written again


class Serving:
    """One open project and everything that works for it."""

    def __init__(self, folder: Folder, wanted: str, workers: int, follow: bool = False) -> None:
        self.folder, self._wanted, self.follow = folder, wanted, follow
        self.live: Live | None = None
        self.desk = Desk(folder, self.tell)
        self.audits = Audits(self.desk)
        self.pictures = Pictures(folder.source, folder.group, folder.grows)
        self.keys = export.Keys(folder)
        self.progress: dict[str, Any] | None = None
        self.note: str | None = None
        self.image: dict[str, Any] | None = None
        self._queues: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[str]]] = []
        self._thumbs: np.ndarray | None = None
        self._map: np.ndarray | None = None
        self._mapping = threading.Lock()
        self._exporting = threading.Lock()
        self._ended = threading.Event()
        self._dirty = threading.Event()
        self.coming = features.later(wanted, folder.rows, follow)  # features that take long
        self.tuning: Tuning | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._workers = workers
        for work in (self._compute, self._write):
            threading.Thread(target=work, daemon=True).start()

    # ---- news --------------------------------------------------------------------------------------------------------

    def tell(self, what: str) -> None:
        """Something has changed: all open pages hear of it."""
        if what not in ("model", "progress", "live"):
            self._dirty.set()
        line = json.dumps({"event": self.desk.state.last if hasattr(self, "desk") else 0, "what": what})
        for loop, queue in list(self._queues):
            with contextlib.suppress(RuntimeError):  # its page has gone
                loop.call_soon_threadsafe(queue.put_nowait, line)

    @contextlib.contextmanager
    def listening(self) -> Any:
        """A queue of news for one page."""
        mine = asyncio.get_running_loop(), asyncio.Queue[str]()
        self._queues.append(mine)
        try:
            yield mine[1]
        finally:
            self._queues.remove(mine)

    # ---- features ----------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """See to it that every image has been read once; then the model begins."""
        try:
            with contextlib.suppress(LabelError):
                self.image = {name: value for name, value in self.pictures.ask("image", row=0)[0].items()
                              if name != "bytes"}
            if all(path.exists() for path in finals_of(self.folder)) or self._read_all():
                self._learn()
                if self.follow and not self._ended.is_set():
                    self.live = Live(self.desk, self.tell)
                if self.coming:
                    self._learn_later(self.coming)
                    if self._wanted == "auto" and not self._ended.is_set():
                        self.tuning = Tuning(self.desk, self.keys, self._workers, self._ended, self._tuned)
        except (LabelError, OSError, ValueError) as error:
            self.note = str(error)
        self.progress = self.coming = None
        self.tell("model")
        if self.tuning is not None:
            self.tuning.watch()

    def _read_all(self) -> bool:
        """Whether the child came to the end."""
        done = self._child_does("oars.label.compute", folder_.PROGRESS, str(self._workers))
        if done is False:
            self.note = self.note or "the images could not be read; start oars label again to go on"
        return bool(done)

    def _child_does(self, module: str, file: str, *words: str) -> bool | None:
        """Whether a child process came to the end; None if we end before it."""
        # Threads that wait must sleep: where others compute too, spinning costs 15 times as much.
        self._child = subprocess.Popen([sys.executable, "-m", module, str(self.folder.path), *words],
                                       env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
        while self._child.poll() is None and not self._ended.wait(_LOOK):
            self._look(file)
        if self._ended.is_set():
            return None
        self._look(file)
        return not self._child.returncode

    def _look(self, file: str) -> None:
        """How far it is."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = json.loads(self.folder.file(file).read_text())
            if "error" in found:
                self.note = found["error"]
                return
            if "bad" in found:
                self.note = f"{found['bad']} images cannot be read: they are shown in grey" if found["bad"] else None
            now = {"what": found.get("what", "reading images"), "done": found["done"], "total": found["total"]}
            if now != self.progress:
                self.progress = now
                self.tell("progress")

    def _learn(self) -> None:
        later = self.folder.records()
        raw = {name: np.concatenate([np.load(self.folder.feature(name)), later[name]]) for name in NAMES}
        candidates = {**raw, "spots+radial": np.concatenate([raw["spots"], raw["radial"]], 1)}
        chosen = self._wanted if self._wanted in candidates else None
        if self._wanted.endswith(".npy"):
            chosen = features.name_of(self._wanted)
            candidates = {chosen: features.read(self._wanted, self.folder.rows)}
        if self.folder.file(folder_.THUMBS).exists():
            self._thumbs = np.load(self.folder.file(folder_.THUMBS), mmap_mode="r")
        self.desk.learn({name: values for name, values in candidates.items() if chosen in (None, name)}, chosen)

    def _learn_later(self, word: str) -> None:
        """Have features made that take long; then they are candidates, or in use if they were asked for."""
        found = features.kept(self.folder, word)
        if found is None:
            self.folder.map_of(features.name_of(word)).unlink(missing_ok=True)  # of other features of this name
            known = self.folder.file(folder_.LATER)
            if known.exists() and '"error"' in known.read_text():  # of before
                known.unlink()
            done = self._child_does("oars.label.late", folder_.LATER, word, str(self._workers))
            if done is None:
                return
            found = features.kept(self.folder, word) if done else None
        if found is None:
            self.note = self.note or f"the features {features.name_of(word)} could not be computed"
        else:
            self.desk.ready().add(features.name_of(word), found, self._wanted != "auto")

    def _tuned(self, done: int, total: int) -> None:
        self.progress = {"what": "fine-tuning on the labels", "done": done, "total": total} if done < total else None
        self.tell("progress")

    # ---- pictures ----------------------------------------------------------------------------------------------------

    def thumbs(self, rows: list[int], side: int) -> np.ndarray:
        """Squares of 8 bits: the ones that are kept, or made now."""
        if self._thumbs is not None and side <= THUMB and max(rows) < len(self._thumbs):
            kept = self._thumbs[rows]
            if THUMB % side == 0:
                return np.stack([pooled(tile, side, "max") for tile in kept])
        return self.pictures.thumbs(rows, side)

    # ---- the map -----------------------------------------------------------------------------------------------------

    def map(self) -> np.ndarray | None:
        """The map, or None while it is made; the first who asks begins it."""
        self.desk.ready()  # before the lock: nobody would give it back
        if self._map is None and self._mapping.acquire(blocking=False):
            threading.Thread(target=self._make_map, daemon=True).start()
        return self._map

    @property
    def mapped(self) -> int | None:
        """How many rows are on the map; those that have come since are not."""
        return None if self._map is None else len(self._map)

    def _make_map(self) -> None:
        learner = self.desk.ready()
        path = self.folder.map_of(learner.name)
        try:
            found = np.load(path) if path.exists() else None
            if found is None or found.shape != (self.folder.rows, 2):
                found = layout(learner.features, self.folder.seed, lambda done, total: self._mapped(done, total))
                np.save(path, found)
            self._map = found
        except (OSError, ValueError, RuntimeError) as error:
            self.note = f"the map could not be made: {error}"
            self._mapping.release()
        self.progress = None
        self.tell("progress")

    def _mapped(self, done: int, total: int) -> None:
        self.progress = {"what": "making the map", "done": done, "total": total}
        self.tell("progress")

    # ---- labels.csv --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Soon after each action; a full disk is said on the page, and tried again at the next one."""
        while not self._ended.is_set():
            self._dirty.wait()
            if self._ended.wait(_CSV):
                return
            self._dirty.clear()
            self.export()

    def export(self) -> None:
        """Write ``labels.csv`` now."""
        try:
            with self._exporting:  # the thread and the end of the command write the same file
                export.write(self.desk, self.keys, self.folder.file(folder_.LABELS))
        except Exception as error:  # a source that has gone, a full disk: labels are in the log
            self.note = str(error)

    def close(self) -> None:
        """End everything that was started."""
        self._ended.set()
        self._dirty.set()
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()
        for other in (self.live, self.tuning):
            if other is not None:
                other.close()
        self.pictures.close()
        self.desk.close()
