"""PBS: OpenPBS, PBS Professional, Torque."""

from __future__ import annotations

import os
import shutil

from oars.cluster.hosts import Host, read_file

NAME = "PBS"


def inside() -> bool:
    """Whether this is part of a PBS job."""
    return "PBS_JOBID" in os.environ and "PBS_NODEFILE" in os.environ


def hosts() -> list[Host]:
    """The job's list of nodes has a line for each rank (``mpiprocs``, or Torque's ``ppn``)."""
    return read_file(os.environ["PBS_NODEFILE"])


def reach() -> list[str]:
    """PBS's own remote shell, under its control and accounting; Torque has none."""
    return ["pbs_tmrsh"] if shutil.which("pbs_tmrsh") else ["ssh", "-x"]
