"""The plan of a run: what is run, on how many ranks, with what.

``oars.commands.planning`` makes it, ``run.json`` in the run folder holds it, and every rank reads it there first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from oars import runfolder
from oars.runfolder import UsageError


class Period(TypedDict, total=False):
    """When snapshots are taken, besides on request; ``end`` is when the scheduler ends the job (seconds since 1970)."""

    seconds: float
    steps: int
    end: float


class Pruning(TypedDict):
    """``--prune``: the part of each layer that is kept, when cuts begin and end, and by which worth units leave."""

    keep: float
    first: float
    last: float
    unit: str  # passes or steps
    score: str


class Staged(TypedDict):
    """Where ``--stage-env`` has put its copies on each host, what they are copies of, and what that took."""

    place: str
    roots: dict[str, str]
    bytes: int
    seconds: float


@dataclass
class Plan:
    """One run. Fields have the names of the options; a run that has no such option has the field's default."""

    # what is run
    script: str = ""
    args: list[str] = field(default_factory=list)
    module: bool = False
    cwd: str = ""
    seed: int = 0
    cell_timeout: float = 0.0  # seconds, for each cell of a notebook; 0: no limit
    tf1: bool = False
    # where
    ranks: int = 1
    host: str = ""  # the command's own
    hosts: list[tuple[str, int]] = field(default_factory=list)  # names and ranks; empty: all ranks on ``host``
    reach: list[str] = field(default_factory=list)  # the command that runs a command on another host
    gpus: list[str] = field(default_factory=list)  # of ``host``
    share_gpus: bool = False
    cores: int = 1  # of ``host``
    threads: int = 0  # of each rank; 0: the run is older than this entry
    # how ranks are started
    launcher: str = "mpirun"
    mpirun: str = ""
    mpi: str = ""  # and its version
    survives: bool = False  # the other ranks continue when one dies
    mpi_settings: list[str] = field(default_factory=list)  # variables of the environment that the script keeps
    report_bindings: bool = False
    stage_env: bool = False
    stage: Staged | None = None
    one_stream: bool = False  # stdout and stderr are the same file, so ranks write one file to keep the order
    stdin_tty: list[int] | None = None  # columns and lines, if it is a terminal
    stdout_tty: list[int] | None = None
    # how a batch is divided, and how ranks keep together
    batch: str = "split"
    split: str = "always"  # or auto: batches that are too small to be shared are not cut
    scale_lr: str | None = None
    local_batchnorm: bool = False
    sync: str = "allreduce"
    wire: str = "fp32"
    every: int | str = 0  # steps, or "auto"; --sync local
    outer: str = "sgd"
    warmup: int = 0
    rotate: bool = False  # --sync gossip
    servers: int = 0  # --sync server
    staleness: int = 0
    backup: int = 0
    placement: str = "balanced"
    guard: str = "heal"  # off, report or heal
    guard_every: int = 0  # steps; 0: as time allows
    # networks that change
    prune: Pruning | None = None
    widen: dict[str, int] = field(default_factory=dict)  # layers, as patterns -> how wide they become
    widen_when: int = 10  # steps; 0: when the loss has stopped falling
    samples: str = "all"  # or thin: those that the network knows are left out now and then
    of_run: int = 0  # the steps of the whole run, where the user says them
    # stalls, snapshots, and runs that are part of another command
    stall: float = 0.0  # seconds; 0: stalls are not reported
    on_stall: str | None = None
    snapshot: Period | None = None  # None: never, empty: on request
    resume: str = ""  # the snapshot to resume from
    joining: dict[str, Any] = field(default_factory=dict)  # for ranks that join a run; not in run.json
    stop_after: int | None = None  # steps; oars verify
    # for people and reports
    started: float = 0.0
    launched: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    doctor: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The plan that a ``run.json`` holds, of an older version too: entries that have no field are left out."""
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        if "hosts" in known:
            known["hosts"] = [(name, slots) for name, slots in known["hosts"]]
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """What ``run.json`` holds."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "joining"}

    def write(self, folder: Path) -> None:
        """Put the plan where the ranks and the watchers read it."""
        runfolder.put(folder / runfolder.RUN, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """The plan of the run in this folder; UsageError if that is no run folder."""
        try:
            data = json.loads((folder / runfolder.RUN).read_text())
            if {"script", "args", "module", "cwd", "ranks"} <= data.keys():
                return cls.from_json(data)
        except (OSError, ValueError, TypeError, AttributeError):
            pass
        raise UsageError(f"{folder} has no readable run.json: it is no run folder")


def error_file(rank: int, plan: Plan) -> str:
    """The file in the run folder that has this rank's stderr."""
    return runfolder.log(rank) if plan.one_stream else runfolder.err(rank)


def available_cores() -> list[int]:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name on this host: the GPUs already chosen there, else all of them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return [str(index) for index, _ in enumerate(driver.iterdir())]
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    try:
        listing = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, line in enumerate(x for x in listing.splitlines() if x.startswith("GPU "))]
