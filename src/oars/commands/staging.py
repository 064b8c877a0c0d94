"""``--stage-env``: copies a plan's environment to its hosts before the ranks start (``oars.supervisor.stage``)."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from oars import runfolder
from oars.cluster.host_list import Host
from oars.cluster.place import Place
from oars.commands.planning import add_mpi, make_plan
from oars.plan import Plan
from oars.runfolder import UsageError
from oars.supervisor import stage as copies
from oars.supervisor.supervise import Supervisor

MOST_FILES = 20_000  # beside the script


def stage(folder: Path, plan: Plan) -> None:
    """Bring the environment of a plan to its hosts, and say in the plan where it is."""
    place = os.path.join(tempfile.gettempdir(), f"oars-stage-{os.urandom(4).hex()}")
    code = os.path.dirname(os.path.realpath(plan.script)) if not plan.module else plan.cwd
    roots = {"env": sys.prefix, "code": code, **_more()}
    _count(code)
    began = time.monotonic()
    if plan.hosts:
        size = _broadcast(folder, plan, place, roots)
    else:
        with tempfile.TemporaryFile() as file:
            size = copies.pack(file, roots)
            file.seek(0)
            copies.unpack(file, place)
    plan.stage = {"place": place, "roots": roots, "bytes": size, "seconds": round(time.monotonic() - began, 2)}


def _more() -> dict[str, str]:
    """The Python below a venv, unless it is the system's, which every host has; and oars, if it is elsewhere."""
    found = {}
    if sys.base_prefix != sys.prefix and not sys.base_prefix.startswith("/usr"):
        found["base"] = sys.base_prefix
    source = str(Path(__file__).resolve().parents[2])
    if not Path(source).is_relative_to(sys.prefix):
        found["oars"] = source
    return found


def _count(code: str) -> None:
    many = 0
    for _, folders, files in os.walk(code):
        folders[:] = [name for name in folders if copies.wanted(name)]
        many += len(files)
        if many > MOST_FILES:
            raise UsageError(f"--stage-env: there are more than {MOST_FILES} files in {code}: put the script in a "
                             "folder of its own")


def _broadcast(folder: Path, plan: Plan, place: str, roots: dict[str, str]) -> int:
    """One process on each host; how many bytes they were sent."""
    each = 1 if len(plan.hosts) > 1 else 2  # one process alone would run here
    where = Place([Host(name, each) for name, _ in plan.hosts], plan.reach, "--stage-env", True)
    words = ["send", place, *(f"{name}={path}" for name, path in roots.items())]
    script = str(Path(copies.__file__).resolve())
    own = make_plan(script, words, False, None, where, each, share_gpus=True, snapshot=None,
                    batch="split", stall=60.0, on_stall=None, launcher=plan.launcher)
    add_mpi(own)
    inner = folder / runfolder.STAGE
    inner.mkdir()
    own.write(inner)
    code = Supervisor(inner, own, show=False).run()
    try:
        size = int((inner / runfolder.log(0)).read_text())
    except (OSError, ValueError):
        code, size = code or 1, 0
    if code:
        raise UsageError(f"--stage-env: the environment could not be brought to all hosts (exit code {code}): see "
                         f"{inner}/rank-*.err; is there room in {place}?")
    shutil.rmtree(inner)
    return size


def line(plan: Plan) -> str:
    """What was done, for people."""
    assert plan.stage is not None
    staged, hosts = plan.stage, len(plan.hosts) or 1
    return (f"brought {staged['bytes'] / 1e6:.0f} MB to {hosts} host{'s' * (hosts > 1)} in {staged['seconds']:.1f} s: "
            f"ranks start from {staged['place']}")
