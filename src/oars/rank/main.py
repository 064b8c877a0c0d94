"""One rank: started N times by the supervisor, it runs the user's script as ``python script.py`` would.

The plan (``run.json`` in the run folder) says what to run; the environment says where the folder is. In order:
output goes to this rank's files, cores and GPU are chosen, MPI starts, its traces in the environment are removed,
adapters are installed, the script runs, and its end is written down (``exit-<r>.json``, ``error-<r>.json``): mpirun
ends all ranks when one exits with a code, so the code travels by file and the process itself ends with 0.

A rank that joins a run (``oars.adapt.torch.replay.join``) is given, as an argument, the number of the first that joins.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import io
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oars import debug, runfolder
from oars.adapt import files
from oars.adapt.replay.tape import tape
from oars.cluster import launchers
from oars.evolve import NothingToCut
from oars.hosts import links
from oars.hosts.hub import HUB
from oars.plan import Plan, available_cores, error_file, visible_gpus
from oars.rank.ends import Ends, true_exit
from oars.rank.notebook_file import is_notebook
from oars.rank.record import Record
from oars.rank.script import run_script
from oars.rank.stdin import VARIABLE as STDIN_VARIABLE
from oars.rank.stdin import share_stdin, stand_in_terminal, take_stdin, tell_terminal_size
from oars.rank.survive import Survivor

if TYPE_CHECKING:
    from types import ModuleType

    from oars.engine.world import World

BORN = time.time()


def main() -> None:
    folder = Path(os.environ["OARS_RUN_FOLDER"])
    plan = Plan.read(folder)
    many = plan.ranks > 1
    first = int(sys.argv[1]) if sys.argv[1:] else 0
    if first:
        plan.joining = joining_plan(folder, first)
    rank = first + int(_launched("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "ALPS_APP_PE")) if many else 0
    redirect_output(folder, rank, plan)
    debug.begin(folder / runfolder.debug_log(rank))
    runfolder.put(folder / runfolder.born(rank), json.dumps([socket.gethostname(), os.getpid()]))
    world: World | None = None
    if many:
        cores = available_cores()
        patient = take_share(folder, plan, rank, first, cores)
        stdin = os.environ.pop(STDIN_VARIABLE)
        world = joined = join(folder, plan, rank, first, stdin, patient)
        joined.on_growth.append(lambda: take_cores(cores, joined.local_rank, joined.local_size))
        if joined.origin in joined.servers:
            run_server(folder, plan, joined, rank)
            return
    if plan.report_bindings and not first:
        say_places(world, plan)
    hide_ranks(plan)
    if plan.stdout_tty:
        tell_terminal_size(plan.stdout_tty)
    record = Record(folder, voice=world is None or world.rank == first == 0, world=world)
    survivor = Survivor(folder, plan, world, record, stdin) if world is not None and plan.survives else None
    ends = Ends(folder, rank, record, world, folder / error_file(rank, plan), survivor)
    atexit.register(ends.last)  # first in, so it runs after the script's own
    install_adapters(folder, plan, world, record, rank)
    ends.watch()
    faulthandler.enable(open(folder / runfolder.fatal(rank), "wb", buffering=0))  # (the script may choose another file)
    copy = os.path.join(plan.stage["place"], "code") if plan.stage is not None else ""
    cells = None
    if is_notebook(plan.script, plan.module):
        from oars.rank.notebook import Notebook

        cells = Notebook(folder, plan, record, ends.refused).run
    code = run_script(plan.script, plan.args, plan.module, ends.failed, copy, cells)
    if tape.playing:
        ends.diverged("it ended before")
    ends.script_ended(code or ends.met_the_others())
    if world is None:
        sys.exit(code)


def run_server(folder: Path, plan: Plan, world: World, rank: int) -> None:
    """``--sync server``: this rank runs no script, but holds what the others train."""
    from oars.rank.serve import serve

    hide_ranks(plan)
    ends = Ends(folder, rank, Record(folder, voice=False, world=world), world, folder / error_file(rank, plan), None)
    ends.watch()
    code = 0
    try:
        serve(folder, plan, world)
    except BaseException as error:
        ends.failed(error)
        code = 1
    ends.script_ended(code)
    ends.left()
    if plan.survives:  # without MPI's own end, which may wait for the dead
        true_exit(0)


def take_share(folder: Path, plan: Plan, rank: int, first: int, cores: list[int]) -> bool:
    """Take this rank's share of its host: cores, threads, GPU. Whether there are more ranks than cores."""
    if plan.launcher == "mpirun":
        local_rank, on_host = int(_launched("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")), plan.ranks
    else:
        local_rank, on_host = launchers.local(plan, rank)
    gpus = plan.gpus
    if plan.hosts:
        if plan.launcher == "mpirun":
            on_host = int(_launched("OMPI_COMM_WORLD_LOCAL_SIZE"))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) // on_host)))
        if socket.gethostname() != plan.host:
            gpus = visible_gpus()
            if local_rank == 0:
                from oars.hosts.reach import start_deputy

                start_deputy(folder, range(rank, rank + on_host))
    keep_memory()
    if not first:  # who joins others takes its share when it has
        take_cores(cores, local_rank, on_host)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank % len(gpus)]
    return on_host > len(cores) or first > 0


