"""``oars run --prune`` on real ranks: the same training on any number of them, files in the script's own shapes, and
runs that go on through deaths and snapshots."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from cuts import unlike, wrong_with
from running import Run, oars, python, said, start, wait_for
from torch import nn

from oars.evolve import fit

SCRIPTS = Path(__file__).parent / "scripts"
MLP = SCRIPTS / "mlp.py"


class Net(nn.Module):
    """That of the script."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(21, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 32),
                                  nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The script on one rank."""
    run = Run(tmp_path_factory.mktemp("one"), "-n", "1", "--prune", "1/3", MLP, OARS_DIGEST="1")
    assert run.code == 0, run
    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The script on two ranks."""
    run = Run(tmp_path_factory.mktemp("two"), "-n", "2", "--prune", "1/3", MLP, OARS_DIGEST="1")
    assert run.code == 0, run
    return run


def same(one: Run, many: Run) -> None:
    assert not unlike(many.lines, one.lines)
    cuts, theirs = ({event["cut"]: (event["step"], event["widths"]) for event in run.events("cut")}
                    for run in (one, many))  # who becomes the voice tells of the cuts once more
    assert theirs == cuts
    second = cuts[2][0]
    assert losses(many.folder)[:second] == pytest.approx(losses(one.folder)[:second], rel=1e-5)
    assert len(set(many.digests().values())) == 1


def test_networks_are_cut_alike_on_one_rank_and_on_two(one, two):
    same(one, two)
    assert [event["cut"] for event in one.events("cut")] == list(range(1, 9))
    assert one.lines[-1] == "657 657"  # widths 16 and 16; the averaged copy has them too
    line = next(line for line in two.err.splitlines() if "cuts" in line)
    assert line.startswith("oars: 8 cuts, 2,705 \N{RIGHTWARDS ARROW} 657 parameters, step ")


@pytest.mark.more
def test_networks_are_cut_alike_on_three_ranks(one, tmp_path):
    same(one, Run(tmp_path, "-n", "3", "--prune", "1/3", MLP, OARS_DIGEST="1"))


def test_files_have_the_scripts_own_shapes_and_the_small_network_gives_the_same(two):
    held, small = torch.load(two.cwd / "last.pt"), torch.load(two.folder / "small.pt")
    full = Net()
    full.load_state_dict(held["model"])
    optimizer = torch.optim.Adam(full.parameters())
    optimizer.load_state_dict(held["optimizer"])
    x = torch.randn(40, 21)
    full(x).mean().backward()
    optimizer.step()
    assert all(value.shape == p.shape for p in full.parameters()
               for value in optimizer.state[p].values() if value.dim())
    full.load_state_dict(held["model"])
    for state in (small, small["state"]):
        fitted = fit(Net(), state).eval()
        assert [p.shape[0] for p in fitted.parameters()][:3] == [16, 16, 16]
        assert fitted.body[0].out_features == fitted.body[1].num_features == fitted.body[3].in_features == 16
        assert torch.allclose(fitted(x), full.eval()(x), atol=1e-6)
    Net().load_state_dict(held["average"])


def test_a_script_goes_on_from_its_own_older_checkpoint(two, tmp_path):
    shutil.copy(two.cwd / "last.pt", tmp_path / "old.pt")
    plain = python(tmp_path, MLP, EPOCHS="1")
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "old.pt", tmp_path / "again")
    run = Run(tmp_path / "again", "-n", "2", "--prune", "1/3", "--prune-when", "1..4passes", MLP, EPOCHS="1")
    assert run.code == 0, run
    assert not unlike(run.lines[:1], plain[:1])


