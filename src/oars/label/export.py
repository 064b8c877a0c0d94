"""``labels.csv``: what was labelled, for other programs, and for ``oars.data.open(source, labels=...)``.

``row,key,label,class,by,how,p,event,check``: the row's number and name, the class's name and number, who said it, how
(human, page, model, exam, audit, disputed), the model's chance for it, the event, the image's checksum. The last tells
later whether a row is still the same image. Text that a spreadsheet would run as a formula gets a ``'`` in front.
"""

from __future__ import annotations

import csv
import io
import threading
from pathlib import Path

import numpy as np

from oars import runfolder
from oars.label import folder as folder_
from oars.label.desk import Desk
from oars.label.errors import LabelError
from oars.label.folder import Folder
from oars.label.source import Source
from oars.label.state import DISPUTED, HOW

COLUMNS = ("row", "key", "label", "class", "by", "how", "p", "event", "check")


class Keys:
    """The names of rows, of a source that is opened once."""

    def __init__(self, folder: Folder) -> None:
        self._words = folder.source, folder.group, folder.grows
        self._source: Source | None = None
        self._lock = threading.Lock()

    def __call__(self, row: int) -> str:
        with self._lock:
            self._source = self._source or Source(*self._words)
            if row >= self._source.rows:
                self._source.grown()
            return self._source.key(row)


def text(desk: Desk, keys: Keys) -> str:
    """The whole file."""
    with desk.lock:
        state = desk.state
        labels, known = state.labels(), state.known.copy()
        classes = {number: at for at, number in enumerate(state.classes())}
        names = list(state.names)
        people = {number: state.shown(name) for name, number in state.people.items()}
    guess = desk.learner.guess if desk.learner else None
    path = desk.folder.file(folder_.CHECKSUMS)
    checks = np.load(path, mmap_mode="r") if path.exists() else None
    later, base = desk.folder.records(), desk.folder.base
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in np.flatnonzero((labels >= 0) | (known["how"] == DISPUTED)).tolist():
        label, one = int(labels[row]), known[row]
        check = 0 if checks is None else checks[row] if row < base else later[row - base]["check"]
        p = f"{float(guess.p[row]):.4f}" if guess is not None and guess.best[row] == label else ""
        writer.writerow([row, safe(keys(row)), safe(names[label]) if label >= 0 else "",
                         classes[label] if label >= 0 else "", safe(people[int(one["who"])]), HOW[one["how"]], p,
                         int(one["event"]), f"{int(check):08x}" if checks is not None else ""])
    return out.getvalue()


def safe(cell: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return "'" + cell if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def write(desk: Desk, keys: Keys, path: Path) -> None:
    """The file on disk: complete, or as it was."""
    try:
        runfolder.put(path, text(desk, keys))
    except OSError as error:
        raise LabelError(f"{path}: {error.strerror}: the labels are safe in {desk.folder.path}; only this copy of them "
                         "is not written", 507) from None
