"""Sweeps and scaling series of real runs: ranked, with failures kept, and going on after an interruption."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import environment, said

from oars.watch.runs import WatchError
from oars.watch.sweep import parse

TRAIN = """
import argparse, torch
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
if args.seed == 13:
    raise RuntimeError("unlucky")
data = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=8):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"score {1 / (1 + loss.item()):.4f}")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("series")
    (folder / "train.py").write_text(TRAIN)
    return folder


def test_a_sweep_ranks_its_runs_keeps_failures_and_goes_on_where_it_was_interrupted(place):
    words = ["sweep", "train.py", "--set", "lr=0.1,1e20", "--set", "seed=1,13", "--parallel", "2", "--name", "s",
             "--metric", r"score ([\d.]+|nan)"]
    begun = subprocess.Popen([sys.executable, "-m", "oars", *words], cwd=place, env=environment(),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    until = time.time() + 60
    while not (place / "oars-runs/s-t001/end.json").exists() and time.time() < until:
        time.sleep(0.05)
    os.killpg(begun.pid, signal.SIGINT)
    _, err = begun.communicate(timeout=60)
    assert begun.returncode == 130 and err == "oars: interrupted; the same command continues with what is left\n"
    first = (place / "oars-runs/s-t001/end.json").read_text()

    shown = said(place, *words)
    assert (place / "oars-runs/s-t001/end.json").read_text() == first  # not run again
    rows = [line.split() for line in shown.split("\n\n")[-1].splitlines()[1:5]]
    assert rows[0][:3] == ["1", "0.1", "1"] and 0 < float(rows[0][3]) < 1
    assert sorted(tuple(row[:5]) for row in rows[1:]) == [
        ("0.1", "13", "no", "metric", "failed"), ("1e20", "1", "NaN", "done,", "diverged"),
        ("1e20", "13", "no", "metric", "failed")]
    assert "lr=1e20 seed=1 is not finite after step" in shown and "━━ lr=0.1 seed=1" in shown
    page = (place / "oars-runs/s/report.html").read_text()
    assert page.count("<svg") == 2 and "Score" in page and "lr=1e20 seed=1 (diverged ×)" in page and "s-t002" in page
    other = said(place, *words[:-2], code=2)  # another metric is another series
    assert "holds another series" in other and other.count("\n") == 1


def test_a_search_by_optuna_keeps_a_journal_and_adds_to_it(place):
    words = ["sweep", "train.py", "--set", "lr=0.001..10", "--search", "3", "--name", "o", "--parallel", "1"]
    shown = said(place, *words)
    assert shown.count(" of 3: lr=") == 3 and (place / "oars-runs/o/optuna.journal").stat().st_size > 0
    tried = re.findall(r"of 3: lr=(\S+):", shown)
    assert len(set(tried)) == 3 and all(0.001 <= float(rate) <= 10 for rate in tried)
    assert re.findall(r"of 3: lr=(\S+):", said(place, *words)) == tried  # nothing new to ask


def test_scaling_tells_speed_and_results_and_that_replicas_agree(place):
    shown = said(place, "scale", "train.py", "-n", "1,2", "--metric", r"score ([\d.]+)", "-o", "scale.svg")
    assert "strong scaling, " in shown
    lines = shown.partition("strong scaling, ")[2].splitlines()[1:4]
    head, rows = lines[0].split(), [line.split() for line in lines[1:]]
    assert head == ["ranks", "seconds", "samples/s", "speedup", "efficiency", "exchange", "loss", "score", "replicas"]
    assert [row[0] for row in rows] == ["1", "2"] and rows[1][-1] == "agree"
    assert rows[0][3] == "1.00" and rows[0][4:6] == ["100", "%"]
    losses = [float(row[8]) for row in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # the same training, whatever the speed
    assert "ideal" in (place / "scale.svg").read_text()


def test_weak_scaling_is_called_so_and_a_failed_run_is_named(place):
    shown = said(place, "scale", "train.py", "-n", "2", "--weak", "--name", "w", "--", "--lr", "0.01")
    assert "weak scaling" in shown and "--lr 0.01" in (place / "oars-runs/w/report.html").read_text()
    done = subprocess.run([sys.executable, "-m", "oars", "scale", "train.py", "-n", "1", "--", "--seed", "13"],
                          cwd=place, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == (
        "oars: no run came to a good end with more than one step, so there is nothing to compare\n")
    assert "failed (1), or too few steps to time" in done.stdout


@pytest.mark.parametrize(("args", "says"), [
    (["sweep", "train.py"], "nothing to vary: --set name=value,value,…"),
    (["sweep", "train.py", "--set", "lr"], "--set lr: write name=value,value,… or name=low..high"),
    (["sweep", "train.py", "--set", "lr=0..1"],
     "--set lr=0..1: a range is for --random or --search; a grid needs values"),
    (["sweep", "train.py", "--set", "lr=1,2", "--metric", "("],
     "--metric '(' is no regular expression: missing ), unterminated subpattern at position 0"),
    (["sweep", "no.py", "--set", "lr=1,2"], "cannot read no.py: No such file or directory"),
    (["sweep", "--set", "lr=1"], "sweep needs a script, or -m and a module; see oars sweep --help"),
    (["scale", "train.py"], "the following arguments are required: -n; see oars scale --help"),
    (["scale", "train.py", "-n", "1,x"], "argument -n: x is no number: 1 or more; see oars scale --help"),
    (["sweep", "-m", "nosuch", "--set", "a=1"], "no module named nosuch"),
])
def test_bad_input_is_one_line(place, args, says):
    assert said(place, *args, code=2) == f"oars: {says}\n"


def test_ranges_are_drawn_within_their_bounds():
    import random

    rate, size, kind = parse(["lr=0.001..1", "size=2..5", "kind=a,b"], grid=False)
    assert rate.log and not size.log and size.whole
    rng = random.Random(3)
    rates = [float(rate.draw(rng)) for _ in range(200)]
    assert 0.001 <= min(rates) < 0.01 and 0.1 < max(rates) <= 1
    assert {size.draw(rng) for _ in range(100)} == {"2", "3", "4", "5"} and kind.draw(rng) in "ab"
    with pytest.raises(WatchError, match="5 is not below 2"):
        parse(["a=5..2"], grid=False)
