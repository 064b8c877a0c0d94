"""``oars explain``: of a real run where a model is replicated, a loader is read whole and results are gathered, and
of folders that other runs would have left."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from running import oars, said

from oars.watch import explain
from oars.watch.runs import Run

SCRIPT = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    def pad(samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(512, 512) / 512)

        def forward(self, x):
            return x @ self.w + x.cumsum(0)

    torch.manual_seed(1)
    lengths = [torch.randn(1 + i % 8) for i in range(64)]
    mixes, splits, x = Mixes(), nn.Linear(8, 1), torch.randn(64, 512)
    optimizer = torch.optim.SGD([*mixes.parameters(), *splits.parameters()], 0.01)
    for _ in range(2):
        for batch in DataLoader(lengths, batch_size=8, collate_fn=pad):
            y = splits(batch)
            loss = y.square().mean() + mixes(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            y.tolist()
"""
LINES = textwrap.dedent(SCRIPT).splitlines()


def line(text: str) -> str:
    """``script.py:line`` of a line of the script."""
    number, = (i for i, words in enumerate(LINES, 1) if text in words)
    return f"script.py:{number}"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the run ``look`` on two ranks."""
    folder = tmp_path_factory.mktemp("explain")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    oars(folder, "run", "--quiet", "-n", "2", "--name", "look", "script.py", code=0)
    return folder


def test_what_was_not_split_is_named_with_its_place_and_what_to_change(place):
    shown = said(place, "explain", "look")
    assert shown.startswith("oars run -n 2 script.py\n16 of 16 steps were split: ")
    found = {found.what.partition(" (" if "(" in found.what else ":")[0]: found
             for found in explain.places(Run(place / "oars-runs/look"))}
    gathered, kept, collate, replicated = (found[name] for name in (
        "gathered for tolist", "gathered for keep", "collate_fn pad works on whole batches", "Mixes runs replicated"))
    assert gathered.at == line("y.tolist()") and "16 times" in gathered.what and "less often" in gathered.change
    assert kept.at == line("optimizer.step()") and "delete the model's results" in kept.change
    assert collate.at == line("for batch in") and collate.most and "in __getitem__" in collate.change
    assert replicated.at == line("mixes(x)") and not replicated.most and "DataLoader" in replicated.change
    for one in (gathered, kept, replicated):
        assert one.seconds is not None and one.seconds > 0
        if one.little(Run(place / "oars-runs/look")):  # on a machine that is slow to exchange
            continue
        assert f", at {one.at}\n    {one.what}\n    to change: {one.change}\n" in shown


def test_places_are_in_the_order_of_the_time_that_they_cost(place):
    seconds = [found.seconds for found in explain.places(Run(place / "oars-runs/look"))]
    assert len(seconds) >= 3 and seconds == sorted(seconds, reverse=True)


def test_the_time_of_a_step_is_divided(place):
    shown = re.search(r"^a step took [\d.]+ ms: (data .*)$", said(place, "explain", "look"), re.M)
    shares = [float(share) for share in re.findall(r"([\d.]+) %", shown[1])]
    assert len(shares) == 6 and sum(shares) == pytest.approx(100, abs=0.5)


def test_a_report_says_the_same(place):
    page = (place / said(place, "report", "look").strip()).read_text()
    assert "<h2>What was split</h2>" in page and "Mixes runs replicated" in page and line("mixes(x)") in page


def left(folder: Path, source: Path, ranks: int = 2, phases: dict | None = None, **summary: object) -> Run:
    """The folder of a run of 101 steps with these seconds in its phases, as each of its ranks would have left it."""
    shutil.copytree(source, folder)
    plan = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(plan | {"ranks": ranks}))
    (folder / "events.jsonl").unlink(missing_ok=True)
    for path in folder.glob("times-*"):
        path.unlink()
    for rank in range(ranks if phases else 0):
        (folder / f"times-{rank}.jsonl").write_text(json.dumps({"step": 101} | (phases or {})) + "\n")
    plain = {"steps": 101, "split_steps": 101, "split": True, "samples": 101 * 64, "seconds": 10.0, "gathers": [],
             "samples_per_s": 640.0, "exchange_seconds": 1.0, "replicated": []}
    (folder / "summary.json").write_text(json.dumps(plain | summary))
    return Run(folder)


@pytest.mark.parametrize(("phases", "says"), [
    ({"forward": 4, "backward": 5, "exchange": 1}, ["make 1.8 times", "make 1.82 times", "more ranks would gain"]),
    ({"forward": 1, "backward": 1, "exchange": 8}, ["make 0.4 times", "make 1.11 times", "more ranks would not gain"]),
    ({"forward": 0.1, "backward": 0.1, "exchange": 9}, ["more ranks would not gain: a rank computes 2 ms in a step"]),
    ({"forward": 1, "update": 9}, ["would make 1.05 times the samples/s of 2: more ranks would not gain"]),
])
def test_whether_more_ranks_would_gain_follows_from_the_times(place, tmp_path, phases, says):
    found = "\n".join(explain.verdict(left(tmp_path / "run", place / "oars-runs/look", phases=phases)))
    assert all(words in found for words in says), found


def test_the_batch_from_which_it_would_pay_is_where_it_does(place, tmp_path):
    """64 samples, of which a rank computes its half in 10 ms, and 100 ms of messages."""
    source = place / "oars-runs/look"
    slow = explain.verdict(left(tmp_path / "slow", source, phases={"backward": 1, "exchange": 10}))
    samples = int(re.search(r"batches of about ([\d,]+) samples \(now 64\)", slow[-1])[1].replace(",", ""))
    grown = {"backward": samples / 64, "exchange": 10}
    quick = left(tmp_path / "quick", source, phases=grown, samples=101 * samples)
    assert "more ranks would gain" in explain.verdict(quick)[-1] and "would pay" not in "".join(explain.verdict(quick))


def test_one_rank_tells_whether_its_steps_are_too_short(place, tmp_path):
    source = place / "oars-runs/look"
    short = left(tmp_path / "a/short", source, ranks=1, phases={"forward": 0.2, "backward": 0.4})
    assert explain.verdict(short)[0].startswith("more ranks would not gain: of two ranks each would compute 3 ms in a ")
    long = left(tmp_path / "b/long", source, ranks=1, phases={"forward": 2, "backward": 4})
    assert explain.verdict(long) == ["whether more ranks would gain is seen with a run on two: oars run -n 2"]


def test_runs_on_other_numbers_of_ranks_are_compared(place, tmp_path):
    source = place / "oars-runs/look"
    two = left(tmp_path / "two", source, phases={"backward": 9, "exchange": 1})
    one = left(tmp_path / "one", source, ranks=1, samples_per_s=320.0)
    assert explain.verdict(two)[0].startswith("measured: one made 320 samples/s on 1 rank")
    assert "; this run made 2.00 times as many on 2 ranks" in explain.verdict(two)[0]
    assert explain.split(one).startswith("one rank: ") and not explain.places(one)
    assert "made 0.50 times as many" in explain.verdict(one)[0]


def test_a_run_without_a_split_would_not_gain(place, tmp_path):
    run = left(tmp_path / "run", place / "oars-runs/look", split=False, split_steps=0, exchange_seconds=0.0,
               gathers=[{"site": "a.py:3 cumsum", "times": 7, "seconds": 0.5, "bytes": 3000}])
    assert explain.split(run) == "none of 101 steps was split: every rank did all of the work"
    assert explain.verdict(run)[-1] == ("more ranks would not gain: each of them would do all of the work, until what "
                                        "stands above is changed")
    assert explain.places(run)[0].cost(run) == "0.5 s, 5.0 % of the time"


def test_a_killed_run_is_explained_as_far_as_it_is_known(place, tmp_path):
    folder = tmp_path / "oars-runs/killed"
    shutil.copytree(place / "oars-runs/look", folder)
    (folder / "summary.json").unlink()
    shown = said(tmp_path, "explain", "killed")
    assert "the run has not come to its end" in shown and "Mixes runs replicated" in shown and "a step took" in shown


def test_a_run_that_is_not_there_is_one_line(place):
    assert said(place, "explain", "nosuch", code=2) == (
        "oars: no such run: neither nosuch nor oars-runs/nosuch is a run folder; oars runs lists them\n")
