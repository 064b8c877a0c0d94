"""``--sync server`` on real ranks."""

from __future__ import annotations

import json

import pytest
import torch
from running import Run, python
from training import TRAIN, losses, right, trained

from oars.adapt.torch.async_modes.ps_shard import Coding, Holder, dumped
from oars.adapt.torch.backward.flat_buffers import laid_out
from oars.exchange.mail import head
from oars.exchange.servers import place
from oars.exchange.serving import Held, Part


def told(run: Run) -> dict[int, dict]:
    """What each rank has written of its part."""
    return {int(path.stem[5:]): json.loads(path.read_text()) for path in run.folder.glob("sync-*.json")}


@pytest.fixture(scope="module")
def adam_alone(tmp_path_factory):
    """What one process prints with Adam and a schedule, and what it saves."""
    folder = tmp_path_factory.mktemp("adam")
    return python(folder, TRAIN, "--adam"), torch.load(folder / "best.pt", weights_only=True)


def test_servers_for_whom_all_wait_step_as_one_process_does(tmp_path, adam_alone):
    """Its optimizer, its schedule and the state that it saves included."""
    run = trained(tmp_path, "-n", "4", "--sync", "server", "--servers", "2", TRAIN,
              "--adam")
    assert run.code == 0, run.err
    assert run.err.startswith("oars: 2 ranks train on own rows, at every step, and 2 hold the weights; ")
    lines, saved = adam_alone
    for line, other in zip(run.lines, lines, strict=True):
        assert line.split()[:3] == other.split()[:3]
        assert abs(float(line.split()[-1]) - float(other.split()[-1])) < 2e-4, (line, other)
    assert len(set(run.digests().values())) == 1 and run.learnt() == dict.fromkeys(range(240), 3)
    own = torch.load(tmp_path / "best.pt", weights_only=True)["optimizer"]
    for i, state in saved["optimizer"]["state"].items():
        assert own["state"][i]["step"] == state["step"] == 36
        assert torch.allclose(own["state"][i]["exp_avg"], state["exp_avg"], atol=1e-4)
    assert own["param_groups"][0]["lr"] == saved["optimizer"]["param_groups"][0]["lr"]
    workers = [facts for facts in told(run).values() if facts["role"] == "worker"]
    assert len(workers) == 2 and all(w["pushes"] == 36 and w["staleness_max"] == 0 for w in workers)
    servers = [facts for facts in told(run).values() if facts["role"] == "server"]
    assert [s["steps"] for s in servers] == [36] * len(servers) and all(s["pushes"] == 72 for s in servers)


def test_workers_that_do_not_wait_learn_as_well_and_are_bound(tmp_path):
    run = trained(tmp_path, "-n", "4", "--sync", "server", "--staleness", "4", "--wire", "int8", TRAIN,
              "--norm", "--momentum", "0.5", "--teacher", "--workers", "1")
    assert run.code == 0, run.err
    assert "at most 4 steps apart, and 1 holds the weights (gradients are sent as int8" in run.err
    assert [line.split()[2] for line in run.lines] == ["12", "24", "36"]
    assert losses(run)[-1] < losses(run)[0] and right(run) > 180, run.lines
    assert len(set(run.digests().values())) == 1 and run.learnt() == dict.fromkeys(range(240), 3)
    facts = told(run)
    assert all(facts[r]["staleness_max"] <= 8 for r in range(3)) and facts[3]["steps"] == 36
    assert facts[1]["sent_bytes"] < facts[1]["received_bytes"] / 2  # gradients are coded, weights are not
    assert run.summary["sent_bytes"] >= facts[0]["sent_bytes"] > 0


def test_a_step_does_not_wait_for_a_slow_worker_where_there_is_a_backup(tmp_path):
    run = trained(tmp_path, "-n", "4", "--sync", "server", "--backup", "1", TRAIN,
              "--epochs", "2", OARS_TEST_SLOW=json.dumps([1, "forward", 0.06]))
    assert run.code == 0, run.err
    assert "at every step, less the slowest 1, and 1 holds the weights" in run.err
    assert [line.split()[2] for line in run.lines] == ["12", "24"] and losses(run)[-1] < losses(run)[0]
    facts = told(run)
    left_out = [facts[worker]["left_out"] for worker in range(3)]
    assert 24 <= facts[3]["steps"] < 30, facts[3]  # the slow worker makes none of its own
    assert left_out[1] > 8 > left_out[0] + left_out[2], left_out
    assert len(set(run.digests().values())) == 1


