"""The simulation behind ``oars predict``: against closed formulas, against its own messages one by one, and in time."""

from __future__ import annotations

import heapq
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from running import ROOT

from oars.watch.machine import Line, Machine, find, read, shipped
from oars.watch.predict import ending, point
from oars.watch.runs import Run, WatchError
from oars.watch.simulate import Sync, formula, parse_sync, simulate
from oars.watch.workload import STILL, Seen, Workload, from_file, from_runs, look, normal, through

LOAD = Workload(name="a", batch=512, rows=32, work=Line((0, 1), (2e-3, 3e-3)), update_seconds=1e-3,
                forward=1 / 3, nbytes=100e6, buckets=1, meetings=3, jitter=STILL, error=0.02)
FLAT = Machine(name="flat", nodes=4096, ranks_per_node=1, hop=Line((0, 1e9), (1e-5, 0.5)), servers=4e9, busy=(1,),
               speed=(1.0,), memory=(1.0,), spread=(0.0,), meeting=(0.0,), pair=None, reduces=(), error=0.1)
DEEP = replace(FLAT, ranks_per_node=8, busy=(1, 2, 4, 8), speed=(1.0, 0.95, 0.88, 0.69), memory=(1.0, 0.9, 0.6, 0.3),
               spread=(0.0,) * 4, meeting=(0.0, 2e-6, 4e-6, 8e-6),
               reduces=((2, Line((0, 1e9), (1e-5, 0.3))), (8, Line((0, 1e9), (4e-5, 1.2)))))
EXAMPLES = ROOT / "examples/predict"


def seconds(load: Workload, machine: Machine, ranks: int, sync: str, weak: bool = True, seed: int = 0) -> float:
    return simulate(load, machine, ranks, parse_sync(sync), weak, np.random.default_rng(seed)).seconds


@pytest.mark.parametrize("weak", [True, False])
@pytest.mark.parametrize("machine", [FLAT, DEEP], ids=lambda m: m.name)
@pytest.mark.parametrize("sync", ["allreduce", "ring", "tree", "server:1", "server:4", "local:1", "local:8", "gossip"])
def test_without_jitter_and_overlap_the_simulation_is_the_formula(sync, machine, weak):
    if sync == "gossip":  # there the formula has the mean partner; exact where all are alike
        machine = replace(machine, ranks_per_node=1)
    for ranks in (1, 2, 4, 6, 8, 64, 200, 1024):
        assert seconds(LOAD, machine, ranks, sync, weak) == pytest.approx(
            formula(LOAD, machine, ranks, parse_sync(sync), weak), rel=1e-9)


def test_a_ring_is_its_rounds_message_by_message():
    rng = np.random.default_rng(3)
    for ranks in (2, 3, 7, 16):
        start, cost = rng.random(ranks), 0.01
        at = start.copy()
        for _ in range(2 * (ranks - 1)):
            at = np.maximum(at, np.roll(at, 1)) + cost  # a rank sends on what its left neighbour sent before
        assert at == pytest.approx(np.full(ranks, start.max() + 2 * (ranks - 1) * cost))
    slow = replace(FLAT, spread=(0.2,))
    case = replace(LOAD, work=Line((0, 1), (0, 1e-3)), update_seconds=0, meetings=0)
    factors = 1 + 0.2 * np.random.default_rng(5).uniform(-math.sqrt(3), math.sqrt(3), 16)
    rounds = 30 * FLAT.hop(100e6 / 16)
    assert seconds(case, slow, 16, "ring", seed=5) == pytest.approx(0.032 * factors.max() + rounds)


