"""Hypothesis on real ranks: random tensor programs, and every sample exactly once for any number of ranks and size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import oars

from oars.adapt.torch import context

HERE = Path(__file__).parent


@pytest.mark.parametrize(("ranks", "programs"), [
    (2, 60), pytest.param(3, 60, marks=pytest.mark.more), pytest.param(5, 30, marks=pytest.mark.more)])
def test_random_programs_give_the_same_on_rows_as_on_plain_tensors(ranks: int, programs: int, tmp_path: Path) -> None:
    ran = oars(tmp_path, "run", "--quiet", "-n", ranks, HERE / "programs.py", programs, code=0, timeout=300)
    assert ran.stdout == "all programs agree\n"


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_shares_cover_every_row_once_and_differ_by_at_most_one(rows: int, ranks: int) -> None:
    context.offsets_of.cache_clear()
    size, context.ctx.size = context.ctx.size, ranks
    try:
        offsets = context.offsets_of(rows)
    finally:
        context.ctx.size = size
        context.offsets_of.cache_clear()
    shares = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    assert offsets[0] == 0 and sum(shares) == rows and len(shares) == ranks
    assert max(shares) - min(shares) <= 1


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**6)), min_size=1, max_size=40), st.data())
def test_shares_by_speed_cover_every_row_once_and_no_others_are_through_earlier(costs: list, data: st.DataObject):
    rows = data.draw(st.integers(2 * len(costs), 2000))
    shares = context._dealt(rows, tuple(costs))
    assert sum(shares) == rows and min(shares) >= 2
    last = max(fixed + each * n for n, (fixed, each) in zip(shares, costs, strict=True))
    before = [(last - 1 - fixed) // each for fixed, each in costs]  # the most rows with which each is through earlier
    assert sum(before) < rows or min(before) < 2
