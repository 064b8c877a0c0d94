"""Sites where ranks can be started only by the system's own launcher: ``oars run --launcher srun`` or ``aprun``.

Each gives the words before the program. No rank outlives another there: that needs mpirun (``supervisor/launch.py``).
Hosts are filled in their order, as under mpirun, so a rank knows its place among those of its host from the plan.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from oars.cluster import slurm
from oars.cluster.host_list import HostsError
from oars.plan import Plan

# What tells a process which rank it is. A script must think it is alone, so ranks remove these (see oars.rank.main).
RANK_VARIABLES = re.compile(
    r"(OMPI|OPAL|PMIX|PRTE|PMI|HYDRA|HYDI|MPIR|MV2_COMM_WORLD)_.*|MPI_LOCAL.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|ROLE_RANK|ROLE_WORLD_SIZE"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS.*|NPROCS|STEP_.*|TASKS_PER_NODE|GTIDS|TASK_PID|NNODES|JOB_NUM_NODES)"
    r"|PBS_(TASKNUM|NODENUM|VNODENUM)|JSM_NAMESPACE_.*|PALS_.*|ALPS_APP_PE|FLUX_TASK_.*|FLUX_JOB_(SIZE|NNODES)"
)
NAMES = ("mpirun", "srun", "aprun")


def check(name: str) -> None:
    """Whether this launcher can be used here; one line if not."""
    if name == "mpirun":
        return
    if name == "srun" and not slurm.inside():
        raise HostsError("--launcher srun: this is no Slurm job: get one with salloc, sbatch or oars submit")
    try:
        done = subprocess.run([name, "--mpi=list"] if name == "srun" else [name, "--version"], capture_output=True,
                              text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise HostsError(f"--launcher {name}: {name} cannot be run here ({error})") from None
    if name == "srun" and "pmix" not in (said := done.stdout + done.stderr):
        raise HostsError(f"--launcher srun: this Slurm has no pmix, which ranks of Open MPI need to find each other: "
                         f"srun --mpi=list says {' '.join(said.split())}")


def places(plan: Plan) -> list[str]:
    """Every rank's host."""
    hosts = plan.hosts or [(socket.gethostname().partition(".")[0], plan.ranks)]
    return [name for name, slots in hosts for _ in range(slots)]


def local(plan: Plan, rank: int) -> tuple[int, int]:
    """A rank's number among those of its host, and how many they are."""
    every = places(plan)
    return every[:rank].count(every[rank]), every.count(every[rank])


def srun(plan: Plan, place: str) -> list[str]:
    """All ranks as one step, each on the host that the plan says; that list goes by a file in ``place``."""
    every = places(plan)
    listed = Path(place, "hosts")
    listed.write_text("".join(f"{name}\n" for name in every))
    return ["env", f"SLURM_HOSTFILE={listed}", "srun", "--quiet", "--mpi=pmix", "--overlap", "--distribution=arbitrary",
            f"--nodes={len(set(every))}", f"--ntasks={len(every)}", "--cpu-bind=none", "--mem=0", "--export=ALL",
            "--input=none", "--kill-on-bad-exit=1"]


def srun_says(log: str) -> tuple[str, int] | None:
    """The first death that srun tells of, as in ``n2: task 3: Killed``, and its exit code; 0: it does not say."""
    found = re.search(r"^srun: error: (\S+: tasks? [\d,-]+: (.+))$", log, re.M)
    if found is None:
        return None
    signals = {signal.strsignal(number): 128 + number for number in signal.valid_signals()}
    exited = re.search(r"exit code (\d+)", found[2])
    return found[1], int(exited[1]) if exited else signals.get(found[2].removesuffix(" (core dumped)"), 0)


def aprun(plan: Plan) -> list[str]:
    """As many on each node (-N); the program is where it is (-b), on all cores of the node (-cc none)."""
    slots = [slots for _, slots in plan.hosts or [("", plan.ranks)]]
    if len(set(slots[:-1])) > 1 or slots[-1] > slots[0]:
        raise HostsError(f"--launcher aprun puts as many ranks on every node, not {', '.join(map(str, slots))}: "
                         "give --per-node")
    return ["aprun", "-q", "-b", "-cc", "none", "-n", str(plan.ranks), "-N", str(slots[0])]


def settings(crowded: bool) -> dict[str, str]:
    """What mpirun gets as flags, Open MPI gets from the environment here."""
    details = {"OMPI_MCA_btl": "^ofi", **({"OMPI_MCA_mpi_yield_when_idle": "1"} if crowded else {})}
    return {name: os.environ.get(name, value) for name, value in details.items()}


def rank_command(python: str = sys.executable) -> list[str]:
    """What runs one rank, with the interpreter flags this process was given (``python -O -m oars run ...``)."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [python, *flags, "-m", "oars.rank.main"]
