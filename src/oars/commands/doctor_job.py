"""``oars doctor --job``: whether the nodes of this job can work together, before a training begins on them.

A rank on every node sums an array with the others and says what it sees: its name, its clock, its GPUs. It says so in
its own file of the run folder, which this node then reads: so the folder is the same everywhere, and can be written.
"""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.cluster.host_list import Host
from oars.cluster.place import Where, find
from oars.commands.planning import add_mpi, make_plan
from oars.runfolder import UsageError
from oars.supervisor.supervise import Supervisor

MEGABYTES = 64
CLOCKS_APART = 2.0  # seconds: files would seem to be from the future
LOOK = """\
import json, os, socket, sys, time
import numpy
from mpi4py import MPI
ranks = MPI.COMM_WORLD
array, best = numpy.empty(int(sys.argv[1]) * 250_000, numpy.float32), float("inf")
for _ in range(4):
    array[:] = 1
    ranks.Barrier()
    began = time.perf_counter()
    ranks.Allreduce(MPI.IN_PLACE, array)
    best = min(best, time.perf_counter() - began)
assert array[-1] == ranks.size, array[-1]
ranks.Barrier()
gpus = "/proc/driver/nvidia/gpus"
print(json.dumps({"host": socket.gethostname(), "clock": time.time(), "seconds": best,
                  "gpus": len(os.listdir(gpus)) if os.path.isdir(gpus) else 0}))
"""


def doctor_job(where: Path, gpus: int | None = None, launcher: str = "mpirun") -> dict[str, Any]:
    """What the nodes of this job have in common; UsageError with what is wrong. ``where``: what all must see."""
    place = find(Where())
    if place is None:
        raise UsageError("this is no scheduler's job: oars doctor without --job looks at this machine")
    place = place._replace(hosts=[Host(host.name, 1) for host in place.hosts])
    names = [host.name for host in place.hosts]
    with tempfile.TemporaryDirectory(prefix=".oars-doctor-", dir=where.resolve()) as top:
        script, folder = Path(top, "look.py"), Path(top, "run")
        script.write_text(LOOK)
        folder.mkdir()
        plan = make_plan(str(script), [str(MEGABYTES)], False, len(names), place, 1, share_gpus=True, snapshot=None,
                         batch="split", stall=60.0, on_stall=None, launcher=launcher)
        if len(names) > 1:
            add_mpi(plan)
        plan.write(folder)
        code = Supervisor(folder, plan, show=False).run()
        seen = [_report(folder / runfolder.log(rank)) for rank in range(len(names))]
    silent = [name for name, node in zip(names, seen, strict=True) if node is None]
    if code or silent:
        raise UsageError(f"the nodes of this job cannot work together: {', '.join(silent) or names[0]} did not answer "
                         f"in {where.resolve()} (exit code {code}); can all nodes write there, and reach each other?")
    return {"folder": str(where.resolve()), **_judged([node for node in seen if node is not None], gpus)}


def _judged(seen: list[dict[str, Any]], gpus: int | None) -> dict[str, Any]:
    apart = max(node["clock"] for node in seen) - min(node["clock"] for node in seen)
    if apart > CLOCKS_APART:
        raise UsageError(f"the clocks of the nodes are {apart:.0f} s apart: let the site's staff know")
    few = [node["host"] for node in seen if node["gpus"] < (gpus or 0)]
    if few:
        raise UsageError(f"{few[0]} shows fewer GPUs than the {gpus} that were asked for")
    slowest = max(node["seconds"] for node in seen)
    return {"hosts": [node["host"] for node in seen], "clocks_apart_s": round(apart, 3),
            "allreduce_bytes_per_s": round(MEGABYTES * 1e6 / slowest) if len(seen) > 1 else None}


def line(found: dict[str, Any]) -> str:
    """The same for people."""
    speed = found["allreduce_bytes_per_s"]
    return (f"{len(found['hosts'])} node{'s' * (len(found['hosts']) > 1)} ({', '.join(found['hosts'])})"
            + (f", an allreduce of {MEGABYTES} MB at {speed / 1e9:.2f} GB/s" if speed else "")
            + f", clocks within {found['clocks_apart_s']:.3f} s, {found['folder']} is the same on all")


def _report(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
        return data
    except (OSError, ValueError, IndexError):
        return None


def main() -> int:
    """``oars doctor --job``."""
    print(f"{socket.gethostname()}: {line(doctor_job(Path()))}")
    return 0