@pytest.mark.parametrize("deaths, options", [
    (([0, "forward", 20],), ()),
    (([1, "batch", 20], [2, "behind push", 17]), ("--servers", "2", "--staleness", "4", "--placement", "round-robin")),
], ids=str)
def test_deaths_of_workers_and_servers_leave_no_sample_out(tmp_path, deaths, options):
    run = trained(tmp_path, "-n", "4", "--sync", "server", *options, TRAIN, "--norm", deaths=deaths)
    assert run.code == 0, run.err
    assert [line.split()[2] for line in run.lines] == ["12", "24", "36"]
    assert run.summary["losses"] == len(deaths) and len(set(run.digests().values())) == 1
    assert run.learnt() == dict.fromkeys(range(240), 3)
    assert losses(run)[-1] < losses(run)[0]


@pytest.mark.parametrize("rank, point, count", [
    (0, "parting", 1), (3, "parting", 1), (1, "places", 2), (3, "places", 2), (0, "parted", 1), (3, "parted", 1)])
def test_a_death_while_workers_and_servers_part_costs_nothing(tmp_path, rank, point, count):
    run = trained(tmp_path, "-n", "4", "--sync", "server", "--servers", "2", TRAIN, "--epochs", "1",
                  deaths=([rank, point, count],))
    assert run.code == 0 and (run.folder / f".died-{rank}").exists(), run.err
    assert [line.split()[2] for line in run.lines] == ["12"] and len(set(run.digests().values())) == 1
    assert run.learnt() == dict.fromkeys(range(240), 1)


def test_the_only_server_is_missed_in_one_line(tmp_path):
    run = trained(tmp_path, "-n", "3", "--sync", "server", TRAIN, deaths=([2, "push", 30],))
    assert run.code == 1 and "Traceback" not in run.err
    assert ("\noars: a server died, and no other server has a copy of its data: the run ends "
            "(with --servers 2") in run.err


OPTIMIZER = """
import torch
class Mine(torch.optim.SGD):
    pass
model = torch.nn.Linear(3, 1)
optimizer = Mine(model.parameters(), lr=0.1)
model(torch.randn(8, 3)).sum().backward()
optimizer.step()
"""


def test_an_optimizer_that_servers_cannot_import_is_refused_in_one_line(tmp_path):
    (tmp_path / "own.py").write_text(OPTIMIZER)
    run = trained(tmp_path, "-n", "2", "--sync", "server", "own.py")
    assert run.code == 2 and "Traceback" not in run.err
    assert "oars: --sync server: the servers cannot make this script's optimizer: " in run.err and "Mine" in run.err


