"""One bit changes in one rank's memory; ``flips.py`` does this 200 times, at random places."""

import numpy as np
import pytest
from flips import Flight, fly, undisturbed, wrong_when_paced, wrong_with

from oars.exchange.guard import Rounds, digest, judged

FLIGHTS = {
    "a weight, before the forward pass": Flight(3, (), [1, "forward", 14, "weights", 3]),
    "a weight in the middle of backward, rank 0": Flight(3, ("--penalty", "0.001"),
                                                         [0, "in backward", 61, "weights", 5]),
    "a momentum, between accumulated steps": Flight(4, ("--accumulate", "3"), [2, "optimizer", 4, "momenta", 8]),
    "a running mean": Flight(3, ("--handmade",), [2, "end of backward", 12, "buffers", 2]),
    "one of two ranks": Flight(2, (), [1, "optimizer", 5, "weights", 1]),
}  # fmt: skip


MORE = {"a weight, before the forward pass", "a running mean"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.more] if n in MORE else []) for n in FLIGHTS])
def test_a_flipped_bit_leaves_no_trace(name, tmp_path):
    assert wrong_with(FLIGHTS[name], tmp_path) == ""


def test_a_flipped_bit_is_found_within_a_round_at_the_guards_own_pace(tmp_path):
    assert wrong_when_paced(Flight(3, (), [1, "optimizer", 5, "weights", 2]), tmp_path) == ""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stream_that_one_rank_alone_has_drawn_from_is_found(ranks, tmp_path):
    run = fly(Flight(ranks, (), []), tmp_path, [[1, "optimizer", 5, "numpy", 1]])
    assert run.code == 0, run
    (found,) = run.events("differ")
    assert found["tensors"] == ["the common random streams"] and (found["step"], found["agreed"]) == (5, 4), found
    assert found["ranks"] == ([1] if ranks == 3 else []) and "all ranks continue from rank 0's" in run.err
    assert set(run.digests().values()) == {undisturbed(ranks, ())[0]}


def test_what_is_only_reported_goes_on(tmp_path):
    flight = Flight(3, (), [1, "optimizer", 5, "weights", 1])
    run = fly(flight, tmp_path, [flight.flip], "--guard", "report")
    assert run.code == 0, run
    assert run.events("differ")[0]["ranks"] == [1] and "rank 1 is not like the others. Found in step 6" in run.err


def test_every_bit_counts_and_its_place_too():
    draw = np.random.default_rng(3)
    for size in (1, 13, 4096, 4097, 70_003, 1 << 18):
        data = draw.integers(0, 256, size, dtype=np.uint8)
        known = {digest(data)}
        for at in draw.integers(0, size, 40):
            for bit in (0, 7):
                data[at] ^= 1 << bit
                assert digest(data) not in known
                data[at] ^= 1 << bit
        swapped = data.copy()
        swapped[: size // 2] = data[size - size // 2:]
        assert size < 3 or digest(swapped) not in known


def test_ranks_look_at_the_same_blocks_and_keep_to_their_share():
    """Two ranks of which one is slower: from what both were told they choose the same, and each block in its turn."""
    ranks = [Rounds(), Rounds()]
    for one in ranks:
        one.begin([1 << 18] * 40)
    spent, seen = [0, 0], []
    for _ in range(2000):
        chosen = [one.choose() for one in ranks]
        assert chosen[0] == chosen[1]
        seen += chosen[0]
        now = [20_000 * len(chosen[0]), 30_000 * len(chosen[0])]
        spent = [a + b for a, b in zip(spent, now, strict=True)]
        lines = [[0, t, 3_000_000, 0] for t in now]
        for one in ranks:
            one.learn(lines)
    assert seen == [i % 40 for i in range(len(seen))] and len(seen) > 400
    assert max(spent) < 0.003 * 2000 * 3_000_000


def test_who_is_alone():
    hashes = [{"a": 1, "b": 5}, {"a": 1, "b": 6}, {"a": 2, "b": 5}]
    assert judged(hashes) == {"a": (0, [2]), "b": (0, [1])}
    assert judged(hashes[1:]) == {"a": (None, [0, 1]), "b": (None, [0, 1])}
    assert judged([{"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}, {"b": 0}]) == {}
    assert judged([{"a": 1}, {"a": 2}, {"a": 3}, {"a": 1}]) == {"a": (0, [1, 2])}