def test_a_killed_run_goes_on_before_between_and_after_cuts(two, tmp_path):
    run = tmp_path / "oars-runs" / "r"
    shutil.copy(MLP, tmp_path)
    process = start(tmp_path, "run", "-n", "2", "--name", "r", "--prune", "1/3", "--snapshot", "5steps", "mlp.py",
                    SLOW="0.03")
    taken = []

    def keep_some() -> bool:
        """A copy of the run folder with its newest snapshot, before the first cut, between two, and after the last."""
        newest = max((int(path.stem) for path in run.glob("snapshots/*.snap")), default=0)
        for place, (first, last) in enumerate(((1, 7), (14, 30), (50, 60))):
            if first <= newest <= last and len(taken) == place:
                for _ in range(3):
                    try:
                        shutil.copytree(run, tmp_path / f"kept-{place}")
                        taken.append(newest)
                        break
                    except shutil.Error:  # a file came or went meanwhile
                        shutil.rmtree(tmp_path / f"kept-{place}")
        return len(taken) == 3

    wait_for(keep_some, "three snapshots", 100)
    for pid in run.glob("pid-*"):
        os.kill(int(pid.read_text()), signal.SIGKILL)
    process.communicate(timeout=60)
    for place, ranks in ((0, 2), (1, 2), (2, 1)):
        shutil.rmtree(run)
        shutil.copytree(tmp_path / f"kept-{place}", run)
        for left in [*run.glob("pid-*"), *run.glob("born-*")]:
            left.unlink()
        done = oars(tmp_path, "resume", "r", "-n", ranks)
        assert done.returncode == 0, done.stderr
        assert losses(run) == pytest.approx(losses(two.folder), rel=1e-5)
        if ranks == 2:
            assert losses(run) == losses(two.folder)
        assert done.stdout.splitlines()[-1] == "657 657"


def test_a_rank_joins_between_cuts_and_another_dies_behind_them(one, tmp_path):
    shutil.copy(MLP, tmp_path)
    run = Run(tmp_path, "-n", "2", "--prune", "1/3", "mlp.py", SLOW="0.3", OARS_DIGEST="1")
    wait_for(lambda: len(run.events("cut")) >= 2, "two cuts", 60)
    grown = said(tmp_path, "grow", "it", "-n", "+1")
    assert grown.startswith("it runs on 3 ranks from step ")
    assert len(run.events("cut")) < 8, "it joined too late to see a cut"
    wait_for(lambda: len(run.events("cut")) == 8, "all cuts", 60)
    run.kill(0)
    assert run.code == 0, run
    same(one, run)


@pytest.mark.parametrize("seed", [2, 13])
def test_a_death_around_a_cut_changes_nothing(seed, tmp_path):
    assert not wrong_with(seed, tmp_path)


KINDS = ("gan", "accumulated", "ema", "state", "hooked")


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.more) for kind in (
    "sgd", "scaled", "frozen", "compiled"))])
def test_what_else_a_script_has_is_cut_along(kind, tmp_path):
    runs = [Run(tmp_path / f"on-{ranks}", "-n", ranks, "--prune", "1/3", "--prune-when", "3..12steps",
                SCRIPTS / "kinds.py", kind, OARS_DIGEST="1") for ranks in (1, 2)]
    assert all(run.code == 0 for run in runs), [str(run) for run in runs]
    one, two = runs
    assert not unlike(two.lines, one.lines)
    assert one.lines[-1] == "True" and len(one.events("cut")) >= 4
    assert len(set(two.digests().values())) == 1
    full = python(tmp_path, SCRIPTS / "kinds.py", kind)
    assert int(one.lines[2].split()[0]) < 0.7 * int(full[2].split()[0])