CLIPS = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)
"""


def test_a_script_that_changes_weights_itself_is_stopped_with_one_line(tmp_path):
    (tmp_path / "clips.py").write_text(CLIPS)
    run = trained(tmp_path, "-n", "2", "--sync", "server", "clips.py")
    assert run.code == 1 and "Traceback" not in run.err
    assert "oars: --sync server: this script changes weights itself after step(), or by two optimizers" in run.err


@pytest.mark.parametrize("words, line", [
    (("--sync", "server", "--servers", "2"), "--servers 2 leaves none of 2 ranks to train: use -n 3 or more"),
    (("--sync", "server", "--staleness", "-1"), "-1 is no number: 0 or more"),
    (("--sync", "server", "--wire", "powersgd:2"), "use fp32, bf16, fp16, int8 or topk"),
    (("--sync", "server", "--backup", "1", "--staleness", "2"), "use --staleness 0"),
    (("--sync", "server", "--backup", "1"), "leaves out the gradients of all 1"),
    (("--servers", "1"), "--servers 1 is for --sync server"),
])
def test_what_servers_cannot_do_is_refused_in_one_line(tmp_path, words, line):
    run = trained(tmp_path, "-n", "2", *words, TRAIN)
    assert run.code == 2 and run.err.startswith("oars: ") and run.err.count("\n") == 1 and line in run.err


# ---- one part, without ranks ---------------------------------------------------------------------------------------


def a_part(bound: int, backup: int = 0) -> tuple[Part, Coding]:
    """A part of two weights that SGD steps by 1."""
    weights = [torch.zeros(2)]
    data = dumped({"class": torch.optim.SGD, "defaults": torch.optim.SGD([torch.zeros(1)], lr=1.0).defaults,
                   "settings": [{k: v for k, v in torch.optim.SGD([torch.zeros(1)], lr=1.0).param_groups[0].items()
                                 if k != "params"}], "members": [[0]], "state": {}, "weights": weights})
    return Part((1, 0), Holder(data.tobytes(), "fp32"), bound, backup, -1, 0), Coding(laid_out(weights), 1, "fp32")


def push(part: Part, coding: Coding, worker: int, clock: int, value: float, share: float = 1 / 3) -> int:
    said = head(1, clock=clock, share=share, version=part.version)[0]
    return part.push(worker, said, coding.encode([torch.full((2,), value)]))


def weight(part: Part) -> float:
    return float(part.holder.weights().view("f4")[0])


def test_a_step_is_made_of_as_many_rows_as_a_batch_has_whoever_brings_them():
    part, coding = a_part(bound=3)
    everybody = {0, 1, 2}
    for worker, clock in ((0, 1), (0, 2)):
        push(part, coding, worker, clock, 3.0)
        assert not part.due(everybody)
    push(part, coding, 1, 1, 6.0)
    assert part.due(everybody)
    part.turn()
    assert part.version == 1 and abs(weight(part) + 4.0) < 1e-6  # the mean of 3, 3 and 6
    assert part.may_go_on(Held(0, 3, 0, 0.0), everybody)  # the slowest has 3 to catch up
    assert not part.may_go_on(Held(0, 4, 0, 0.0), everybody)
    assert part.may_go_on(Held(0, 4, 0, 0.0), {0})  # the others are away


def test_the_slowest_gradients_of_a_step_are_left_out():
    part, coding = a_part(bound=0, backup=1)
    everybody = {0, 1, 2}
    push(part, coding, 0, 1, 1.0)
    assert not part.due(everybody) and not part.may_go_on(Held(0, 1, 0, 0.0), everybody)
    push(part, coding, 2, 1, 3.0)
    assert part.due(everybody)
    part.turn()
    assert abs(weight(part) + 2.0) < 1e-6 and part.may_go_on(Held(0, 1, 0, 0.0), everybody)
    assert push(part, coding, 1, 1, 100.0) == -1  # too late
    assert part.may_go_on(Held(1, 1, 0, 0.0), everybody) and not part.due(everybody)
    assert abs(weight(part) + 2.0) < 1e-6


def test_a_push_that_is_sent_again_counts_once():
    part, coding = a_part(bound=2)
    for _ in range(2):
        push(part, coding, 0, 1, 5.0, share=0.5)
    assert not part.due({0, 1})
    push(part, coding, 1, 1, 7.0, share=0.5)
    part.turn()
    assert abs(weight(part) + 6.0) < 1e-6


@pytest.mark.parametrize("how", ["round-robin", "balanced"])
def test_tensors_are_dealt_out_whole_or_in_pieces_and_none_is_missing(how):
    sizes = [10, 1000, 0, 7, 300, 1]
    for servers in (1, 2, 3, 5):
        dealt = place(sizes, servers, how, cut=True)
        assert len(dealt) == servers
        found = sorted((p.tensor, i) for pieces in dealt for p in pieces for i in range(p.start, p.stop))
        assert found == [(t, i) for t, size in enumerate(sizes) for i in range(size)]
        loads = [sum(p.stop - p.start for p in pieces) for pieces in dealt]
        assert how == "round-robin" or max(loads) - min(loads) <= 1
    whole = place(sizes, 3, how, cut=False)
    assert [len(pieces) for pieces in whole] == [6, 0, 0]
