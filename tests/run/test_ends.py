"""How runs end: exit codes, tracebacks, signals, and no process left behind. Every test starts real ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from running import environment, left_behind

RANK = "import os, sys, time\nrank = int(os.path.basename(os.readlink('/proc/self/fd/1'))[5:-4])\n"


def write(tmp_path: Path, text: str) -> None:
    """A script that knows its rank, which no user's script does: to fail on one rank only."""
    (tmp_path / "script.py").write_text(RANK + textwrap.dedent(text))


def run(tmp_path: Path, n: int, text: str, **how) -> subprocess.CompletedProcess:
    write(tmp_path, text)
    command = [sys.executable, "-m", "oars", "run", "-n", str(n), "--name", "r", "script.py"]
    return subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, **how)


@pytest.mark.parametrize("n", [1, 2])
def test_exit_codes_are_those_of_plain_python(tmp_path, n):
    (tmp_path / "a").mkdir()
    assert run(tmp_path, n, "print('x'); sys.exit(3)").returncode == 3
    (tmp_path / "oars-runs").rename(tmp_path / "old")
    done = run(tmp_path, n, "import atexit; atexit.register(print, 'last'); print('x'); sys.exit('no luck')")
    assert (done.returncode, done.stdout) == (1, "x\nlast\n")
    assert done.stderr.startswith("no luck\noars: ")


def test_a_traceback_is_what_plain_python_prints_and_is_shown_once(tmp_path):
    text = """
        def f(x):
            raise ValueError(x) from KeyError('a')
        time.sleep(0.1)
        f('bad')
    """
    one = run(tmp_path, 1, text)
    plain = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, stdout=open(tmp_path / "rank-0.log", "w"),
                           stderr=subprocess.PIPE, text=True)
    (tmp_path / "oars-runs").rename(tmp_path / "old")
    three = run(tmp_path, 3, text)
    assert one.stderr == plain.stderr + "oars: 1 rank, 0 steps, exit code 1, oars-runs/r\n"
    assert three.stderr == (plain.stderr + "oars: rank 0 of 3 failed\noars: 3 ranks, 0 steps, exit code 1, "
                            "oars-runs/r\n")
    assert one.returncode == three.returncode == 1


def test_a_failure_on_another_rank_names_it_and_ends_all_within_5_seconds(tmp_path):
    began = time.time()
    done = run(tmp_path, 3, """
        print('begin')
        if rank == 2:
            import nosuchmodule
        time.sleep(60)
    """)
    assert time.time() - began < 6
    assert done.returncode == 1
    assert done.stdout == "begin\n"
    assert done.stderr.startswith("oars: rank 2 of 3 failed:\nTraceback (most recent call last):\n")
    assert "ModuleNotFoundError: No module named 'nosuchmodule'\noars: 3 ranks" in done.stderr
    assert "/oars/" not in done.stderr
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(("how", "code", "says"), [
    ("os.kill(os.getpid(), 9)", 137, "oars: rank 1 of 2 was killed by SIGKILL\n"),
    ("os._exit(5)", 5, "oars: rank 1 of 2 exited with code 5\n"),
    ("import ctypes; ctypes.string_at(0)", 139, "oars: rank 1 of 2 was killed by SIGSEGV\n"),
    ("os.abort()", 134, "oars: rank 1 of 2 was killed by SIGABRT\n"),
    ("sys.exit(4)", 4, "oars: rank 1 of 2 exited with code 4\n"),
])
def test_a_rank_that_dies_without_an_exception_is_named(tmp_path, monkeypatch, how, code, says):
    monkeypatch.setenv("OARS_SURVIVE", "0")  # as where MPI has no ULFM
    done = run(tmp_path, 2, f"""
        if rank == 1:
            {how}
        time.sleep(60)
    """)
    assert (done.returncode, done.stderr.split("oars: 2 ranks")[0]) == (code, says)
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(("how", "code"), [("os._exit(0)", 0), ("os._exit(6)", 6)])
def test_os_exit_on_all_ranks_is_an_end_like_any(tmp_path, how, code):
    done = run(tmp_path, 2, f"print('done', flush=True); {how}")
    assert (done.returncode, done.stdout) == (code, "done\n"), done.stderr


def test_an_abort_of_all_ranks_is_told_with_its_signal(tmp_path):
    done = run(tmp_path, 2, "print('begun', flush=True); time.sleep(0.5); os.abort()")
    assert (done.returncode, done.stdout) == (134, "begun\n"), done.stderr
    assert "killed by SIGABRT" in done.stderr and "exit code 0" not in done.stderr, done.stderr
    assert not left_behind(tmp_path)


