"""Collectives end alike everywhere: done on every survivor, or RankLost on every survivor, whenever ranks die."""

import random

import pytest
from running import Run

SCRIPT = """
import gc
import numpy
from oars.engine.world import RankLost
world = next(found for found in gc.get_objects() if type(found).__name__ == 'World')

def collective(i):
    if i % 5 == 0:
        return world.allgather((i, world.origin))
    if i % 5 == 1:  # large: its result is not kept for others
        rows = numpy.full((2, 20000), world.origin, dtype=numpy.float32)
        whole = numpy.empty((2 * world.size, 20000), numpy.float32)
        world.allgather_rows(rows, [2] * world.size, whole)
        return whole[:, -1].tolist()
    if i % 5 == 2:
        return world.allgather_alike(numpy.array([i, world.origin])).tolist()
    if i % 5 == 3:
        done = []
        world.together('together', lambda: done.append(i))
        return done
    return world.allreduce(numpy.full(3, 1.0 + i)).tolist()

for i in range(100):
    while True:
        try:
            print(i, collective(i))
            break
        except RankLost:
            print(i, 'lost, left:', world.members)
            world.adopt()
    if i % 9 == 0:
        print(i, world.broadcast(lambda: i * i))
"""


@pytest.mark.parametrize("seed", range(6))
def test_every_survivor_sees_the_same(seed, tmp_path):
    draw = random.Random(seed)
    ranks = draw.randint(3, 5)
    deaths = []
    for rank in draw.sample(range(ranks), draw.randint(1, ranks - 1)):
        kind = draw.choice(["allgather", "gather", "together", "allreduce", "broadcast"])
        deaths.append([rank, draw.choice(["in", "behind"]) + " " + kind, draw.randint(1, 9)])
    (tmp_path / "script.py").write_text(SCRIPT)
    run = Run(tmp_path, "-n", ranks, "script.py", name="r", limit=60, deaths=deaths)
    assert run.code == 0, (deaths, run.err)
    assert f"{len(deaths)} death" in run.err
    logs = {r: (run.folder / f"rank-{r}.log").read_text().splitlines() for r in range(ranks)}
    dead = {rank for rank, _, _ in deaths}
    survivors = [logs[r] for r in range(ranks) if r not in dead]
    assert all(log == survivors[0] for log in survivors), deaths
    assert sum("lost" in line for line in survivors[0]) >= 1 and survivors[0][-1].startswith("99 ")
    assert run.lines == survivors[0]  # the voice's, whoever was it when
    for rank in dead:  # up to its death a rank saw what the survivors saw
        assert logs[rank] == survivors[0][: len(logs[rank])]
