"""Random scripts that fail (``failing.py``): caught or not, they end on ranks as on one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from compare import files_differ, lines_differ
from running import Run

SCRIPT = Path(__file__).with_name("failing.py")


def both(folder: Path, ranks: int, first: int, count: int) -> tuple[Run, Run]:
    """One process, and ranks behind it: how late errors come is looked at."""
    one = Run(folder / "one", SCRIPT, first, count, command=[sys.executable])
    one.end()
    return one, Run(folder / "ranks", "--quiet", "-n", ranks, SCRIPT, first, count, OARS_DIGEST="1")


def unlike(one: Run, many: Run) -> str:
    """Where lines, files, weights and exit codes differ."""
    found = [lines_differ(one.lines, many.lines), files_differ(one.cwd, many.cwd)]
    if one.code != many.code:
        found.append(f"exit code {many.code} instead of {one.code}\n{many}")
    if len(set(many.digests().values())) > 1:
        found.append(f"the ranks' weights differ: {many.digests()}")
    return "\n".join(filter(None, found))


@pytest.mark.parametrize(("ranks", "first", "count"), [
    (2, 0, 50), pytest.param(3, 0, 50, marks=pytest.mark.more),
    *(pytest.param(2, first, 100, marks=pytest.mark.more) for first in (1000, 1100, 1200)),
    *(pytest.param(3, first, 100, marks=pytest.mark.more) for first in (2000, 2100))])
def test_errors_that_a_script_catches_end_as_on_one_process(ranks: int, first: int, count: int, tmp_path: Path) -> None:
    one, many = both(tmp_path, ranks, first, count)
    assert not unlike(one, many)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.more] if seed > 2 else [])
                                  for seed in range(30)])
def test_an_error_that_nobody_catches_ends_the_run_as_one_process(seed: int, tmp_path: Path) -> None:
    """``finally`` is done first; one traceback, of the same error."""
    one, many = both(tmp_path, 2 + seed % 2, seed, 1)
    assert not unlike(one, many)
    if one.code:
        assert many.err.count("\nTraceback") + many.err.startswith("Traceback") == one.err.count("Traceback (most")
        error = one.err.strip().splitlines()[-1]
        assert error in many.err.splitlines() and "/src/oars/" not in many.err, f"{error}\n{many}"
