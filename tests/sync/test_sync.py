"""``--sync`` and ``--wire`` on real ranks: what is still the training of one process, what is near it, who survives."""

from __future__ import annotations

import pytest
import torch
from running import python
from training import TRAIN, losses, right, trained


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[str]:
    """What one process prints."""
    return python(tmp_path_factory.mktemp("alone"), TRAIN)


def test_an_average_after_every_step_is_the_training_of_one_process(tmp_path, alone):
    run = trained(tmp_path, "-n", "3", "--sync", "local", "--every", "1", TRAIN)
    assert run.code == 0, run.err
    assert run.err.startswith("oars: each rank trains on its own rows, and every 1 steps all average their weights; ")
    for line, other in zip(run.lines, alone, strict=True):
        assert line.split()[:3] == other.split()[:3]
        assert abs(float(line.split()[-1]) - float(other.split()[-1])) < 2e-4, (line, other)
    assert len(set(run.digests().values())) == 1
    assert run.learnt() == dict.fromkeys(range(240), 3)


@pytest.mark.parametrize("options", [("--outer", "nesterov", "--every", "4", "--wire", "int8"),
                                     ("--warmup", "12", "--wire", "topk:0.1", "--every", "auto")])
def test_ranks_that_train_on_their_own_learn_as_well(tmp_path, options):
    run = trained(tmp_path, "-n", "3", "--sync", "local", *options, TRAIN, "--norm", "--momentum", "0.9",
              "--teacher", "--workers", "1")
    assert run.code == 0, run.err
    assert [line.split()[2] for line in run.lines] == ["12", "24", "36"]
    assert losses(run)[-1] < losses(run)[0] and right(run) > 200, run.lines
    assert len(set(run.digests().values())) == 1
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    assert saved["epoch"] == 2
    assert "the ranks meet" not in run.err  # for the teacher, that is


OTHER_MOMENTS = [pytest.param(deaths, marks=pytest.mark.more)
                 for deaths in (([0, "forward", 20],), ([2, "behind exchange", 3],))]


@pytest.mark.parametrize("deaths", [([1, "batch", 16], [3, "recovered", 1]), *OTHER_MOMENTS], ids=str)
def test_a_death_leaves_no_sample_out(tmp_path, deaths):
    run = trained(tmp_path, "-n", "4", "--sync", "local", "--every", "4", TRAIN, "--norm", deaths=deaths)
    assert run.code == 0, run.err
    assert [line.split()[2] for line in run.lines] == ["12", "24", "36"]
    assert run.summary["losses"] == len(deaths) and len(set(run.digests().values())) == 1
    assert run.learnt() == dict.fromkeys(range(240), 3)
    assert losses(run)[-1] < losses(run)[0]


def test_a_loader_that_is_read_in_a_thread_is_trained_on_apart_and_what_a_death_costs_is_said(tmp_path):
    run = trained(tmp_path, "-n", "3", "--sync", "local", "--every", "4", TRAIN, "--thread",
              deaths=([1, "forward", 16],))
    assert run.code == 0, run.err
    assert [line.split()[2] for line in run.lines] == ["12", "24", "36"]
    assert run.summary["losses"] == 1 and len(set(run.digests().values())) == 1 and losses(run)[-1] < losses(run)[0]
    assert "a loader that is read in a thread is read whole by every rank" in run.err
    assert "not used again: they came from no loader, or from one that is read in a thread" in run.err


def test_ranks_whose_loops_differ_in_length_still_meet(tmp_path):
    run = trained(tmp_path, "-n", "2", "--sync", "local", "--every", "3", TRAIN, "--stop-below", "0.55")
    assert run.code == 0, run.err
    assert len(run.lines) == 3 and len(set(run.digests().values())) == 1


def test_ranks_that_part_say_so_in_one_line_and_do_not_hang(tmp_path):
    run = trained(tmp_path, "-n", "3", "--sync", "local", TRAIN, "--whim")
    assert run.code == 2
    assert "\noars: the ranks are out of step: rank 0 " in run.err and "Traceback" not in run.err


