"""The folder of a project, ``NAME.oars-label``: every file in it, and who may use it.

Only its owner may look inside (0700): the log names people, the token opens the page.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from oars import runfolder
from oars.data.errors import DataError
from oars.data.labels import checksum_of
from oars.label import pixels
from oars.label.errors import LabelError
from oars.label.log import Log, filesystem, journal_for
from oars.label.source import Source

ENDING = ".oars-label"
PROJECT, LOG, TOKEN, LOCK, REFUSED = "project.json", "log.sqlite", "token", "lock", "refused.log"
LABELS = "labels.csv"
FEATURES, CHECKSUMS, THUMBS, PROGRESS = "features", "checksums.npy", "thumbs.npy", "computing.json"
COMPUTING = "computing.lock"
TUNE, TUNED = "tune", "tuned.json"  # where a network is fine-tuned, and what came of it
LATER = "later.json"  # how far the features are that take long
OPENER = "open.html"
LIVE = "live.bin"  # a RECORD for each row that came after the project was made
RECORD = np.dtype([("time", "<f8"), ("check", "<u4"), ("bad", "u1"), ("radial", "<f4", (pixels.RADIAL,)),
                   ("spots", "<f4", (pixels.SPOTS,))])
EXAM = 200  # images
_TOKEN = 43  # letters of 256 bits
_LOOKED_AT = 16  # images that tell whether a source is still the same


class Folder:
    """One project on disk. ``base`` rows were there when it was made, ``rows`` are known now."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.source = str(about["source"])
        self.group: str | None = about["group"]
        self.base, self.seed = int(about["rows"]), int(about["seed"])
        self.grows = bool(about.get("grows"))  # it was followed as it grew
        live = self.file(LIVE)
        self.rows = self.base + (live.stat().st_size // RECORD.itemsize if live.exists() else 0)
        self.exam = np.asarray(about["exam"], np.int64)

    def file(self, name: str) -> Path:
        """One of its files."""
        return self.path / name

    def feature(self, name: str) -> Path:
        """Where the features of this name are."""
        return self.path / FEATURES / f"{name}.npy"

    def map_of(self, name: str) -> Path:
        """Where the map of these features is."""
        return self.path / FEATURES / f"map-{name}.npy"

    def records(self) -> np.ndarray:
        """What is known of the rows that came after the project was made."""
        path = self.file(LIVE)
        return np.memmap(path, RECORD, "r", shape=(self.rows - self.base,)) if self.rows > self.base else np.empty(
            0, RECORD)

    def log(self) -> Log:
        """The log, with the journal that works here."""
        return Log(self.file(LOG), journal_for(filesystem(self.path)))

    def token(self) -> str:
        """256 bits that open the page. They stay when the server is started again, so that open pages go on."""
        path = self.file(TOKEN)
        if not path.exists() or len(path.read_text()) != _TOKEN:  # a full disk has cut it: an empty one lets all in
            _private(path, secrets.token_urlsafe(32))
        return path.read_text()

    def opener(self, address: str) -> Path:
        """A page that leads to the address: command lines of browsers are seen by everybody on this machine."""
        path = self.file(OPENER)
        _private(path, f'<!doctype html><meta http-equiv="refresh" content="0;url={address}">')
        return path

    def lock(self) -> int:
        """Hold it while this server runs; the file's descriptor."""
        fd = os.open(self.file(LOCK), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise LabelError(f"{self.path} is open in another oars label: use its page, or end it") from None
        return fd


def folder_for(source: str) -> Path:
    """Where the project of a source is: in the current folder, named after it."""
    name = os.path.basename(os.path.abspath(source))
    stem = name if os.path.isdir(source) else name.partition(".")[0] or name
    return Path(stem + ENDING)


def open_folder(source: str, group: str | None, seed: int, live: bool = False) -> Folder:
    """The project of a source; a new one if there is none yet."""
    path = folder_for(source)
    _refuse_others(path)
    if (path / PROJECT).exists():
        return _again(path, source, group, live)
    found = Source(source, group, live)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise LabelError(f"{path}: {error.strerror}: start oars label in a folder that you may write to") from None
    rng = np.random.default_rng(seed)
    count = min(EXAM, found.rows // 5)
    about = {"source": os.path.abspath(source), "group": group, "column": found.column, "rows": found.rows,
             "state": found.state(), "seed": seed, "exam": sorted(rng.permutation(found.rows)[:count].tolist()),
             "grows": live,
             "looked_at": _look(found, np.linspace(0, found.rows - 1, _LOOKED_AT))}
    put(path / PROJECT, about)
    return Folder(path, about)


def _refuse_others(path: Path) -> None:
    """A folder that somebody else has made, or can look into, has a token that he knows."""
    try:
        link, there = os.lstat(path), os.stat(path)
    except FileNotFoundError:
        return
    if {link.st_uid, there.st_uid} != {os.getuid()} or not stat.S_ISDIR(there.st_mode) or there.st_mode & 0o077:
        raise LabelError(f"{path} is no folder that only you can use: chmod 700 it if you made it, or move it away")


def _private(path: Path, text: str) -> None:
    """Write a short file that only its owner can read: complete, or an error."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise LabelError(f"{path}: {error.strerror}", 507) from None


def _again(path: Path, source: str, group: str | None, live: bool) -> Folder:
    try:
        about = json.loads((path / PROJECT).read_text())
        folder = Folder(path, about)
    except (OSError, ValueError, KeyError, TypeError):
        raise LabelError(f"{path / PROJECT} is damaged: put a copy back, or move {path} away to begin anew") from None
    found = Source(source, group, live or folder.grows)
    if found.state() == about["state"] and live <= folder.grows:
        return folder
    folder.grows = folder.grows or live
    if found.rows < folder.rows or (found.rows > folder.rows and not folder.grows):
        raise LabelError(f"{source} has changed: it has {found.rows} rows and had {folder.rows} when its labels were "
                         f"made: put the old file back, or move {path} away to begin anew"
                         + ("; if it grows, follow it with --live" if found.rows > folder.rows else ""))
    known = dict(about["looked_at"])
    if folder.rows > folder.base and not (last := folder.records()[-1])["bad"]:
        known[str(folder.rows - 1)] = int(last["check"])
    now = _look(found, known)
    for row, check in known.items():
        if now.get(row) != check:
            raise LabelError(f"{source} has changed: row {row} is another image than when its labels were made: put "
                             f"the old file back, or move {path} away to begin anew")
    about.update(state=found.state(), source=os.path.abspath(source), grows=folder.grows)  # copied, touched, grown
    put(path / PROJECT, about)
    return Folder(path, about)


def _look(found: Source, some: Iterable[Any]) -> dict[str, int]:
    """Checksums of some images."""
    checks = {}
    for row in sorted({int(row) for row in some}):
        try:
            checks[str(row)] = checksum_of(found.images([row])[0])
        except DataError:
            checks[str(row)] = -1  # it cannot be read, now as then
    return checks


def put(path: Path, about: dict[str, Any]) -> None:
    """Write a file of JSON: complete, or not at all."""
    try:
        runfolder.put(path, json.dumps(about))
    except OSError as error:
        raise LabelError(f"{path}: {error.strerror}", 507) from None
