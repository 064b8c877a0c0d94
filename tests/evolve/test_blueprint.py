"""``oars evolve``: widths within a budget, in a search that can be interrupted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from running import oars, said

SCRIPT = Path(__file__).parent / "scripts" / "mlp.py"
GOOD = """
metric = "epoch \\\\d+: ([\\\\d.]+)"
best = "min"
budget = 1.3e8
when = "12..40steps"
[widths]
"body.*" = "24..96"
"""


def test_candidates_run_within_the_budget_and_are_not_run_twice(tmp_path):
    (tmp_path / "b.toml").write_text(GOOD)
    shutil.copy(SCRIPT, tmp_path)
    first = oars(tmp_path, "evolve", "b.toml", "mlp.py", "--ranks", "2", "--name", "s", code=0, timeout=280)
    lines = first.stdout.splitlines()
    assert lines[0].startswith("oars: body.0 48, body.3 48: 0.") and lines[0].endswith(" FLOPs")
    assert lines[1].startswith("oars: body.0 40, body.3 40: 0.") and lines[1].endswith(" FLOPs") and not lines[2]
    assert sum(line.startswith("best ") for line in lines) == 1
    told = re.fullmatch(r"(.+) FLOPs in all; one run at the full widths takes (.+), a sweep of these 2 widths from the "
                        r"beginning (.+)", lines[-2])
    assert told and 0 < float(told[3]) < float(told[1]) < 2 * float(told[2])
    assert (tmp_path / "oars-runs" / "s" / "report.html").exists()
    runs = sorted(path.name for path in (tmp_path / "oars-runs").iterdir())
    again = oars(tmp_path, "evolve", "b.toml", "mlp.py", "--ranks", "2", "--name", "s", code=0, timeout=60)
    assert again.stdout == first.stdout and sorted(p.name for p in (tmp_path / "oars-runs").iterdir()) == runs


def test_the_worse_half_of_many_candidates_stops_on_the_way(tmp_path):
    (tmp_path / "b.toml").write_text(GOOD.replace("1.3e8", "1e12"))
    shutil.copy(SCRIPT, tmp_path)
    words, slow = ["evolve", "b.toml", "mlp.py", "--ranks", "1", "--name", "s"], {"SLOW": "0.03", "EPOCHS": "8"}
    lines = oars(tmp_path, *words, code=0, timeout=280, **slow).stdout.splitlines()
    folders = sorted((tmp_path / "oars-runs").glob("s-*"))
    assert [folder.name for folder in folders] == [f"s-{eighths}" for eighths in range(1, 8)]  # resumed in its folder
    codes = [json.loads((folder / "end.json").read_text())["code"] for folder in folders]
    assert sorted(codes) == [0] * 2 + [143] * 5, lines
    last = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] for folder in folders]
    assert [step == 120 for step in last] == [code == 0 for code in codes] and min(last) >= 30, last
    rounds = [line for line in lines if " after step " in line and line.startswith("oars: ")]
    assert len(rounds) == 6 + 3 and sum(" stopped after step " in line for line in lines) == 5, lines
    again = oars(tmp_path, *words, code=0, timeout=60, **slow).stdout.splitlines()
    assert [line for line in again if line.startswith("best")] == [line for line in lines if line.startswith("best")]


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
