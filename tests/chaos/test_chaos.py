"""Ranks die at every kind of moment; the training must not show it. ``make chaos`` runs 200 random ones."""

import os
import time
from pathlib import Path

import pytest
from chaos import Voyage, sail, sail_script, unlike, wrong_with
from running import python

VOYAGES = {
    "at the start": Voyage(3, [], [[2, "start", 1]]),
    "in the forward pass": Voyage(3, [], [[1, "forward", 12]]),
    "in the middle of backward, rank 0": Voyage(2, ["--penalty", "0.001"], [[0, "in backward", 61]]),
    "in two collectives": Voyage(4, [], [[1, "in allreduce", 9], [3, "behind allreduce", 30]]),
    "while gradients accumulate": Voyage(3, ["--accumulate", "3"], [[2, "in allreduce", 44]]),
    "two at once in the exchange, then in an optimizer step": Voyage(
        4, [], [[0, "in exchange", 6], [3, "in exchange", 6], [1, "in optimizer", 15]]),
    "during recovery from another death": Voyage(4, [], [[2, "in exchange", 5], [1, "recovery", 1]]),
    "rank 0 after a recovery, the next while it takes over": Voyage(
        4, ["--handmade"], [[3, "in allreduce", 40], [0, "recovered", 1], [1, "taking over", 1]]),
    "in evaluation, with loader workers": Voyage(2, ["--workers", "1"], [[1, "batch", 15]]),
    "the voice, whose heir has loader workers": Voyage(2, ["--workers", "1"], [[0, "in exchange", 2]]),
    "at the very end, rank 0": Voyage(3, [], [[0, "end", 1]]),
    "at random times": Voyage(4, [], [], [(0, 0.9), (2, 1.1), (1, 1.5)]),
}  # fmt: skip


@pytest.mark.parametrize("name", VOYAGES)
def test_ranks_die(name, tmp_path):
    assert wrong_with(VOYAGES[name], tmp_path) == ""


def test_nobody_goes_on_before_all_are_there(tmp_path):
    """Two ranks know the third, which dies before it knows them: no rank has run the script, so all begin again."""
    (tmp_path / "script.py").write_text("print('here')")
    run = sail_script("script.py", 3, [[2, "late", 1]], tmp_path)
    assert (run.code, run.lines) == (0, ["here"]), run.err
    assert "a rank died while the ranks were starting: they are started again" in run.err and "survived" not in run.err


@pytest.fixture(scope="module")
def loops():
    """What one process prints of the other loops."""
    script = Path(__file__).parent / "loops.py"
    return script, python(script.parent, script)


OTHER_MOMENTS = [pytest.param(count, marks=pytest.mark.more) for count in (100, 160, 215)]


@pytest.mark.parametrize("count", [45, *OTHER_MOMENTS])
def test_ranks_die_in_loops_of_other_kinds(count, loops, tmp_path):
    script, expected = loops
    run = sail_script(script, 3, [[count % 3, "in a collective", count]], tmp_path)
    assert run.code == 0, run.err
    assert unlike(run.lines, expected) == ""
    assert "1 death survived" in run.err and "is skipped" not in run.err


def test_a_death_within_a_step_equals_a_planned_one_before_it_to_the_bit(tmp_path):
    """Rank 1 leaves before step 9 (before its batch is cut), or dies somewhere in step 9: the same weights."""
    weights = {}
    for point in (["batch", 9], ["end of backward", 9], ["in exchange", 9], ["batch", 10]):
        folder = tmp_path / "-".join(map(str, point))
        run = sail(Voyage(3, [], [[1, *point]]), folder)
        assert run.code == 0, run.err
        told = [(event["ranks"], event["step"], event["left"]) for event in run.events("lost")]
        assert told == [([1], point[1], 2)]
        weights[str(point)] = run.digests()[0]
        assert weights[str(point)] == run.digests()[2]
    planned, *within, next_step = weights.values()
    assert within == [planned] * len(within)
    assert next_step != planned  # or the test could not tell


# A worker of a loader kills the rank that made it, before PyTorch's own code in it has looked whose it is.
FORKED = """
import os, signal, time, torch
from torch.utils.data import DataLoader, TensorDataset
def begin(worker):
    made_by = os.getppid()
    if made_by == int(open("oars-runs/it/pid-1").read()):
        os.kill(made_by, signal.SIGKILL)
        while os.getppid() == made_by:
            time.sleep(0.01)
model = torch.nn.Linear(3, 1)
for rows, in DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=4, num_workers=1, worker_init_fn=begin):
    model(rows).sum().backward()
print("through")
"""


def test_a_worker_whose_rank_dies_as_it_begins_does_not_stay(tmp_path):
    (tmp_path / "script.py").write_text(FORKED)
    run = sail_script("script.py", 2, [], tmp_path)
    assert run.code == 0 and run.lines == ["through"] and "1 death survived" in run.err, run.err
    until = time.monotonic() + 20
    while (left := [p.parent for p in Path("/proc").glob("[0-9]*/cwd") if is_at(p, tmp_path)]):
        assert time.monotonic() < until, [(p / "cmdline").read_bytes() for p in left]
        time.sleep(0.1)


def is_at(link, folder):
    try:
        return os.readlink(link) == str(folder)
    except OSError:  # ended meanwhile, or not ours to ask
        return False