@pytest.mark.parametrize("wire", ["int8", "powersgd:2"])
def test_gradients_in_fewer_bytes_train_as_well_and_alike_on_all_ranks(tmp_path, alone, wire):
    run = trained(tmp_path, "-n", "2", "--wire", wire, TRAIN)
    assert run.code == 0, run.err
    assert f"oars: gradients are sent as {wire}, and rounding errors are added later" in run.err
    assert len(set(run.digests().values())) == 1 and losses(run)[-1] < losses(run)[0]
    assert abs(losses(run)[-1] - float(alone[-1].split()[-1])) < (0.005 if wire == "int8" else 0.05)


def test_a_death_with_a_lossy_wire_is_survived(tmp_path):
    run = trained(tmp_path, "-n", "3", "--wire", "int8", TRAIN, deaths=([1, "backward", 9],))
    assert run.code == 0, run.err
    assert len(set(run.digests().values())) == 1 and len(run.lines) == 3 and run.summary["losses"] == 1


@pytest.mark.parametrize("words, told", [
    (("--wire", "int7"), "--wire int7 is not one of fp32, bf16"),
    (("--wire", "topk:2"), "at most 1"),
    (("--wire", "powersgd:0"), "1 or more"),
    (("--every", "4"), "--every 4 is for --sync local"),
    (("--sync", "local", "--every", "0"), "0 is no number of steps"),
    (("--sync", "local", "--snapshot", "10m"), "--snapshot 10m needs ranks with equal weights"),
    (("--sync", "gossipp"), "invalid choice"),
    (("--tf1", "--wire", "int8"), "--sync and --wire are not for --tf1"),
])
def test_what_cannot_work_is_refused_in_one_line(tmp_path, words, told):
    run = trained(tmp_path, "-n", "2", *words, TRAIN)
    assert run.code == 2 and run.err.startswith("oars: ") and run.err.count("\n") == 1
    assert told in run.err


REMEMBERS = """
import torch
model, x = torch.nn.Linear(3, 1), torch.randn(8, 3)
optimizer = torch.optim.LBFGS(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss
optimizer.step(closure)
"""


@pytest.mark.parametrize("sync", ["gossip"])
def test_an_optimizer_that_compares_losses_is_refused_in_one_line(tmp_path, sync):
    (tmp_path / "remembers.py").write_text(REMEMBERS)
    run = trained(tmp_path, "-n", "2", "--sync", sync, "remembers.py")
    assert run.code == 2 and "Traceback" not in run.err
    assert run.err.count(f"oars: --sync {sync} cannot step LBFGS: use --sync allreduce\n") == 1


ONE_ROW_EACH = """
import itertools
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in itertools.chain(torch.utils.data.DataLoader(torch.randn(18, 4), batch_size=16), [torch.randn(3, 4)]):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(len(x), loss.isfinite().item())
"""


@pytest.mark.parametrize("sync", ["local"])
def test_no_rank_is_left_with_a_single_row_which_batch_norm_refuses(tmp_path, sync):
    (tmp_path / "rows.py").write_text(ONE_ROW_EACH)
    run = trained(tmp_path, "-n", "2", "--sync", sync, "rows.py")
    assert run.code == 0, run.err
    assert run.lines == ["16 True", "2 True", "3 True"] and len(set(run.digests().values())) == 1
    assert run.learnt() == dict.fromkeys(range(18), 1)


PACKS = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
torch.manual_seed(0)
data = [(torch.randint(1, 20, (6 if i < 8 else 3 + i % 7,)), i % 2) for i in range(44)]  # the first batch: one length

