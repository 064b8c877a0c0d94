"""Run folders, ``oars-runs/<name>``: how they get their names, how they are found again, and every file in them.

The supervisor, the ranks and what reads a run talk only through these files. A file that others may read at any moment
is written by ``put``: complete, or not there. Marks (``MARKS``) are removed when the run has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from time import time as clock  # as it is now: scripts are given another one later

RUNS = "oars-runs"
JOB = "OARS_JOB"  # in the environment of a submitted job: its run folder, which was made when it was submitted

# ---- what a run leaves ----

RUN = "run.json"  # the plan, versions, hosts
END = "end.json"  # the exit code
SUMMARY = "summary.json"  # steps, samples per second, gathers
METRICS = "metrics.jsonl"  # a line for each step
EVENTS = "events.jsonl"  # faults, recoveries, fallbacks
REPORT = "report.html"
TENSORBOARD = "tb"  # a folder: the same curves
SERIES = "series.json"  # in the folder of a sweep or a scaling series: what was asked for
SEARCH = "optuna.journal"  # ... and what a search has tried
SAMPLES = "samples.npz"  # the last loss of each sample, and how often it was left out
SAMPLES_PICTURE = "samples.png"  # the hardest ones
WEIGHTS = "weights.npz"  # at the end of a run of oars verify
MPIRUN_LOG = "mpirun.log"
DEPUTY_LOG = "deputy.log"


def small(number: int) -> str:
    """A network that was cut, with its weights: the first one, and others."""
    return f"small-{number}.pt" if number else "small.pt"


def executed(notebook: str) -> str:
    """A notebook with what its cells have shown: under its own name."""
    return os.path.basename(notebook)


def log(rank: object) -> str:
    """A rank's output; its stderr too, where both are one stream."""
    return f"rank-{rank}.log"


def err(rank: object) -> str:
    """A rank's stderr."""
    return f"rank-{rank}.err"


def debug_log(rank: object) -> str:
    """What a rank decided and why (``OARS_LOG=debug``)."""
    return f"rank-{rank}.debug"


def times(rank: object) -> str:
    """Where a rank's time went."""
    return f"times-{rank}.jsonl"


def ledger(rank: object) -> str:
    """Which samples went into which exchange (``OARS_DIGEST``)."""
    return f"ledger-{rank}.jsonl"


def sync(rank: object) -> str:
    """What a worker or a server measured (``--sync server``)."""
    return f"sync-{rank}.json"


def weights_digest(rank: object) -> str:
    """A hash of a rank's weights at the end."""
    return f"weights-digest-{rank}.txt"


def stall(number: object) -> str:
    """The stacks of all ranks in a stall."""
    return f"stall-{number}.txt"


# ---- submitted jobs ----

JOB_RECORD = "job.json"
JOB_SCRIPT = "job.sh"
PBS_OUTPUT = "job.pbs"  # what PBS itself writes
JOB_OUTPUT = "job.out"
PARTS = "parts.jsonl"  # a line for each job of a run that continued in another one
CANCELLED = "cancelled"  # by the user, so it shall not come back
DOCTOR = "doctor.json"  # what was found out about the nodes

def part(number: object) -> str:
    """A folder: what a part of a job left that ended before its first snapshot."""
    return f"part-{number}"


# ---- while it runs ----

BOARD = "board"  # which collective each rank is in
FILES = "files"  # what the ranks' views of files need
SNAPSHOTS = "snapshots"
MADE = "made"  # in SNAPSHOTS: the paths of what the run has made
TAPE = "tape"  # in SNAPSHOTS
CUT_AWAY = "cut"  # in SNAPSHOTS: files that a resumed run makes again
STAGE = "stage"  # the run folder of the job that copies the environment to the hosts
REQUEST, DONE, RESUMED = "snapshot-now", "snapshot-done", "resumed"
GROW, GROWING, GROWN = "grow-now", "growing", "grown"


def born(rank: object) -> str:
    """A rank's host and process id."""
    return f"born-{rank}"


def pid(rank: object) -> str:
    """A rank has begun the script."""
    return f"pid-{rank}"


def interrupted(rank: object) -> str:
    """A rank took a Ctrl-C."""
    return f"interrupted-{rank}"


def handles(number: object) -> str:
    """The script has a handler of its own for the signal of this number."""
    return f"handles-{number}"


def fatal(rank: object) -> str:
    """By which signal, of a crash, a rank died, as Python writes it down."""
    return f"fatal-{rank}"


