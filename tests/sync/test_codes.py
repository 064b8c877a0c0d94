"""What the codes of ``--wire`` lose, and what they must not."""

from __future__ import annotations

import numpy as np
import pytest

from oars.exchange.codes import code_of
from oars.exchange.compressed import Coded


@pytest.mark.parametrize("wire, bound, nbytes", [("fp16", 1e-3, 2), ("bf16", 4e-3, 2), ("int8", 1e-2, 1.02)])
def test_values_come_back_within_the_codes_precision(wire, bound, nbytes):
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    code = code_of(wire)
    data = code.encode(values)
    again = code.decode(data, 1000)
    assert np.abs(again - values).max() <= bound * np.abs(values).max()
    assert data.dtype == np.uint8 and len(data) == pytest.approx(1000 * nbytes, rel=0.01)


def test_topk_keeps_the_largest_values_as_they_are():
    values = np.random.default_rng(0).normal(size=500).astype(np.float32)
    code = code_of("topk:0.02")
    data = code.encode(values)
    again = code.decode(data, 500)
    kept = np.flatnonzero(again)
    assert len(data) == 80 and set(kept) == set(np.argsort(-np.abs(values))[:10])
    assert (again[kept] == values[kept]).all()


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8", "topk:0.01"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_on_the_other_side(wire, bad):
    values = np.ones(300, np.float32)
    values[7] = bad
    code = code_of(wire)
    assert not np.isfinite(code.decode(code.encode(values), 300)).all()


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8", "topk:0.5"])
@pytest.mark.parametrize("count", [1, 255, 256, 257])
def test_any_number_of_values_has_a_code(wire, count):
    values = np.linspace(-1, 1, count, dtype=np.float32)
    code = code_of(wire)
    assert code.decode(code.encode(values), count).shape == (count,)
    assert (code.decode(code.encode(values * 0), count) == 0).all()


def test_what_is_too_large_for_fp16_becomes_its_largest():
    assert code_of("fp16").decode(code_of("fp16").encode(np.float32([1e9, -1e9])), 2).tolist() == [65504, -65504]


class Alone:
    """A world of one rank."""

    adopted, comm = 0, None

    def allgather_alike(self, mine):
        return mine[None]


def test_what_a_code_lost_of_one_set_of_weights_is_added_to_that_set_alone():
    exchange = Coded(Alone(), code_of("topk:0.5"))
    exchange.reserve(8)

    def mean(values, of):
        exchange.inbox[:8].view(np.float32)[:] = values
        exchange.average([(0, 2, np.float32)], None, of)
        return exchange.result[:8].view(np.float32).tolist()

    assert mean([1, 3], "one") == [0, 3]
    assert mean([0, 0], "other") == [0, 0]
    assert mean([0, 0], "one") == [1, 0]