BAD = {
    ("--prune", "2"): "--prune 2 is no part of a layer's units: use a fraction between 0 and 1, as in 1/3",
    ("--prune", "half"): "--prune half is no part of a layer's units: use a fraction between 0 and 1, as in 1/3",
    ("--prune", "1/3", "--prune-when", "3..1passes"):
        "--prune-when 3..1passes is no time of cuts: use 0.5..3passes or 200..2000steps",
    ("--prune-when", "1..3passes"):
        "--prune-when 1..3passes is for --prune, which says how much of each layer is kept: --prune 1/3",
    ("--prune", "1/3", "-n", "2", "--sync", "local"): "--prune needs ranks with equal weights: leave out --sync local",
    ("--prune", "1/3", "-n", "2", "--wire", "int8"):
        "--prune changes the shapes for which --wire int8 keeps what is not sent yet: leave it out",
    ("--prune", "1/3", "--tf1"): "--prune changes networks of PyTorch: leave out --tf1",
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_be_is_one_line(words, tmp_path):
    assert said(tmp_path, "run", *words, SCRIPTS / "plain.py", code=2) == f"oars: {BAD[words]}\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_of_which_nothing_can_be_cut_ends_at_its_first_step(ranks, tmp_path):
    assert said(tmp_path, "run", "-n", ranks, "--prune", "1/3", SCRIPTS / "plain.py", code=2) == (
        "oars: --prune: no layer of this script can be cut (Linear: it has only 2 units); leave --prune out\n")


def test_other_frameworks_are_refused(tmp_path):
    (tmp_path / "of_jax.py").write_text("import jax\n")
    assert said(tmp_path, "run", "-n", "1", "--prune", "1/3", "of_jax.py", code=2) == (
        "oars: --prune cuts networks of PyTorch, and this script imports jax: leave --prune out\n")


def test_verify_names_the_layers_that_can_be_cut(tmp_path):
    out = said(tmp_path, "verify", "-n", "2", "--steps", "16", "--prune", "1/3", MLP)
    lines = out.splitlines()
    assert lines[:2] == ["oars: --prune can cut 2 of 3 layers: Net.body.0, Net.body.3",
                         "oars:   Net.head is left alone: it has only 1 units"]
    assert lines[2].startswith("oars: same training on 1 and 2 ranks: over 16 steps")


def test_the_learning_rate_and_the_loss_hold_cuts_back(tmp_path):
    late = Run(tmp_path / "late", "-n", "1", "--prune", "1/3", "--prune-when", "40..60steps", MLP, EPOCHS="14")
    assert late.code == 0, late
    assert len(late.events("cut")) == 8
    over = Run(tmp_path / "over", "-n", "1", "--prune", "1/3", "--prune-when", "140..200steps", MLP, EPOCHS="14")
    assert over.code == 0, over
    assert len(over.events("cut")) < 4 and "the learning rate is below 30% of its peak" in over.err


def test_layers_become_wider_at_once_and_are_cut_again(tmp_path):
    one, two = (Run(tmp_path / f"on-{ranks}", "-n", ranks, "--widen", "body.*=96", "--prune", "1/3", MLP,
                    OARS_DIGEST="1") for ranks in (1, 2))
    assert one.code == two.code == 0, f"{one}\n{two}"
    same(one, two)
    assert [event["parameters"] for event in two.events("widened")] == [21 * 96 + 192 + 97 * 96 + 97]
    assert two.lines[-1] == f"{21 * 32 + 64 + 33 * 32 + 33} {21 * 32 + 64 + 33 * 32 + 33}"
    assert said(tmp_path, "run", "-n", "1", "--widen", "tail.*=96", MLP, code=2).endswith(
        "oars: --widen tail.* makes no layer wider (head: no pattern names it; body.3: no pattern names it; body.0: no "
        "pattern names it)\n")
    assert said(tmp_path, "run", "--widen", "body", MLP, code=2) == (
        "oars: --widen body is no layer and width: use a name or a pattern, as in 'body.*=384'\n")
    assert said(tmp_path, "run", "--widen-when", "plateau", MLP, code=2) == (
        "oars: --widen-when plateau is for --widen, which says how wide layers become: --widen 'body.*=384'\n")
    assert said(tmp_path, "run", "--widen", "body.*=96", "--widen-when", "soon", MLP, code=2) == (
        "oars: --widen-when soon is no time: use a number of steps, as in 500steps, or plateau\n")


def test_layers_become_wider_when_the_loss_has_stopped_falling(tmp_path):
    one, two = (Run(tmp_path / f"on-{ranks}", "-n", ranks, "--widen", "body.*=96", "--widen-when", "plateau", MLP,
                    EPOCHS="30", RATE="0", OARS_DIGEST="1") for ranks in (1, 2))
    assert one.code == two.code == 0, f"{one}\n{two}"
    steps = [event["step"] for run in (one, two) for event in run.events("widened")]
    assert steps == [400, 400]
    losses = [line["loss"] for line in map(json.loads, (two.folder / "metrics.jsonl").read_text().splitlines())]
    before, after = losses[350:400], losses[400:450]
    assert abs(sum(after) - sum(before)) / 50 < 0.05  # the network computed the same
    assert len(set(two.digests().values())) == 1