def keep_memory() -> None:
    """Keep what a step has freed for the next: to give it back, and get it again page by page, costs up to 3 %."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):
        libc.mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the largest there is


def joining_plan(folder: Path, first: int) -> dict[str, Any]:
    """What ranks that join have to know; if nobody waits for them any more they end."""
    try:
        growing = json.loads((folder / runfolder.GROWING).read_text())
    except (OSError, ValueError):
        growing = {}
    if growing.get("first") != first:
        true_exit(0)
    return growing


def _launched(*names: str) -> str:
    for name in names:
        if name in os.environ:
            return os.environ[name]
    raise SystemExit(f"oars: this process was not started by a known MPI launcher: none of {', '.join(names)} is set")


def hide_ranks(plan: Plan) -> None:
    """Remove from the environment what a script could tell its rank by, once MPI has read it."""
    for name in [name for name in os.environ if launchers.RANK_VARIABLES.fullmatch(name)]:
        if name not in plan.mpi_settings:
            del os.environ[name]
    if plan.ranks > 1 and sys.version_info >= (3, 12):
        import warnings  # MPI's own threads are no news to a script that forks

        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)


def redirect_output(folder: Path, rank: int, plan: Plan) -> None:
    """This rank's stdout and stderr, its children's too, go to its files in the run folder, line by line."""
    for fd, name in ((1, runfolder.log(rank)), (2, error_file(rank, plan))):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, fd)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ends: dict[str, bytes] = {}
    sys.stdout = sys.__stdout__ = _text_to(1, sys.stdout, ends, "log")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text_to(2, sys.stderr, ends, "log" if plan.one_stream else "err")  # type: ignore[misc]


class _Log(io.FileIO):
    """A rank's log. On a full disk its lines are lost, and the training goes on: that the log is ours is our doing.
    A line of ours begins a line, whatever the script has begun (a progress bar)."""

    ends: dict[str, bytes]  # of each file, its last byte
    file: str  # this one

    def write(self, data: Any) -> int:
        try:
            if bytes(data[:6]) == b"oars: " and self.ends.get(self.file, b"\n") != b"\n":
                super().write(b"\n")
            self.ends[self.file] = bytes(data[-1:]) or self.ends.get(self.file, b"\n")
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return len(memoryview(data).cast("B"))


def _text_to(fd: int, old: Any, ends: dict[str, bytes], file: str) -> io.TextIOWrapper:
    raw = _Log(fd, "w", closefd=False)
    raw.name, raw.ends, raw.file = old.name, ends, file
    text = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, old.errors, line_buffering=True,
                            write_through=fd == 2)
    text.mode = "w"  # type: ignore[misc]
    return text


def take_cores(cores: list[int], local_rank: int, ranks: int) -> None:
    """This rank's share of the host's cores, for all its threads; all of them where there is not one for each rank."""
    if not hasattr(os, "sched_setaffinity"):
        return
    start, end = local_rank * len(cores) // ranks, (local_rank + 1) * len(cores) // ranks
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores[start:end] if len(cores) >= ranks else cores)
        except OSError:  # it has just ended
            pass


def join(folder: Path, plan: Plan, rank: int, first: int, stdin: str, patient: bool) -> World:
    """Start MPI and know all ranks; ranks that meet nobody have an mpirun of another MPI than mpi4py's."""
    if rank == 0 and socket.gethostname() == plan.host:  # no other host can be given it: there it is empty
        take_stdin(stdin)
    elif plan.stdin_tty:
        stand_in_terminal(plan.stdin_tty)
    hub = os.environ.pop(HUB, "")
    if hub and plan.survives:
        links.watch(hub)
    import mpi4py

    mpi4py.rc.finalize = not plan.survives  # after a death MPI's own end may hang; see Ends.last
    from oars.engine.board import Board
    from oars.hosts import stacks

    board = Board.open(folder / runfolder.BOARD, rank)
    stacks.answer(folder, rank, board.supervisor)
    board.enter("start")
    from mpi4py import MPI

    from oars.engine.world import RankLost, World

    try:
        world = World.over_mpi(board, patient, plan.survives, first)
        if world.size != plan.ranks and not first:
            library = MPI.Get_library_version().partition(",")[0].strip()
            starter = f"mpirun ({plan.mpi})" if plan.launcher == "mpirun" else plan.launcher
            runfolder.put(folder / runfolder.error(rank), json.dumps({
                "usage": f"{starter} and mpi4py ({library}) are of different MPIs: see oars doctor"}))
            true_exit(2)
        world.together("start", lambda: None)  # nobody goes on before all are there
        if plan.sync == "server":
            from oars.engine.parting import without
            from oars.rank.serve import chosen

            gpus = plan.gpus if socket.gethostname() == plan.host else visible_gpus()
            world = without(world, chosen(plan.servers, world.allgather(bool(gpus))))
    except (MPI.Exception, RankLost):
        if plan.survives:  # somebody died before all were there: the supervisor sees it, and starts us all again
            os.kill(os.getpid(), signal.SIGKILL)
        raise
    world.waits_to_join, world.command = first > 0, [*files.library.before_rank(plan), *launchers.rank_command()]
    board.leave(0)
    if world.origin not in world.servers:
        share_stdin(world, plan.stdin_tty is not None)
    return world


