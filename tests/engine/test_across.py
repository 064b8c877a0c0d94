"""Means between hosts: exact, in the order of hosts, whatever the sizes. Each rank plays a host of its own."""

import pytest
from running import Run

SCRIPT = """
import gc
import numpy
from oars.exchange.across import Across
world = next(found for found in gc.get_objects() if type(found).__name__ == 'World')
across = Across(world, world.split(0))

def numbers(rank, size, kind):
    return numpy.random.default_rng((rank, size)).standard_normal(size).astype(kind)

def ordered(size, kind):
    total = numbers(0, size, kind) + numbers(1, size, kind)
    for rank in range(2, world.size):
        total += numbers(rank, size, kind)
    return total * (kind(1) / kind(world.size))

sizes = [1, 2, 7, 3000, 15360, 15361, 100003, 0, 2000000]
under_way = []
for size in sizes:  # several at once, and nobody waits between them
    for kind in (numpy.float32, numpy.float64):
        mine, mean = numbers(world.rank, size, kind), numpy.empty(size, kind)
        kept = mine.copy()
        across.start(mine, mean)
        across.poll()
        under_way.append((size, kind, mine, mean, kept))
sent = world.sent
while not across.poll():
    pass
for size, kind, mine, mean, kept in under_way:
    assert (mine == kept).all() and (mean == ordered(size, kind)).all(), (size, kind)
    at_once = numpy.empty(size, kind)
    across.allreduce(mine, at_once)
    assert numpy.allclose(at_once, mean, atol=1e-6), (size, kind)
nothing = across.poll() and not across.abandon()
print('exact', nothing)
"""


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_means_are_exact_and_in_order(ranks, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = Run(tmp_path, "-n", ranks, "script.py", name="r", limit=120)
    assert run.code == 0, run.err
    assert run.lines == ["exact True"]
