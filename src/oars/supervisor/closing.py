"""How a run folder is closed: by the supervisor, or by the deputy of a side of a cut link that went on alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

from oars.adapt.replay.tape import FOLDER, GROW, GROWING
from oars.supervisor.snapshot_requests import DONE, REQUEST, RESUMED
from oars.watch.tb import update_quietly

MARKS = re.compile(r"(born|pid|interrupted|lost|dead|left|ready|there|joined|stayed)-\d+$|\.?exit-\d+\.json(\.part)?$"
                   r"|board$|stack-\d+\.txt$|(orders|answer|gone|dark|at|side|start|staged|ended)-"
                   rf"|({REQUEST}|{DONE}|{RESUMED}|{GROW}|{GROWING})$")


def seal(folder: Path, code: int) -> None:
    """The run has ended; one that has come to its good end needs no snapshots any more."""
    if code == 0 or not any((folder / FOLDER).glob("*.snap")):
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    try:
        (folder / "end.json").write_text(json.dumps({"code": code, "time": time.time()}) + "\n")
    except OSError:  # a full disk
        pass
    update_quietly(folder)


def clear_marks(folder: Path) -> None:
    """Take away what ranks and supervisor have told each other by, and what the ranks' views of files needed."""
    for name in os.listdir(folder):
        if MARKS.match(name):
            os.unlink(folder / name)
    shutil.rmtree(folder / "files", ignore_errors=True)
