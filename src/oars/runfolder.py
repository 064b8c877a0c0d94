"""Run folders, ``oars-runs/<name>``: how they get their names, and how they are found again."""

from __future__ import annotations

import os
import time
from pathlib import Path

RUNS = "oars-runs"
JOB = "OARS_JOB"  # in the environment of a submitted job: its run folder, which was made when it was submitted


def fatal_file(rank: int) -> str:
    """The file in a run folder where Python says by which signal, of a crash, this rank died."""
    return f"fatal-{rank}"


class CutOff(Exception):
    """This side of a cut link has stopped, and the other may go on: one line for the user."""


class UsageError(Exception):
    """Something the user can put right: shown as one line, exit code 2."""


def make_folder(name: str | None, stem: str) -> Path:
    """A new run folder under ``oars-runs``; a name that is taken is the user's to change."""
    if name is not None and (name != os.path.basename(name) or name in ("", ".", "..")):
        raise UsageError(f"--name {name!r} cannot be a folder's name: leave out slashes and dots")
    base = name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = Path(RUNS)
    try:
        runs.mkdir(exist_ok=True)
        for attempt in range(1, 1000):
            folder = runs / (base if attempt == 1 else f"{base}-{attempt}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                if name is not None and _waits_for_us(folder):
                    return folder
                if name is not None:
                    raise UsageError(f"there is already a run named {name} ({folder}): "
                                     "choose another --name or remove that folder") from None
    except OSError as error:
        raise UsageError(f"cannot make a run folder in {os.getcwd()}/{RUNS}: {error.strerror}") from None
    raise UsageError(f"cannot find a free name like {base} in {runs}")


def _waits_for_us(folder: Path) -> bool:
    """Whether we are the job for which ``oars submit`` made this folder."""
    return os.environ.get(JOB) == str(folder.resolve()) and not (folder / "run.json").exists()


def stem_of(script: str, module: bool) -> str:
    """What a run is called after."""
    return script.replace(".", "-") if module else Path(script).stem


def find_folder(run: str, *holds: str) -> Path:
    """The run folder that is meant: one that holds one of these files."""
    for folder in (Path(run), Path(RUNS, run)):
        if any((folder / name).is_file() for name in holds):
            return folder
    raise UsageError(f"no such run: neither {run} nor {Path(RUNS, run)} is a run folder")
