"""Hangs: the rank that the others wait for is named, with what it is in, and never when nobody waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from running import Run, finished, left_behind

from oars.engine.board import Board, Slot
from oars.supervisor.stall import slow_rank
from oars.supervisor.stall_report import judge

# A script that knows its rank and its world, which no user's script does: to part from the others without torch.
WORLD = """
import gc, os, sys, threading, time
import numpy
world = next(found for found in gc.get_objects() if type(found).__name__ == 'World')
rank, one = world.rank, numpy.ones(1)
def meet_the_living():
    from oars.engine.world import RankLost
    try:
        world.allreduce(one)
    except RankLost:
        world.adopt()
        world.allreduce(one)
"""


def begin(folder: Path, n: int, text: str, *options: str, **more) -> Run:
    """A script that begins with all this, on n ranks in the background."""
    (folder / "script.py").write_text(WORLD + textwrap.dedent(text))
    return Run(folder, "-n", n, *options, "script.py", name="r", limit=30, **more)


def test_a_stopped_rank_is_named_and_the_run_goes_on_with_it(tmp_path):
    run = begin(tmp_path, 3, """
        def beside(): time.sleep(1000)
        threading.Thread(target=beside, daemon=True).start()
        def meet():
            world.allreduce(one)
        for step in range(150):
            meet()
            time.sleep(0.01)
            if step == 20:
                print('ready', flush=True)
    """, "--stall", "1.5")
    assert run.process.stdout.readline() == "ready\n"
    pid = int((run.folder / "pid-1").read_text())
    os.kill(pid, signal.SIGSTOP)
    told = run.until("every thread's stack: oars-runs/r/stall-1.txt\n")
    os.kill(pid, signal.SIGCONT)
    assert run.end() == 0, run.err
    assert f"for rank 1 of 3 (pid {pid})\n  rank 1 is stopped (SIGSTOP): kill -CONT {pid} resumes it\n" in told
    assert "\n  ranks 0, 2 wait in collective" in told
    assert " (allreduce) at script.py:17 in meet: world.allreduce(one)\n" in told
    assert "oars: the ranks continue, after" in run.err
    full = (run.folder / "stall-1.txt").read_text()
    stopped, waiting = full.split("=== rank 1 of 3")[1].split("=== rank 0 of 3")
    assert "stacks taken by py-spy" in stopped and " in beside\n" in stopped and "script.py\", line " in stopped
    assert "stacks taken by itself" in waiting and " in beside\n" in waiting and " in meet\n" in waiting
    event, = run.events("stall")
    assert (event["rank"], event["pid"], event["why"]) == (1, pid, "away") and event["state"].startswith("is stopped")
    assert event["host"] and 1.4 < event["seconds"] < 4 and [other["rank"] for other in event["others"]] == [0, 2]
    assert len(run.events("stall over")) == 1
    assert not {"board", "stack-0.txt", "stack-1.txt"} & set(os.listdir(run.folder))


def test_a_rank_that_sleeps_for_ever_is_reported_and_the_run_stopped_if_so_asked(tmp_path):
    run = begin(tmp_path, 2, """
        def load(): time.sleep(1000)
        if rank == 1:
            load()
        world.allreduce(one)
    """, "--stall", "1", "--on-stall", "abort")
    assert run.end() == 75
    assert "is waiting for something itself" in run.err and "and uses no CPU\n" in run.err
    assert "    at   script.py:14 in load: def load(): time.sleep(1000)\n" in run.err
    assert "    from script.py:16 in <module>: load()\n" in run.err
    assert "rank 0 waits in collective" in run.err and "script.py:17 in <module>" in run.err
    assert "oars: the run is stopped: --on-stall abort\noars: 2 ranks, 0 steps, exit code 75" in run.err
    assert not left_behind(tmp_path)


def test_a_rank_stopped_within_a_collective_is_blamed_though_all_are_in_the_same(tmp_path):
    run = begin(tmp_path, 3, """
        import signal
        if rank == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        else:
            time.sleep(0.6)
        world.allreduce(one)
    """, "--stall", "1", "--on-stall", "abort")
    assert run.end() == 75
    assert "s for rank 1 of 3 (pid" in run.err and "rank 1 is stopped (SIGSTOP)" in run.err
    assert "    at   script.py:19 in <module>: world.allreduce(one)\n" in run.err


def test_a_deadlock_is_given_up_after_five_more_periods(tmp_path):
    run = begin(tmp_path, 2, """
        lock = threading.Lock()
        world.allreduce(one)
        if rank == 0:
            with lock:
                lock.acquire()
        world.allreduce(one)
    """, "--stall", "1", OARS_SURVIVE="0")
    began = time.time()
    assert run.end() == 75
    assert time.time() - began > 6 * 1
    assert run.err.count("oars: stalled: ") == 1 and ".py:18 in <module>: lock.acquire()" in run.err
    assert "rank 0 of 2 (pid" in run.err and "shows no sign of life" in run.err
    assert "the run cannot continue without rank 0 (no fault tolerance here)" in run.err


def test_a_rank_that_computes_is_reported_and_left_alone(tmp_path):
    run = begin(tmp_path, 2, """
        if rank == 1:
            end = time.clock_gettime(time.CLOCK_MONOTONIC) + 7.5
            while time.clock_gettime(time.CLOCK_MONOTONIC) < end:
                sum(range(10000))
        world.allreduce(one)
    """, "--stall", "1")
    assert run.end() == 0, run.err
    assert "rank 1 is computing (" in run.err and "of a core), perhaps something long\n" in run.err
    assert "rank 1 of 2 (pid" in run.err and "is at work" in run.err
    assert run.err.count("oars: stalled: ") == 1 and run.err.count("oars: stalled for") <= 3


def test_a_rank_that_ends_its_script_early_is_named(tmp_path):
    run = begin(tmp_path, 3, """
        if rank != 2:
            world.allreduce(one)
    """, "--stall", "1", "--on-stall", "abort")
    assert run.end() == 75
    assert "s: out of step: rank 2 of 3 (pid" in run.err
    assert "rank 2 has ended its script (exit code 0), after" in run.err


def test_a_rank_in_another_collective_ends_the_run_with_one_line_at_once(tmp_path):
    run = begin(tmp_path, 3, """
        def other(): world._meet("barrier", world._barrier, 0)
        if rank == 1:
            other()
        meet_the_living()
    """, "--stall", "60")
    assert run.end() == 1
    assert "oars: the ranks are out of step: rank 0 in allreduce, rank 1 in barrier, rank 2 in allreduce (" in run.err
    assert "Traceback" not in run.err


def test_a_rank_stuck_in_the_kernel_is_called_that(tmp_path):
    os.mkfifo(tmp_path / "stuck")
    run = begin(tmp_path, 2, """
        world.allreduce(one)
        if rank == 1:  # its child waits for a writer before it can start, and it for its child, uninterruptibly
            os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, 'stuck', os.O_RDONLY, 0)])
        world.allreduce(one)
    """, "--stall", "1")
    told = run.until("every thread's stack")
    with open(tmp_path / "stuck", "w"):
        pass
    assert run.end() == 0, run.err
    assert "rank 1 is in uninterruptible I/O (" in told and "at   script.py:16 in <module>: os.posix_spawn(" in told


def test_nobody_waits_so_nothing_is_said(tmp_path):
    run = begin(tmp_path, 2, """
        world.allreduce(one)
        time.sleep(2.2)
        world.allreduce(one)
        print('ready', flush=True)
        print(input())
    """, "--stall", "1", "--on-stall", "abort", stdin=subprocess.PIPE)
    assert run.process.stdout.readline() == "ready\n"
    time.sleep(2.2)
    assert (run.end("late\n"), run.out) == (0, "late\n") and "stall" not in run.err


def test_a_stopped_rank_is_dropped_and_the_others_go_on(tmp_path):
    run = begin(tmp_path, 2, """
        if rank == 1: os.kill(os.getpid(), 19)
        meet_the_living()
        print("went on with", world.size)
    """, "--stall", "1", "--on-stall", "drop")
    assert (run.code, run.out) == (0, "went on with 1\n"), run.err
    assert "oars: dropped rank 1: the others continue\n" in run.err and "1 death survived" in run.err
    assert [event["rank"] for event in run.events("drop")] == [1]
    assert [event["ranks"] for event in run.events("lost")] == [[1]]


def slot(rank: int, done: int = 5, kind: str = "", waited: float = 0.0, gone: bool = False) -> Slot:
    return Slot(rank, 100 + rank, "host", gone, done, kind, 0.0, waited)


@pytest.mark.parametrize(("slots", "held", "found"), [
    ([slot(0), slot(1)], [], None),  # nobody waits
    ([slot(0, kind="input"), slot(1, kind="broadcast")], [], None),  # the user is waited for
    ([slot(0, kind="a"), slot(1), slot(2, kind="a")], [], ("away", (1,), (0, 2), 9, True)),
    ([slot(0, kind="a"), slot(1, gone=True), slot(2)], [], ("away", (2,), (0,), 9, True)),  # not the lost one
    ([slot(0, kind="a"), slot(1, kind="a")], [1], ("away", (1,), (0,), 9, True)),  # stopped within a collective
    ([slot(0, kind="a"), slot(1)], [0], None),  # its own fault, and nobody waits for it
    ([slot(0, kind="a"), slot(1, kind="a")], [], ("network", (), (0, 1), 8, True)),
    ([slot(0, kind="a"), slot(1, kind="b"), slot(2, kind="a")], [], ("out of step", (1,), (0, 2), 7, True)),
    ([slot(0, kind="a"), slot(1, 6, kind="a"), slot(2, kind="a")], [], ("out of step", (1,), (0, 2), 7, True)),
    ([slot(0, kind="a"), slot(1, kind="b")], [], ("out of step", (0, 1), (), 8, False)),  # who is to say
    ([slot(0, kind="end"), slot(1, 6, kind="end")], [], None),  # threads and atexit may take their time
    ([slot(0, kind="end"), slot(1)], [], ("away", (1,), (0,), 9, True)),
    ([slot(0, kind="a"), slot(1, kind="end"), slot(2, kind="a")], [], ("out of step", (1,), (0, 2), 7, True)),
    ([slot(0, kind="a"), slot(1, 6, kind="end"), slot(2, kind="end")], [], ("out of step", (0,), (1, 2), 7, True)),
])
def test_who_is_blamed(slots, held, found):
    assert judge(slots, set(held), {0: 9.0, 1: 8.0, 2: 7.0}) == found


def test_a_slow_rank_is_named_if_it_cost_much_in_a_run_that_was_not_short():
    first = [slot(rank, waited=1.0) for rank in range(4)]
    last = [slot(0, waited=31.0), slot(1, waited=33.0), slot(2, waited=32.0), slot(3, waited=11.0)]
    assert slow_rank(first, last, 100.0) == ["rank 3 (host) was slow: the others waited 21 % of the time for it"]
    assert slow_rank(first, last, 9.0) == []  # short
    assert slow_rank(first, last, 500.0) == []  # 4 %
    assert slow_rank(first, [*last[:3], slot(3, waited=11.0, gone=True)], 100.0) == []  # who is gone is not slow


def test_a_rank_that_is_always_late_does_not_fill_the_screen_and_is_named_at_the_end(tmp_path):
    run = begin(tmp_path, 2, """
        with open(os.environ['OARS_RUN_FOLDER'] + '/metrics.jsonl', 'a') as f:
            f.write('{"step": 1, "loss": 1, "samples_per_s": null, "exchange_share": 0, "time": 0}\\n')
        for epoch in range(5):
            time.sleep(2.3 if rank == 1 else 0.1)  # in all so long that it is no short run
            world.allreduce(one)
    """, "--stall", "1")
    assert run.end() == 0
    assert len(run.events("stall")) >= 4
    said = [line.split(" s ")[0] for line in run.err.splitlines() if line.startswith("oars: stalled: ")]
    assert len(said) == 3  # the first, second and fourth time
    assert run.err.count("from script.py") + run.err.count("at   script.py") == 1
    last = run.err.splitlines()[-1]
    assert last.startswith("oars: rank 1 (") and "was slow: the others waited " in last
    assert 75 < int(last.split("waited ")[1].split(" %")[0]) <= 100


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_board_tells_other_processes_what_ranks_wrote(tmp_path, hosts):
    path = tmp_path / "board"
    board = Board.create(path, 3, hosts)
    assert path.is_symlink() == (hosts == 1)
    if hosts == 2:
        os.pwrite(board.fd, b"elsewhere".ljust(64, b"\0"), 28)  # the supervisor's host
    write = textwrap.dedent("""
        import sys, threading, time
        from oars.engine.board import Board
        board = Board.open(sys.argv[1], 1)
        board.enter('allreduce'); board.leave(1); board.enter('broadcast'); board.gone(2)
        if board.host == 'elsewhere':
            time.sleep(1.2)  # its page has been sent once
        print(threading.active_count())
    """)
    done = finished(tmp_path, sys.executable, "-c", write, path, code=0)
    assert (done.stdout, done.stderr) == (f"{hosts}\n", "")
    slots = board.read()
    assert [(s.done, s.kind, s.gone) for s in slots] == [(0, "", False), (1, "broadcast", False), (0, "", True)]
    assert slots[1].pid and slots[1].host == board.host and abs(time.time() - slots[1].since) < 10
    board.close()
