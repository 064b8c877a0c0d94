"""The lab's first exercise ends where it is known to end; its pages name commands and files that are there."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1] / "examples/lab"


@pytest.mark.parametrize(("solver", "loss"), [
    ("sgd:0.025", 4e-13), ("sgd:0.01", 5.7e-11), ("sgd:0.001", 0.148), ("adam:0.01", 0.0045), ("adadelta:0.01", 23.2)])
def test_a_line_through_four_points_ends_with_the_known_loss(solver, loss, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["linear.py", "--solver", solver])
    runpy.run_path(str(LAB / "linear.py"), run_name="__main__")
    told = float(re.search(r"final loss (\S+)", capsys.readouterr().out)[1])
    # The first two are at the precision of 32-bit numbers, where another order of sums shows.
    assert told <= 3 * loss if loss < 1e-6 else told == pytest.approx(loss, rel=0.02)


def test_the_pages_commands_are_ones_that_oars_understands(monkeypatch):
    from oars.watch import scale as scale_
    from oars.watch import sweep as sweep_
    from oars.watch.command import main

    asked = []
    monkeypatch.setattr(scale_, "scale", lambda *args: asked.append(args[0]) or 0)
    monkeypatch.setattr(sweep_, "sweep", lambda what, *args: asked.append(what.script) or 0)
    pages = sorted(LAB.glob("*.md"))
    for page in pages:
        command = re.search(r"^```sh\noars (.*)\n```", page.read_text(), re.M)[1]
        assert main(shlex.split(command)) == 0
    assert [Path(script[0]).name for script in asked] == ["linear.py", "softmax.py", "cnn.py", "cnn.py"]
    assert all((LAB.parents[1] / script[0]).exists() for script in asked)
