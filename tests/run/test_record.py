"""What a run leaves behind, and that writing it costs a training loop next to nothing; how verify reads it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from running import oars

from oars.commands.verify import compare
from oars.rank.record import Record
from oars.watch.curves import charts
from oars.watch.runs import Run


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_written_with_every_digit(tmp_path):
    world = SimpleNamespace(sent=0, seconds=0.0, size=4, rank=0, origin=0, meetings=7, exchanged=1000, ahead=0)
    record = Record(tmp_path, True, world)
    given = [0.1 + 0.2, None, math.nan, math.inf, 3, np.float32(0.1)]
    for loss in given:
        record.step(loss, 10)
        world.seconds += 0.001
        world.meetings += 3
        world.exchanged += 400
        time.sleep(0.002)
    record.gather("a.py:1 matmul", 0.5, 100)
    record.gather("a.py:1 matmul", 0.25, 100)
    record.close()
    told = lines(tmp_path)
    assert [line["step"] for line in told] == [1, 2, 3, 4, 5, 6]
    assert repr([line["loss"] for line in told]) == repr([0.1 + 0.2, None, math.nan, math.inf, 3.0,
                                                          float(np.float32(0.1))])
    assert told[0]["samples_per_s"] is None and 0 < told[1]["samples_per_s"] <= 10 / 0.002
    assert 0 < told[1]["exchange_share"] < 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["ranks"], summary["steps"], summary["samples"]) == (4, 6, 60)
    assert summary["samples_per_s"] == pytest.approx(50 / summary["seconds"])
    assert summary["exchange_seconds"] == pytest.approx(0.005)
    assert (summary["meetings"], summary["exchange_bytes"]) == (pytest.approx(3, abs=1), pytest.approx(400, abs=80))
    assert summary["gathers"] == [{"site": "a.py:1 matmul", "times": 2, "seconds": 0.75, "bytes": 200}]


def test_a_loss_changed_in_place_later_is_recorded_as_it_was(tmp_path):
    import torch

    record = Record(tmp_path, True)
    record.step(1.0, 1)  # flushes; the next waits
    loss = torch.tensor(2.0, requires_grad=True) * 1
    record.step(loss, 1)
    loss.data.zero_()
    record.close()
    assert [line["loss"] for line in lines(tmp_path)] == [1.0, 2.0]


def test_a_step_costs_microseconds(tmp_path):
    record = Record(tmp_path, True, SimpleNamespace(sent=0, seconds=0.0, size=2, rank=0, origin=0, meetings=0,
                                                             exchanged=0))
    took = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(2000):
            record.step(0.5, 32)
        took.append((time.perf_counter() - began) / 2000)
    assert min(took) < 10e-6  # formatting and writing included


def test_only_the_voice_writes(tmp_path):
    record = Record(tmp_path, False)
    record.step(1.0, 1)
    record.notice("hello")
    record.event("fallback")
    record.close()
    assert list(tmp_path.iterdir()) == [] and record.steps == 1


def test_a_notice_is_said_once(tmp_path):
    code = ("from pathlib import Path; from oars.rank.record import Record\n"
            f"r = Record(Path({str(tmp_path)!r}), True)\n"
            "r.notice('a is replicated'); r.notice('a is replicated'); r.notice('b')\n"
            "import sys; assert not {'torch', 'numpy'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "oars: a is replicated\noars: b\n"
    assert [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [
        "a is replicated", "b"]


def folders(tmp_path: Path, losses: list[float], off: float = 0.0, at: int = 99, digests: str = "aa") -> tuple:
    """Two run folders as verify leaves them, the second apart by ``off`` from step ``at`` on."""
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
        for rank, digest in enumerate(digests):
            (tmp_path / name / f"weights-digest-{rank}.txt").write_text(digest)
        shift = off if name == "many" else 0.0
        (tmp_path / name / "metrics.jsonl").write_text("".join(
            json.dumps({"step": i, "loss": loss + (shift if i >= at else 0)}) + "\n"
            for i, loss in enumerate(losses, 1)))
        np.savez(tmp_path / name / "weights.npz", np.arange(3.0) + shift, np.zeros(2))
    return tmp_path / "one", tmp_path / "many", len(digests)


def test_verify_says_that_training_is_the_same(tmp_path):
    same, line = compare(*folders(tmp_path, [3.0, 2.0, 1.0], off=1e-6, at=2))
    assert same and line == ("same training on 1 and 2 ranks: over 3 steps losses agree to 1e-06, weights to 5e-07")


@pytest.mark.parametrize(("how", "says"), [
    ({"off": 0.5, "at": 1}, "not the same: at step 1 the loss is 3 on one rank and 3.5 on 2; "
     "they differ before any update, so see Values and Randomness"),
    ({"off": 0.5, "at": 3}, "not the same: at step 3 the loss is 1 on one rank and 1.5 on 2; "
     "the 2 before agree, so see Gradients and Order"),
    ({"off": 0.01}, "not the same: the losses agree but weight arr_0 ends 0.005 (relative) apart; see Gradients"),
    ({"digests": "ab"}, "not the same: rank 1 ends with other weights than rank 0; see Gradients"),
])
def test_verify_says_where_trainings_part_and_which_clause_is_to_blame(tmp_path, how, says):
    same, line = compare(*folders(tmp_path, [3.0, 2.0, 1.0], **how))
    assert not same and line.startswith(says) and "\n" not in line


GAN = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    maker, judge = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    of_maker, of_judge = (torch.optim.Adam(m.parameters(), lr) for m, lr in ((maker, 1e-3), (judge, 2e-3)))
    says = nn.BCEWithLogitsLoss()
    for (real,) in DataLoader(TensorDataset(torch.randn(40, 4)), 8):
        made, one, none = maker(torch.randn(8, 2)), torch.ones(8, 1), torch.zeros(8, 1)
        loss = says(judge(real), one) + says(judge(made.detach()), none)
        of_judge.zero_grad(); loss.backward(); of_judge.step()
        of_maker.zero_grad(); (10 * says(judge(made), one)).backward(); of_maker.step()
"""


def test_optimizers_have_their_own_losses_and_rates_and_batches_count_once(tmp_path):
    (tmp_path / "gan.py").write_text(textwrap.dedent(GAN))
    for n in ("1", "2"):
        oars(tmp_path, "run", "-n", n, "--name", f"r{n}", "gan.py", code=0)
        run = Run(tmp_path / "oars-runs" / f"r{n}")
        assert run.summary["steps"] == 10 and run.summary["samples"] == 40
        judge, maker = run.steps.of_each_optimizer()
        assert judge.step == [1, 3, 5, 7, 9] and set(judge.lr) == {2e-3}
        assert maker.step == [2, 4, 6, 8, 10] and set(maker.lr) == {1e-3}
        assert max(judge.loss) < 3 < min(maker.loss)
        for each in (judge, maker):
            assert all(rate > 0 for rate in each.samples_per_s[1:])
        loss, rates, *_ = charts([run])
        assert [line.name for line in loss.series] == [f"r{n}, optimizer 1", f"r{n}, optimizer 2"]
        assert all(min(line.finite()[1]) > 0 for line in rates.series)
