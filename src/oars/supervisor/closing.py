"""How a run folder is closed: by the supervisor, or by the deputy of a side of a cut link that went on alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

from oars import runfolder
from oars.adapt.files import library
from oars.adapt.replay.made import note
from oars.watch.tb import update_quietly


def seal(folder: Path, code: int) -> None:
    """The run has ended; one that has come to its good end needs no snapshots any more."""
    if code == 0 or not any((folder / runfolder.SNAPSHOTS).glob("*.snap")):
        shutil.rmtree(folder / runfolder.SNAPSHOTS, ignore_errors=True)
    try:
        (folder / runfolder.END).write_text(json.dumps({"code": code, "time": time.time()}) + "\n")
    except OSError:  # a full disk
        pass
    update_quietly(folder)


def clear_marks(folder: Path) -> None:
    """Remove the files by which ranks and supervisor communicated, and what the ranks' views of files needed."""
    for name in os.listdir(folder):
        if runfolder.MARKS.match(name):
            os.unlink(folder / name)
    views = folder / runfolder.FILES
    with contextlib.suppress(FileNotFoundError):  # one rank has none
        note(folder, *library.made(str(views)))
    shutil.rmtree(views, ignore_errors=True)
