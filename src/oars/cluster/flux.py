"""Flux: ``flux batch``, ``flux alloc``; the job is a Flux instance of its own."""

from __future__ import annotations

import os
import subprocess

from oars.cluster.host_list import Host, HostsError, expand

NAME = "Flux"


def inside() -> bool:
    """Whether this is part of a Flux job."""
    return "FLUX_URI" in os.environ and bool({"FLUX_JOB_ID", "FLUX_ENCLOSING_ID"} & set(os.environ))


def hosts() -> list[Host]:
    """A rank for each core of the instance."""
    command = ["flux", "resource", "list", "--no-header", "--states=up", "--format={ncores} {nodelist}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise HostsError(f"Flux does not say which hosts this job has ({error}): name them with --hosts") from None
    found = []
    for line in done.splitlines():
        cores, _, names = line.partition(" ")
        every = expand(names.strip())
        found += [Host(name, max(1, int(cores) // len(every))) for name in every]
    return found


def reach() -> list[str]:
    """Flux starts programs by the number of a node, not by its name, so this is ssh's work."""
    return ["ssh", "-x"]