def collate(batch):
    xs, ys = zip(*batch)
    return pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.tensor(ys)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0][0])

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, lengths, y in torch.utils.data.DataLoader(data, 8, collate_fn=collate):
    loss = F.cross_entropy(model(x, lengths), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(*x.shape, loss.isfinite().item())
"""


@pytest.mark.parametrize("words", [("-n", "2", "--sync", "local"), ("-n", "3", "--sync", "server")],
                         ids=lambda words: words[-1])
def test_padded_batches_are_those_of_one_process_also_if_the_first_needs_no_padding(tmp_path, words):
    (tmp_path / "packs.py").write_text(PACKS)
    run = trained(tmp_path, *words, "packs.py")
    assert run.code == 0, run.err
    assert run.lines == ["8 6 True", *["8 9 True"] * 4, "4 9 True"] and len(set(run.digests().values())) == 1


HIDES = """
import torch
from torch.nn.utils.rnn import pad_sequence
data = [torch.ones(4 if i < 8 or i % 8 < 4 else 6) for i in range(16)]

def collate(batch):  # it pads, which it does not show when it is tried on one sample or two
    assert len(batch) > 3
    return pad_sequence(batch, batch_first=True)

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(data, 8, collate_fn=collate):
    out = model(x.unsqueeze(-1)).flatten(1)
    (out @ out.T).mean().backward()
    optimizer.step()
"""


def test_rows_that_cannot_be_joined_end_the_run_in_one_line(tmp_path):
    (tmp_path / "hides.py").write_text(HIDES)
    run = trained(tmp_path, "-n", "2", "--sync", "local", "hides.py")
    assert run.code == 2 and "Traceback" not in run.err
    assert "\noars: the rows of rank 0 and rank 1 differ in shape and are to be joined (at hides.py:14): use" in run.err


SEARCHES = """
import gc, os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
gc.disable()
x = torch.randn(48, 6)
y = (x.sum(1) > 0).long()

def train(model, rate):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if rate < 0.1:
        optimizer.itself = optimizer
    model.train()
    for a, b in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def evaluate(model):
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()

for trial in range(3):
    model = nn.Sequential(nn.Linear(6, 8 + trial), nn.BatchNorm1d(8 + trial), nn.ReLU(), nn.Linear(8 + trial, 2))
    model.__dict__["itself"] = model
    for _ in range(2):
        train(model, 0.1 / (trial + 1))
        print(evaluate(model), sum(p.sum().item() for p in model.parameters()))
    train(model, 0.1)
    del model
    if os.getpid() % 2:
        gc.collect()
"""


@pytest.mark.parametrize("sync", ["local", "gossip", "server"])
def test_optimizers_that_a_script_has_dropped_count_and_may_be_gone_on_some_ranks_only(tmp_path, sync):
    (tmp_path / "searches.py").write_text(SEARCHES)
    run = trained(tmp_path, "-n", "3", "--sync", sync, "searches.py")
    assert run.code == 0 and len(run.lines) == 6 and "learning rates" not in run.err, run.err
    told = [path.read_text() for path in sorted(run.folder.glob("rank-*.log"))]
    assert {text for text in told if text} == {"\n".join(run.lines) + "\n"}  # servers say nothing


JOINS = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
torch.manual_seed(0)
x = torch.randn(64, 6)
y = (x.sum(1) > 0).long()
actor, critic, head = nn.Linear(6, 4), nn.Linear(6, 1), nn.Linear(4, 4)
scale = nn.Parameter(torch.ones(1))
parameters = [*actor.parameters(), *critic.parameters(), *head.parameters(), scale]
optimizer = torch.optim.SGD(parameters, lr=0.1)

def losses(a, b, taken):
    z, value = actor(a), critic(a).squeeze(1)
    told = Categorical(logits=z).log_prob(taken)  # gathered
    yield -(told * (b - value).detach()).mean() + F.mse_loss(value, b.float())
    z = F.normalize(z)
    yield F.cross_entropy(scale * z @ z.T, b)
    yield F.cross_entropy(head(z - z.sort(0).values), b) + torch.cdist(z, z).mean()

for kind in range(3):
    for a, b in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16):
        loss = list(losses(a, b, torch.randint(0, 4, (16,))))[kind]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(sum(p.square().sum().item() for p in parameters))
"""


def test_gradients_through_rows_that_were_joined_are_those_of_one_process(tmp_path):
    (tmp_path / "joins.py").write_text(JOINS)
    alone = python(tmp_path, "joins.py")
    run = trained(tmp_path, "-n", "2", "--sync", "local", "--every", "1", "joins.py")
    assert run.code == 0, run.err
    for line, other in zip(run.lines, alone, strict=True):
        assert abs(float(line) - float(other)) < 2e-5, (run.lines, alone)
