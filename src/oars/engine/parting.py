"""Ranks become two worlds: those that run the script, and the servers that hold its weights (``--sync server``).

Somebody may die meanwhile. What MPI then tells is not the same on all ranks, and some would wait for ever for others
that have given up. So who meets an error takes back what has been made, all agree on how it went, and who is not
through in time kills itself, and is one more death to the others. Nothing has begun: all are started again.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from oars.engine.world import RankLost, World

PATIENCE = 30.0  # seconds: to part takes milliseconds


def without(world: World, servers: list[int]) -> World:
    """The ranks that are no ``servers``, as a world; and the servers, as another. Both have lines to all."""
    if not world.survives:
        return _parts(world, servers, [])
    giving_up = threading.Timer(PATIENCE, os.kill, (os.getpid(), signal.SIGKILL))
    giving_up.daemon = True
    giving_up.start()
    made: list[Any] = [world.comm]
    part = None
    try:
        try:
            part = _parts(world, servers, made)
        except world._mpi.Exception:
            for comm in made:
                comm.Revoke()
        try:
            if world.comm.Agree(int(part is not None)) and part is not None:
                return part
        except world._mpi.Exception:
            pass
        raise RankLost
    finally:
        giving_up.cancel()


def _parts(world: World, servers: list[int], made: list[Any]) -> World:
    star = world.comm.Dup()
    made.append(star)
    if world.survives:
        star.Set_errhandler(world._mpi.ERRORS_RETURN)
    comm = world.comm.Split(int(world.origin in servers), world.rank)
    made.append(comm)
    part = World(comm, world.board, world.patient, world.survives, origin=world.origin)
    part.star, part.servers, part.hosts = star, servers, world.hosts
    part._generation = world._generation + 1  # the same board, with marks of meetings so far
    return part