def lost(rank: object) -> str:
    """The others go on without this rank."""
    return f"lost-{rank}"


def dead(rank: object) -> str:
    """A rank's process has ended, says its host's deputy."""
    return f"dead-{rank}"


def left(rank: object) -> str:
    """A rank is past the last message."""
    return f"left-{rank}"


def ready(rank: object) -> str:
    """A rank that joins has played what was recorded when it was started."""
    return f"ready-{rank}"


def there(rank: object) -> str:
    """A rank that joins is connected."""
    return f"there-{rank}"


def joined(rank: object) -> str:
    """A rank that joins has joined."""
    return f"joined-{rank}"


def stayed(rank: object) -> str:
    """A rank that was to join did not."""
    return f"stayed-{rank}"


def exit_file(rank: object) -> str:
    """How a rank's script ended."""
    return f"exit-{rank}.json"


def error(rank: object) -> str:
    """The traceback with which it ended."""
    return f"error-{rank}.json"


def stack(rank: object) -> str:
    """A rank's stack, for a stall report."""
    return f"stack-{rank}.txt"


def orders(host: object) -> str:
    """What the supervisor wants of a host's deputy."""
    return f"orders-{host}"


def answer(host: object, number: object) -> str:
    """What the deputy has seen."""
    return f"answer-{host}-{number}.json"


def start_json(host: object) -> str:
    """What a host's lookout is started with."""
    return f"start-{host}.json"


def start_script(host: object) -> str:
    """The script that starts a host's lookout and daemon."""
    return f"start-{host}.sh"


def at(host: object) -> str:
    """A host's addresses."""
    return f"at-{host}"


def dark(host: object) -> str:
    """Nothing is heard of a host."""
    return f"dark-{host}"


def gone(host: object) -> str:
    """A host's daemon has ended."""
    return f"gone-{host}"


def ended(host: object) -> str:
    """A host's daemon may end."""
    return f"ended-{host}"


def side(living: object) -> str:
    """The side of a cut link that goes on, of so many ranks."""
    return f"side-{living}"


def staged(host: object) -> str:
    """A host has a copy of the environment."""
    return f"staged-{host}"


MARKS = re.compile(r"(born|pid|handles|fatal|interrupted|lost|dead|left|ready|there|joined|stayed)-\d+$"
                   r"|\.?exit-\d+\.json(\.part)?$|board$|stack-\d+\.txt$|(orders|answer|gone|dark|at|side|start|staged|ended)-"
                   rf"|({REQUEST}|{DONE}|{RESUMED}|{GROW}|{GROWING})$")


def put(path: Path, text: str) -> None:
    """Write a file that others may read at any moment: complete, or not there.

    Scripts may have replaced ``open``, so the system is called.
    """
    part, data = path.with_name(part_of(path.name)), text.encode()
    fd = os.open(part, os.O_WRONLY | os.O_CREAT, 0o666)  # keeps the room that ``reserve`` has made
    try:
        left = data
        while left:
            left = left[os.write(fd, left):]
        os.ftruncate(fd, len(data))
    finally:
        os.close(fd)
    os.replace(part, path)


def append(path: Path, text: str) -> None:
    """Add to a file that other processes may write to as well: in one piece, at its end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def event_line(kind: str, /, **fields: object) -> str:
    """A line of ``EVENTS``: what happens now."""
    return json.dumps({"time": clock(), "event": kind, **fields}) + "\n"


def write_event(folder: Path, kind: str, /, **fields: object) -> None:
    """Append it. A full disk costs the line, not the run."""
    with contextlib.suppress(OSError):
        append(folder / EVENTS, event_line(kind, **fields))


def reserve(path: Path) -> None:
    """Make room for a short file that must be written though the disk is full by then."""
    fd = os.open(path.with_name(part_of(path.name)), os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(fd, b" " * 64)
    os.close(fd)


def part_of(name: str) -> str:
    """The file that becomes ``name`` once it is complete."""
    return f".{name}.part"


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
    return os.environ.get(JOB) == str(folder.resolve()) and not (folder / RUN).exists()


def stem_of(script: str, module: bool) -> str:
    """What a run is called after."""
    return script.replace(".", "-") if module else Path(script).stem


def find_folder(run: str, *holds: str) -> Path:
    """The run folder that is meant: one that holds one of these files."""
    for folder in (Path(run), Path(RUNS, run)):
        if any((folder / name).is_file() for name in holds):
            return folder
    raise UsageError(f"no such run: neither {run} nor {Path(RUNS, run)} is a run folder")
