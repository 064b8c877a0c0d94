"""Slurm: ``sbatch``, ``salloc``."""

from __future__ import annotations

import os

from oars.cluster.hosts import Host, counts, expand

NAME = "Slurm"


def inside() -> bool:
    """Whether this is part of a Slurm job."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_JOB_NODELIST" in os.environ


def hosts() -> list[Host]:
    """As many ranks a node as the job asked for tasks; if it asked for none, one for each of its CPUs."""
    environ = os.environ
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    names = expand(environ["SLURM_JOB_NODELIST"])
    told = environ.get("SLURM_TASKS_PER_NODE" if asked else "SLURM_JOB_CPUS_PER_NODE", "")
    slots = counts(told) if told else []
    return [Host(name, slots[at] if at < len(slots) else 1) for at, name in enumerate(names)]


def reach() -> list[str]:
    """A step of its own, beside others (``--overlap``) and on all of the job's cores there."""
    return ["srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--mem=0",
            "--export=ALL", "--input=none", "--nodelist"]
