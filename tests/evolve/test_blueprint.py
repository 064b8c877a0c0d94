"""``oars evolve``: widths within a budget, in a search that can be interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from running import oars, said

SCRIPT = Path(__file__).parent / "scripts" / "mlp.py"
GOOD = """
metric = "epoch \\\\d+: ([\\\\d.]+)"
best = "min"
budget = 1e9
when = "12..40steps"
[widths]
"body.*" = "24..96"
"""


def test_candidates_run_within_the_budget_and_are_not_run_twice(tmp_path):
    (tmp_path / "b.toml").write_text(GOOD)
    shutil.copy(SCRIPT, tmp_path)
    first = oars(tmp_path, "evolve", "b.toml", "mlp.py", "--ranks", "2", "--name", "s", code=0, timeout=280)
    lines = first.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["oars"] * 3
    assert lines[0].startswith("oars: body.0 48, body.3 48: 0.") and lines[0].endswith(" FLOPs")
    assert lines[1].startswith("oars: body.0 40, body.3 40: 0.")
    assert lines[2].startswith("oars: body.0 72, body.3 72: 0.")
    assert sum(line.startswith("best ") for line in lines) == 1
    assert "FLOPs in all; one run at the full widths takes" in lines[-2]
    assert (tmp_path / "oars-runs" / "s" / "report.html").exists()
    runs = sorted(path.name for path in (tmp_path / "oars-runs").iterdir())
    again = oars(tmp_path, "evolve", "b.toml", "mlp.py", "--ranks", "2", "--name", "s", code=0, timeout=60)
    assert again.stdout == first.stdout and sorted(p.name for p in (tmp_path / "oars-runs").iterdir()) == runs


BAD = {
    "budget = 1e12": "b.toml names no layers: [widths], and a line like 'body.*' = '48..384'",
    "budget = 0\n[widths]\na = '8..16'": "b.toml: the budget is 0: FLOPs of the whole search, as in 4e14",
    "budget = 1e9\n[widths]\na = '16..8'": "b.toml: the widths of a are '16..8': write from..to, as in '48..384'",
    "purse = 1": "b.toml: purse is none of best, budget, metric, when, widths",
    "budget = 1e3\n[widths]\n'body.*' = '24..96'": "the budget of 1e+03 FLOPs is too small: one candidate takes ",
    "budget = 1e9\n[widths]\n'tail.*' = '24..96'": "--widen tail.* makes no layer wider (head: no pattern names it; ",
}


@pytest.mark.parametrize("text", BAD)
def test_what_a_blueprint_cannot_be_is_one_line(text, tmp_path):
    (tmp_path / "b.toml").write_text(text + "\n")
    shutil.copy(SCRIPT, tmp_path)
    err = said(tmp_path, "evolve", "b.toml", "mlp.py", code=2)
    assert err.startswith(f"oars: {BAD[text]}") and err.count("\n") == 1