def test_servers_queue_as_events_one_by_one():
    """The same system from a heap of events: each worker computes, waits for its turn at the server, goes on."""
    load, workers, servers = replace(LOAD, jitter=normal(0.05)), 12, 2
    part, latency, link = 2 * 100e6 / servers / FLAT.servers, FLAT.hop(0), 2 * (FLAT.hop(100e6) - FLAT.hop(0))
    for compute in (0.034, 0.5, 1.5):
        load = replace(load, work=Line((0,), (compute,)))
        rng = np.random.default_rng(1)
        events = [(compute * rng.choice(load.jitter) + latency, worker) for worker in range(workers)]
        heapq.heapify(events)
        free, ends = 0.0, []
        while len(ends) < 200 * workers:
            at, worker = heapq.heappop(events)
            free = max(free, at) + part
            ends.append(max(free, at + link) + latency)
            heapq.heappush(events, (ends[-1] + compute * rng.choice(load.jitter) + latency, worker))
        each = (ends[-1] - ends[len(ends) // 2]) / (len(ends) / 2) * workers
        assert seconds(load, FLAT, workers, f"server:{servers}") == pytest.approx(each, rel=0.02)


def test_overlap_hides_what_fits_behind_backward():
    whole, machine = replace(LOAD, meetings=0), replace(FLAT, hop=Line((0, 1e9), (1e-7, 0.5)))
    backward, none = 34e-3 * 2 / 3, seconds(whole, machine, 64, "allreduce")
    exchange = none - seconds(whole, machine, 1, "allreduce")
    for buckets in (2, 5, 20):
        cut = seconds(replace(whole, buckets=buckets), machine, 64, "allreduce")
        assert cut < none
        # The first bucket comes after its part of backward, all others behind each other or behind backward's end.
        late = 2 * 63 * 1e-7 * (buckets - 1)  # each bucket has a ring's latencies of its own
        least = max(backward + exchange / buckets, backward / buckets + exchange)
        assert 35e-3 - backward + least - 1e-9 <= cut <= 35e-3 - backward + least + late + 1e-9


def test_runs_are_predicted_with_the_buckets_that_oars_sends_between_hosts():
    machine = replace(FLAT, hop=Line((0, 1e9), (1e-4, 0.5)))
    as_run, whole = replace(LOAD, buckets=0), replace(LOAD, buckets=1)
    for hosts in (2, 4, 16):  # 100 MB in pieces of 1 MiB
        cut = seconds(replace(LOAD, buckets=95), machine, hosts, "allreduce")
        assert seconds(as_run, machine, hosts, "allreduce") == cut < seconds(whole, machine, hosts, "allreduce")
    for hosts in (1, 17, 64):
        assert seconds(as_run, machine, hosts, "allreduce") == seconds(whole, machine, hosts, "allreduce")


def test_synchronous_ranks_wait_for_the_slowest_and_gossip_does_not():
    load = replace(LOAD, jitter=normal(0.05), nbytes=1.0, meetings=0)
    times = {n: seconds(load, FLAT, n, "allreduce") for n in (2, 16, 256, 4096)}
    for n, time_ in times.items():  # the mean of the largest of n
        largest = np.random.default_rng(0).choice(load.jitter, (400_000 // n, n)).max(1).mean()
        wire = 2 * (n - 1) * FLAT.hop(1 / n)
        assert time_ - wire == pytest.approx(35e-3 * largest, rel=0.01)
    assert 35e-3 < seconds(load, FLAT, 4096, "gossip") < 35e-3 * 1.08 < times[4096] - 8190e-5
    steps = seconds(load, FLAT, 256, "local:16") - 510e-5 / 16  # sixteen steps' jitter nearly cancels out
    assert 35e-3 < steps < 35e-3 * 1.05 < times[256] - 510e-5


def test_ranks_that_share_a_node_slow_each_other_down():
    quiet = replace(LOAD, nbytes=1.0, meetings=0)
    assert seconds(quiet, DEEP, 8, "allreduce") == pytest.approx(34e-3 / 0.69 + 1e-3 / 0.3, rel=2e-3)
    assert seconds(quiet, DEEP, 4, "allreduce") == pytest.approx(34e-3 / 0.88 + 1e-3 / 0.6, rel=2e-3)


def test_strong_scaling_is_paid_for_by_the_rank_with_most_rows():
    own = replace(LOAD, nbytes=0.0, meetings=0, work=Line((0, 1), (0, 1e-3)), update_seconds=0)
    free = replace(FLAT, hop=Line((0, 1e9), (0.0, 0.0)))
    for ranks in (1, 3, 100, 512, 4000):
        assert seconds(own, free, ranks, "ring", False) == pytest.approx(1e-3 * math.ceil(512 / ranks))


def test_bands_widen_with_what_is_not_known_and_hold_the_prediction():
    known, vague = (replace(FLAT, error=e) for e in (0.01, 0.5))
    narrow, wide = (point(LOAD, m, 64, Sync(), True) for m in (known, vague))
    assert narrow.low <= narrow.seconds <= narrow.high and wide.low <= wide.seconds <= wide.high
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low) > 0
    assert narrow.seconds == pytest.approx(wide.seconds)
    assert narrow.efficiency == pytest.approx(formula(LOAD, FLAT, 1, Sync(), True) / narrow.seconds)


def test_the_number_of_ranks_beyond_which_more_do_not_pay():
    load = replace(LOAD, batch=64, work=Line((0, 1), (0, 1e-3)), update_seconds=0, nbytes=0.0, meetings=0)
    free = replace(FLAT, hop=Line((0, 1e9), (0.0, 0.0)))
    assert ending(load, free, 4096, Sync(), False) == (
        "beyond 64 ranks more do not pay: twice as many give 1.00 times the samples a second")
    assert ending(load, free, 4096, Sync(), True) == "more ranks pay up to 4,096, as far as this was looked at"
    one = ending(replace(load, nbytes=1e6), replace(free, servers=2e8), 64, Sync("server", 1), True)
    assert one.startswith("beyond 4 ranks")  # 32 ms of work, 10 at the server: 4.2 workers fill it


def test_a_hundred_thousand_ranks_take_seconds():
    load, machine = replace(LOAD, jitter=normal(0.05)), replace(DEEP, spread=(0.0, 0.02, 0.02, 0.02))
    began = time.process_time()
    for sync in ("allreduce", "server:64", "gossip", "local:8"):
        assert point(load, machine, 100_000, parse_sync(sync), True).seconds > 0.035
    assert time.process_time() - began < 30


def test_runs_with_other_batches_tell_what_other_rows_take():
    line = through([256, 16], [0.31, 0.03], np.ones(2))
    assert line(16) == 0.03 and line(136) == pytest.approx(0.17) and line(512) == pytest.approx(0.31 + 256 * 0.28 / 240)
    assert line(0) == pytest.approx(0.03 - 16 * 0.28 / 240)
    assert through([64, 64], [0.1, 0.1], np.ones(2))(32) == pytest.approx(0.05)  # one number of rows: in proportion
    assert through([64, 66], [0.1, 0.12], np.ones(2))(130) == pytest.approx(0.22)  # ... or nearly one
    assert through([64, 32], [0.1, 0.04], np.ones(2))(0) == 0  # nothing takes less than no time
    bent = through([512, 32, 256], [0.9, 0.05, 0.36], np.ones(3))  # too much for a cache
    assert bent(128) == pytest.approx(0.05 + 96 / 224 * 0.31)
    assert through([64, 64], [0.1, 0.3], np.array([10.0, 1e-6]))(64) == pytest.approx(0.1)  # less sure, less counted


def a_run(folder: Path, ranks: int, rows: int, work: float, update: float, exchange: float) -> Seen:
    """A run folder with these times, seconds a step, jitter of 2 %, and an evaluation in the middle."""
    folder.mkdir()
    rng, now, lines = np.random.default_rng(ranks * rows), 1e9, []
    for step in range(1, 81):
        took = (work + update) * (1 + 0.02 * rng.standard_normal()) + exchange + (5.0 if step == 40 else 0)
        now += took
        lines.append({"step": step, "loss": 1.0, "samples_per_s": rows * ranks / took,
                      "exchange_share": exchange / took, "time": now})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spent = {"data": 8 * work, "forward": 24 * work, "backward": 48 * work, "update": 80 * update,
             "exchange": 80 * exchange, "other": 5.0}
    for rank in range(ranks):
        (folder / f"times-{rank}.jsonl").write_text(json.dumps({"step": 80, "time": now, **spent}) + "\n")
    (folder / "run.json").write_text(json.dumps({"script": "a.py", "ranks": ranks, "threads": 1}))
    (folder / "summary.json").write_text(json.dumps({"exchange_bytes": 13e6, "meetings": 7.0 if ranks > 1 else 0.0}))
    return look(Run(folder))


def test_more_ranks_are_predicted_from_runs_on_one_and_two(tmp_path):
    """Run folders as a machine with known curves would leave them: the same machine's 4 and 8 ranks follow."""
    def truth(ranks: int, rows: float) -> tuple[float, float, float]:
        work, update = (5e-3 + rows * 1e-3) / DEEP.at("speed", ranks), 6e-3 / DEEP.at("memory", ranks)
        return work, update, DEEP.reduce(ranks, 13e6) + 5 * DEEP.at("meeting", ranks) if ranks > 1 else 0.0

    seen = [a_run(tmp_path / f"{n}-{rows}", n, rows, *truth(n, rows)) for n, rows in ((1, 256), (1, 16), (2, 128))]
    load = from_runs(seen, DEEP)
    assert (load.batch, load.rows, load.nbytes, load.meetings) == (256, 256, 13e6, 7)
    assert [load.work(n) for n in (16, 64, 256)] == pytest.approx([0.021, 0.069, 0.261], rel=0.02)
    assert load.update_seconds == pytest.approx(6e-3, rel=0.02) and load.forward == pytest.approx(0.4)
    assert load.jitter.std() == pytest.approx(0.02, rel=0.3) and load.error < 0.02
    for ranks in (4, 8):
        waits = np.random.default_rng(0).choice(load.jitter, (9999, ranks)).max(1).mean()
        work, update, exchange = truth(ranks, 256 / ranks)
        assert seconds(load, DEEP, ranks, "allreduce", False) == pytest.approx((work + update) * waits + exchange,
                                                                              rel=0.02)


def test_what_is_shipped_can_be_read():
    assert shipped() == ["blue-waters", "laptop", "minotauro"]
    for name in shipped():
        machine = find(name)
        assert machine.at("speed", 1) == 1 and machine.name in (EXAMPLES.parent.parent / "docs/predict.md").read_text()
    for path in EXAMPLES.glob("*.toml"):
        try:
            from_file(path)
        except WatchError:
            read(path)


@pytest.mark.parametrize(("text", "says"), [
    ("nodes = 4", "4 nodes, but no [network]: give its latency and bandwidth"),
    ("ranks_per_node = 2", "2 ranks on a node, but no [[reduce]]: give its ranks, latency and bandwidth"),
    ("nodes = 0", "nodes is 0: a number is needed, 1 or more"),
    ("[network]\nlatency = 'low'\nbandwidth = 1", "latency of [network] is 'low': a number is needed, 0 or more"),
    ("[network]\nlatency = 1e-6", "bandwidth of [network] is missing"),
    ("[node]\nranks = [1, 2]\nspeed = [1.0]", "speed of [node] must be a list of 2 numbers, one for each of its ranks"),
    ("[node]\nranks = [4, 2]", "ranks of [node] must grow, from 1 on: [4, 2]"),
    ("[network]\nbytes = [8, 4]\nseconds = [1, 1]", "bytes of [network] must grow: [8.0, 4.0]"),
])
def test_what_is_wrong_in_a_machines_file_is_one_line(tmp_path, text, says):
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(WatchError) as error:
        read(path)
    assert str(error.value) == f"{path}: {says}"


def test_measured_lines_go_on_as_they_end():
    line = Line((8, 1e6, 2e6), (1e-6, 1e-3, 3e-3))
    assert line(0) == 1e-6 and line(1.5e6) == pytest.approx(2e-3) and line(4e6) == pytest.approx(7e-3)
