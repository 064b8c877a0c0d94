"""Ranks join a world that is going: started by its first rank, let in by all.

``Launch`` starts the new processes from a thread, while training goes on. They make a world of their own (``World``
with ``first``, the number of the first of them) and get ready. When all old ranks stand at one place and the new ones
at the same, the old call ``admit`` and the new ``join``, by a port's name that the first rank has opened: MPI connects
the two groups, which takes some milliseconds. The old ranks come first, in their order, then the new.

Nobody may die in these milliseconds: Open MPI then leaves some of the others waiting for ever (some of them notified,
some not). Who is not through in time kills itself, and is one more death to the others. ``mpirun`` needs
``--prtemca state_base_recoverable 1 --prtemca state_base_notify_errors 1``: without the first the death of a rank that
was started later takes its siblings along, without the second these are not notified of each other's deaths.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from oars.engine.world import World

PATIENCE = 10.0  # seconds: to let ranks in takes milliseconds


class Launch:
    """``count`` processes of ``command`` on their way, in the folder ``cwd``; ``trouble`` says why they are not.

    If one of them dies before MPI has started in all, MPI waits for it for ever: that costs this thread, and no more.
    """

    def __init__(self, command: list[str], count: int, cwd: str) -> None:
        self.trouble = ""
        threading.Thread(target=self._start, args=(command, count, cwd), name="oars-launch", daemon=True).start()

    def _start(self, command: list[str], count: int, cwd: str) -> None:
        from mpi4py import MPI

        try:
            info = MPI.Info.Create()
            info.Set("wdir", cwd)
            self.bridge = MPI.COMM_SELF.Spawn(command[0], command[1:], count, info)
        except MPI.Exception as error:
            self.trouble = f"MPI cannot start them ({error.Get_error_string()})"


def open_port() -> str:
    """The name of a port to meet at, for the first of the old ranks."""
    from mpi4py import MPI

    return MPI.Open_port()


def admit(world: World, port: str) -> bool:
    """For every old rank: let in those who join at ``port``; False if somebody died meanwhile, and all is as before."""
    try:
        world.comm.Agree(1)  # nobody is dead that is not known to be
    except world._mpi.Exception:
        return False
    return _meet(world, lambda: world.comm.Accept(port), high=False)


def join(world: World, port: str) -> bool:
    """For every new rank: become part of the world that lets us in at ``port``."""
    if not _meet(world, lambda: world.comm.Connect(port), high=True):
        return False
    world.waits_to_join = False
    return True


def _meet(world: World, connect: Callable[[], Any], high: bool) -> bool:
    mpi = world._mpi
    giving_up = threading.Timer(PATIENCE, os.kill, (os.getpid(), signal.SIGKILL))
    giving_up.daemon = True
    giving_up.start()
    merged: Any = None
    patient, world.patient = world.patient, True  # all must wait in the same way
    world.board.enter("join")
    try:
        try:
            across = connect()
            across.Set_errhandler(mpi.ERRORS_RETURN)
            merged = across.Merge(high)
            merged.Set_errhandler(mpi.ERRORS_RETURN)
            places = world.places(merged)
            standings = world.gather_objects(merged, world.standing())
            whole = True
        except mpi.Exception:
            if merged is not None:
                merged.Revoke()
            whole = False
        try:
            whole = merged is not None and bool(merged.Agree(int(whole)))
        except mpi.Exception:
            whole = False
    finally:
        giving_up.cancel()
        world.patient = patient
        world.board.leave(world.standing()[1])
    if whole:
        era, done = standings[0]  # the first old rank's
        world.set_ranks(merged, places)
        world.begin_era(era + 1, done)
        world.board.leave(done)
        for tell in world.on_growth:
            tell()
    return whole