def test_an_abort_of_one_rank_is_a_death_that_the_others_survive(tmp_path):
    done = run(tmp_path, 2, """
        import torch
        if rank == 1:
            os.abort()
        model = torch.nn.Linear(4, 1)
        for _ in range(3):
            model(torch.ones(6, 4)).sum().backward()
        print('done')
    """)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "SIGABRT" in done.stderr, done.stderr


def test_one_rank_killed_by_a_signal(tmp_path):
    done = run(tmp_path, 1, "os.kill(os.getpid(), 11)")
    assert (done.returncode, done.stderr.splitlines()[0]) == (139, "oars: rank 0 was killed by SIGSEGV")


WITH_CHILDREN = """
    import multiprocessing, subprocess
    def work():
        time.sleep(60)
    if __name__ == '__main__':
        multiprocessing.get_context('spawn').Process(target=work).start()
        multiprocessing.get_context('fork').Process(target=work).start()
        subprocess.Popen(['sleep', '60'])
        time.sleep(0.3)
        print('ready')
        {}
"""


def start(tmp_path: Path, n: int, text: str) -> subprocess.Popen:
    """Start a run and wait until the script says it is ready."""
    write(tmp_path, text)
    process = subprocess.Popen([sys.executable, "-m", "oars", "run", "-n", str(n), "--name", "r", "script.py"],
                               cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(tmp_path, number):
    process = start(tmp_path, 2, WITH_CHILDREN.format("time.sleep(60)"))
    assert len(left_behind(tmp_path)) >= 8
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert not left_behind(tmp_path)


def test_a_killed_supervisor_takes_its_ranks_along(tmp_path):
    process = start(tmp_path, 2, "print('ready'); time.sleep(60)")
    process.kill()
    process.communicate()
    deadline = time.time() + 5
    while left_behind(tmp_path) and time.time() < deadline:
        time.sleep(0.1)
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("n", [1, 2])
def test_ctrl_c_is_a_keyboard_interrupt_in_the_script(tmp_path, n):
    process = start(tmp_path, n, """
        time.sleep(0.5)  # until every rank is here
        try:
            print('ready')
            time.sleep(60)
        except KeyboardInterrupt:
            if rank == 0:
                time.sleep(2)  # the voice writes the real file, and is not killed because others are done
            print('saving')
            raise
    """)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "saving\n")
    assert err.count("KeyboardInterrupt") == 1
    assert not left_behind(tmp_path)


def test_ctrl_c_comes_at_the_same_step_where_an_adapter_polls(tmp_path):
    process = start(tmp_path, 3, """
        import gc
        from mpi4py import MPI
        record = next(found for found in gc.get_objects() if type(found).__name__ == 'Record')
        record.polls = True
        step = 0
        try:
            while True:
                if MPI.COMM_WORLD.allreduce(record.interrupted):
                    record.raise_interrupt()
                step += 1
                if step == 100:
                    print('ready')
        except KeyboardInterrupt:
            print(MPI.COMM_WORLD.allgather(step))
            time.sleep(4)  # saving what the user wants kept may take longer than a rank has to take the signal
            print('saved')
    """)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    steps, saved = out.splitlines()
    assert len(set(eval(steps))) == 1 and saved == "saved"
    assert process.returncode == 0, err  # the script's own choice


def test_ctrl_c_ends_ranks_that_do_not_listen(tmp_path):
    began = time.time()
    process = start(tmp_path, 2, """
        import signal
        if rank == 1:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        time.sleep(0.5)
        print('ready')
        time.sleep(60)
    """)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode == 130 and time.time() - began < 10
    assert not left_behind(tmp_path)


def test_a_second_ctrl_c_kills(tmp_path):
    process = start(tmp_path, 2, """
        time.sleep(0.5)
        for i in range(10):
            try:
                print('ready' if i == 0 else '')
                time.sleep(60)
            except KeyboardInterrupt:
                print('again', flush=True)
    """)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "again\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert not left_behind(tmp_path)


def test_a_reader_that_goes_away_ends_the_run(tmp_path):
    write(tmp_path, "for i in range(100000): print(i); time.sleep(0.001)")
    done = subprocess.run(f"{sys.executable} -m oars run -n 2 script.py | head -1", shell=True, cwd=tmp_path,
                          env=environment(), capture_output=True, text=True, timeout=30)
    assert done.stdout == "0\n" and "Traceback" not in done.stderr
    assert not left_behind(tmp_path)
