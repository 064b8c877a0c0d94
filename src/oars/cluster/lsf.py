"""LSF: ``bsub``."""

from __future__ import annotations

import os
import shutil

from oars.cluster.host_list import Host, added_up, read_file

NAME = "LSF"


def inside() -> bool:
    """Whether this is part of an LSF job."""
    return "LSB_JOBID" in os.environ and bool({"LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS"} & set(os.environ))


def hosts() -> list[Host]:
    """A rank for each slot: from the job's host file, else from ``a 4 b 4``, else from ``a a a a b b b b``."""
    environ = os.environ
    if "LSB_DJOB_HOSTFILE" in environ:
        return read_file(environ["LSB_DJOB_HOSTFILE"])
    if "LSB_MCPU_HOSTS" in environ:
        words = environ["LSB_MCPU_HOSTS"].split()
        return [Host(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True)]
    return added_up(Host(name, 1) for name in environ["LSB_HOSTS"].split())


def reach() -> list[str]:
    """LSF's own remote shell, under its control and accounting."""
    return ["blaunch"] if shutil.which("blaunch") else ["ssh", "-x"]
