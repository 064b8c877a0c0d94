"""``--sync gossip`` on real ranks."""

from __future__ import annotations

import json

import pytest
import torch
from running import oars, python
from training import TRAIN, losses, right, trained

TALK = """
import gc, random, time
import numpy
from oars.exchange.gossip import Gossip
world = next(found for found in gc.get_objects() if type(found).__name__ == 'World')
gossip = Gossip(world, 1, True, 5)
x = numpy.random.Generator(numpy.random.PCG64(world.rank)).normal(size=50)
before = numpy.mean(world.allgather(x), 0)
for step in range(60):
    time.sleep(0.003 * ((step + world.rank) % world.size))
    x += 1 + world.rank  # a step of its own, which differs from the others'
    if not gossip.idle():
        heard = gossip.heard()
        if heard is not None:
            x += (heard.view(float) - gossip.sent.view(float)) / 2
    if gossip.idle():
        gossip.room(400)[:] = x.view(numpy.uint8)
        gossip.begin()
last = max(world.allgather(gossip.round)) + 4  # on a busy machine they may not have heard of each other for long
while not gossip.idle() or gossip.round < last:
    if gossip.idle():
        gossip.room(400)[:] = x.view(numpy.uint8)
        gossip.begin()
    x += (gossip.heard(wait=True).view(float) - gossip.sent.view(float)) / 2
every = numpy.array(world.allgather(x))
moved = every.mean(0) - before
print(gossip.round > 10, abs(moved - 60 * (world.size + 1) / 2).max() < 1e-9, numpy.ptp(every, 0).max() < 20)
"""


def test_the_mean_moves_by_the_mean_of_the_steps_and_ranks_stay_near_it(tmp_path):
    """Without gossip, ranks would be 180 apart after 60 steps."""
    (tmp_path / "talk.py").write_text(TALK)
    done = oars(tmp_path, "run", "-n", 4, "talk.py")
    assert done.stdout == "True True True\n", done.stdout + done.stderr


# A loss that is linear in the weights: gradients do not depend on them, so all ways to keep together should end alike.
LINEAR = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
x = torch.randn(600, 6) + torch.arange(-3, 3)
model = torch.nn.Linear(6, 1, bias=False)
start = model.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for epoch in range(2):
    for rows, in DataLoader(TensorDataset(x), batch_size=20, shuffle=True):
        optimizer.zero_grad()
        model(rows).mean().backward()
        optimizer.step()
torch.save(model.state_dict()["weight"] - start, "moved.pt")
"""


def test_the_mean_moves_as_far_as_one_process_with_momentum_too(tmp_path):
    (tmp_path / "linear.py").write_text(LINEAR)
    python(tmp_path, "linear.py")
    alone = torch.load(tmp_path / "moved.pt")
    run = trained(tmp_path, "-n", "3", "--sync", "gossip", "linear.py")
    assert run.code == 0, run.err
    assert (torch.load(tmp_path / "moved.pt") - alone).norm() < 0.03 * alone.norm()


def test_ranks_that_gossip_learn_as_well(tmp_path):
    run = trained(tmp_path, "-n", "3", "--sync", "gossip", "--rotate", "--wire", "bf16", TRAIN, "--norm",
              "--momentum", "0.9", "--teacher", "--epochs", "4")
    assert run.code == 0, run.err
    assert run.err.startswith("oars: each rank trains on its own rows, and after every step averages with one other")
    assert [line.split()[2] for line in run.lines] == ["12", "24", "36", "48"]
    # Rows are dealt by speed, so each run is another: after three epochs 198 to 228 are right, after four 228 to 237.
    assert losses(run)[-1] < losses(run)[0] and right(run) > 200, run.lines
    assert len(set(run.digests().values())) == 1 and run.learnt() == dict.fromkeys(range(240), 4)
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    distances = [event["distance"] for event in events if event["event"] == "consensus"]
    assert len(distances) == 4 and all(0 < d < 1 for d in distances)


def test_deaths_among_gossips_leave_no_sample_out(tmp_path):
    deaths = [0, "forward", 20], [3, "optimizer", 20]
    run = trained(tmp_path, "-n", "4", "--sync", "gossip", TRAIN, "--norm", deaths=deaths)
    assert run.code == 0, run.err
    assert [line.split()[2] for line in run.lines] == ["12", "24", "36"]
    assert run.summary["losses"] == len(deaths) and len(set(run.digests().values())) == 1
    assert run.learnt() == dict.fromkeys(range(240), 3)


# Every sample takes its time to read; who reads how many is told at the end.
READS = """
import ctypes, time, torch
from torch.utils.data import DataLoader, TensorDataset
read = ctypes.c_long()  # where nobody looks: a data set that remembers what it has read is read whole
class Slow(TensorDataset):
    def __getitem__(self, i):
        time.sleep(0.007)
        read.value += 1
        return super().__getitem__(i)
torch.manual_seed(3)
data = Slow(torch.randn(720, 6))
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for rows, in DataLoader(data, batch_size=30):
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
print(read.value)
"""


def test_a_slow_rank_is_given_fewer_rows_within_its_first_epoch_and_none_is_left_out(tmp_path):
    (tmp_path / "reads.py").write_text(READS)
    run = trained(tmp_path, "-n", "3", "--sync", "gossip", "reads.py", OARS_TEST_SLOW=json.dumps([2, "batch", 0.1]))
    assert run.code == 0, run.err
    *fast, slow = (int((run.folder / f"rank-{r}.log").read_text()) for r in range(3))
    assert sum(fast) + slow == 720 and slow < 0.7 * min(fast), (fast, slow)
    assert run.learnt() == dict.fromkeys(range(720), 1) and len(set(run.digests().values())) == 1


@pytest.mark.parametrize("words, told", [
    (("--sync", "gossip", "--wire", "topk:0.1"), "use fp32, bf16, fp16 or int8"),
    (("--sync", "gossip", "--every", "3"), "--every 3 is for --sync local"),
    (("--sync", "local", "--rotate"), "--rotate is for --sync gossip"),
])
def test_what_gossip_cannot_do_is_refused_in_one_line(tmp_path, words, told):
    run = trained(tmp_path, "-n", "2", *words, TRAIN)
    assert run.code == 2 and run.err.startswith("oars: ") and run.err.count("\n") == 1 and told in run.err
