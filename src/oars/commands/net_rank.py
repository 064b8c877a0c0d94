"""What a rank of ``oars doctor --net`` measures; rank 0 prints it as one line of JSON.

``node``: the ranks of one node, as many as were started. Small collectives, averages by the exchange that trainings
use, and how fast each rank works while all do, against rank 0 while the others sleep: in turns, so that a machine that
changes its speed from minute to minute does so on both sides. ``pair``: messages between ranks 0 and 1.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oars import runfolder

if TYPE_CHECKING:
    from oars.engine.world import World

SIZES = (65536, 1 << 20, 1 << 23, 1 << 25)  # bytes of an average
MESSAGES = (8, 4096, 65536, 1 << 20, 1 << 24)
WINDOW, ROUNDS = 0.25, 5  # seconds of work at a time; how often all and one take turns
ENOUGH = 0.15  # seconds for one figure


def main() -> None:
    """Measure what the argument says."""
    from mpi4py import MPI

    from oars.engine.board import Board
    from oars.engine.world import World
    from oars.plan import Plan

    folder = Path(os.environ["OARS_RUN_FOLDER"])
    board = Board.open(folder / runfolder.BOARD, MPI.COMM_WORLD.rank)
    world = World.over_mpi(board, survives=Plan.read(folder).survives)
    found = {"pair": pair(world.comm)} if sys.argv[1] == "pair" else node(world)
    if world.rank == 0:
        print(json.dumps(found))


def node(world: World) -> dict[str, Any]:
    """What the ranks of one node do to each other."""
    line = np.zeros(3, np.int64)
    found: dict[str, Any] = {"ranks": world.size, "meeting": timed(lambda: world.allgather_alike(line), world, 50)}
    found["bytes"], found["seconds"] = list(SIZES), reduces(world)
    for name, make in (("speed", mixed), ("memory", passes)):
        ratios, spread = taking_turns(world, make())
        found[name] = min(1.0, statistics.median(ratios))  # nobody is faster because others work
        if name == "speed":
            found["spread"], found["speed_off"] = spread, statistics.stdev(ratios) / found[name]
    if world.size == 2:
        found["pair"] = pair(world.comm)
    return found


def timed(work: Callable[[], Any], world: World, at_once: int = 1) -> float:
    """The median of as many tries as there is time for; all ranks make equally many, rank 0 says how many."""
    work()
    began = time.perf_counter()
    work()
    tries = world.broadcast(lambda: max(3, min(200, int(ENOUGH / (time.perf_counter() - began) / at_once))))
    taken = []
    for _ in range(tries):
        began = time.perf_counter()
        for _ in range(at_once):
            work()
        taken.append((time.perf_counter() - began) / at_once)
    return statistics.median(taken)


def reduces(world: World) -> list[float]:
    """Seconds of an average, by size, as a training's exchange does it: in, agreed, averaged, out."""
    from oars.exchange.allreduce import Exchange

    exchange, line = Exchange(world), np.zeros(3, np.int64)
    exchange.reserve(SIZES[-1])
    found = []
    for size in SIZES:
        mine = np.ones(size // 4, np.float32)

        def average(mine: np.ndarray = mine, size: int = size) -> None:
            exchange.inbox[:size].view(np.float32)[:] = mine
            exchange.agree(line)
            exchange.average([(0, size // 4, np.float32)])
            mine[:] = exchange.result[:size].view(np.float32)

        found.append(timed(average, world))
    return found


def taking_turns(world: World, unit: Callable[[], None]) -> tuple[list[float], float]:
    """How fast ranks are while all work, against rank 0 alone, in each round; and how far apart they are in all."""
    unit()
    ratios, every = [], []
    for _ in range(ROUNDS):
        if world.rank:
            time.sleep(WINDOW)
        alone = world.allgather(0.0 if world.rank else rate(unit))[0]
        every.append(world.allgather(rate(unit)))
        ratios.append(statistics.mean(every[-1]) / alone)
    means = [statistics.mean(of_rank) for of_rank in zip(*every, strict=True)]
    return ratios, statistics.stdev(means) / statistics.mean(means)


def rate(unit: Callable[[], None]) -> float:
    """Units a second, over a window."""
    began, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < WINDOW:
        unit()
        done += 1
    return done / spent


def mixed() -> Callable[[], None]:
    """As layers do it: a product of matrices that fit a core's cache, and a pass over activations that do not."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.random((384, 384), np.float32) for _ in range(3))
    x, y = np.ones(1 << 20, np.float32), np.ones(1 << 20, np.float32)

    def unit() -> None:
        np.matmul(a, b, out=c)
        np.maximum(x, y, out=y)

    return unit


def passes() -> Callable[[], None]:
    """As an optimizer does it: over arrays that fit no cache."""
    x, y = np.ones(1 << 22, np.float32), np.ones(1 << 22, np.float32)

    def unit() -> None:
        np.add(x, y, out=y)

    return unit


def pair(comm: Any) -> dict[str, list[float]]:
    """Seconds of a message from rank 0 to rank 1, by size: half of there and back. The others wait."""
    found = []
    for size in MESSAGES:
        buffer, taken = np.zeros(size, np.uint8), []
        for _ in range(5 if size > 1 << 20 else 100):
            comm.Barrier()
            began = time.perf_counter()
            if comm.rank == 0:
                comm.Send(buffer, 1)
                comm.Recv(buffer, 1)
            elif comm.rank == 1:
                comm.Recv(buffer, 0)
                comm.Send(buffer, 0)
            taken.append((time.perf_counter() - began) / 2)
        found.append(statistics.median(taken))
    return {"bytes": list(MESSAGES), "seconds": found}