def gathered(world: World, value: object) -> list[Any]:
    """Every living rank's ``value``."""
    from oars.engine.retry import until_none_is_lost

    return until_none_is_lost(lambda: world.allgather(value), world.adopt)


def say_places(world: World | None, plan: Plan) -> None:
    """``--report-bindings``: the voice prints where each rank is, what it has, and how long the start took."""
    cores = available_cores()
    gpus = f", GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}" if plan.gpus else ""
    mine = f"on {socket.gethostname()}: core{'s' * (len(cores) > 1)} {spans(cores)}{gpus}"
    every = [(mine, BORN)] if world is None else gathered(world, (mine, BORN))
    joined = time.time()
    if world is None or world.rank == 0:
        for rank, (place, _) in zip([0] if world is None else world.members, every, strict=True):
            print(f"oars: rank {rank} {place}", file=sys.stderr)
        last = max(born for _, born in every)
        print(f"oars: started in {joined - plan.launched:.2f} s: {last - plan.launched:.2f} s until the last "
              f"rank was there, {joined - last:.2f} s until all knew each other", file=sys.stderr, flush=True)


def spans(numbers: list[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def install_adapters(folder: Path, plan: Plan, world: World | None, record: Record, rank: int) -> None:
    """Let the adapters patch what they patch; a framework's own waits until the script imports the framework."""
    from oars.adapt.python import seams
    from oars.adapt.python.imports import when_imported

    seams.install_signals(world if plan.sync == "allreduce" else None, folder, lambda: record.voice, world is None)
    seams.install_warnings()
    verified, snapshots = plan.stop_after is not None, plan.snapshot is not None
    many = world is not None
    if many or verified or snapshots:  # a script that is verified, or resumed, draws alike both times, seeded or not
        from oars.adapt.replay import rewind

        seams.install_random(world.origin if world is not None else 0, plan)
        seams.install_clock(None if plan.sync != "allreduce" else world, played=bool(plan.joining or plan.resume))
    if world is not None and not is_notebook(plan.script, plan.module):  # its figures are no windows
        seams.install_figures(world)
    if world is not None:
        seams.install_trackers(world)
    if snapshots and not many:
        from oars.adapt.replay.seams import watch_torch

        when_imported("torch", watch_torch)

    def torch_imported(torch: ModuleType) -> None:
        import oars.adapt.torch
        from oars.adapt.torch import private_names

        if line := private_names.outside(torch):
            record.notice(line)
        oars.adapt.torch.install(world, plan, record)

    def keras_imported(keras: ModuleType) -> None:
        import oars.adapt.keras

        oars.adapt.keras.install(keras, world, plan, record)

    def tensorflow_imported(tensorflow: ModuleType) -> None:
        if plan.tf1:
            import oars.adapt.tf1

            oars.adapt.tf1.install(tensorflow, world, plan, record)
        elif world is not None:
            import oars.adapt.tensorflow

            oars.adapt.tensorflow.install(tensorflow, world, plan, record)

    def jax_imported(_: ModuleType) -> None:
        import oars.adapt.jax

        if world is not None:
            oars.adapt.jax.install(world, plan, record)

    if plan.prune is not None or plan.widen:
        refuse_to_cut()
    if plan.tf1:
        from oars.adapt.tf1 import numpy_names

        when_imported("numpy", numpy_names.install)
    when_imported("torch", torch_imported)
    if many:
        when_imported("jax", jax_imported)
    when_imported("tensorflow", tensorflow_imported)
    when_imported("keras", keras_imported)
    if plan.joining:
        joining = plan.joining
        record.played = True
        rewind.begin(rank, folder, joining["files"])
        tape.begin(folder, False, joining["tape"])
        tape.strict = False
        return
    if plan.resume:
        from oars.adapt.replay.snapshot_file import read

        header = read(folder / runfolder.SNAPSHOTS / plan.resume)[0]
        record.played = True
        rewind.begin(rank, folder, header["files"])
        tape.begin(folder, record.voice, header["tape"])
        tape.strict = header["ranks"] == plan.ranks
        return
    if many or verified:  # ... and must not find what its first run wrote: then no rank's files are real
        files.install(rank, record.voice and not verified, folder / runfolder.FILES, same_for_all=(folder,))
    if snapshots:
        tape.begin(folder, record.voice)
        if record.voice:
            rewind.watch(folder)


def refuse_to_cut() -> None:
    """``--prune`` ends a run whose networks are not PyTorch's; what PyTorch's own tools import does not count."""
    from oars.adapt.python.imports import when_imported

    first: list[str] = []

    def seen(framework: ModuleType) -> None:
        first.append(framework.__name__)
        if first[0] != "torch":
            raise NothingToCut(f"--prune cuts networks of PyTorch, and this script imports {first[0]}: leave "
                               "--prune out")

    def torch_seen(torch: ModuleType) -> None:
        first.append("keras" if "keras" in sys.modules else "torch")

    when_imported("torch", torch_seen)
    for name in ("keras", "tensorflow", "jax"):
        when_imported(name, seen)


if __name__ == "__main__":
    from oars.rank.main import main as run_rank  # the one that others can import, not this copy

    run_rank()
