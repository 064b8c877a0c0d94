"""Ranks that do not do the same: one clear line, and never another's message. Every test starts real ranks."""

from __future__ import annotations

import textwrap
import time

import pytest
from running import Run, left_behind

BEGIN = """
import os, sys, threading, time
rank = int(os.path.basename(os.readlink('/proc/self/fd/1'))[5:-4])
import torch
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(1)
x, y = torch.randn(40, 6, generator=g), torch.arange(40) % 3
batches = list(DataLoader(TensorDataset(x, y), batch_size=10))
(a, b), (c, _), *_ = batches
"""


def run(tmp_path, n: int, text: str) -> tuple[Run, float]:
    (tmp_path / "script.py").write_text(BEGIN + textwrap.dedent(text))
    began = time.time()
    found = Run(tmp_path, "-n", n, "--stall", 20, "script.py", limit=60)
    assert found.code is not None
    return found, time.time() - began


@pytest.mark.parametrize(("one", "other", "n"), [
    ("a.sum()", "print(c)", 2),
    ("a.sum()", "a.double().sum()", 3),
    ("time.sleep(0.3); a.sum(0)", "c[:, :3].sum(0)", 2),
    ("a.sum()", "time.sleep(0.3); print(c)", 3),
], ids=["kind", "dtype", "shape", "late"])
def test_meetings_that_do_not_belong_together_are_one_line(tmp_path, one, other, n):
    found, seconds = run(tmp_path, n, f"""
        if rank == 1:
            {other}
        else:
            {one}
        print('not reached')
    """)
    assert "the ranks are out of step: rank 0 in " in found.err, str(found)
    assert "script.py:14" in found.err and "script.py:12" in found.err and "Traceback" not in found.err, str(found)
    assert found.code == 1 and seconds < 15 and "not reached" not in found.out
    assert not left_behind(tmp_path)


def test_the_same_operation_at_another_line_is_another_meeting(tmp_path):
    """Numbers of one kind and shape: nobody would notice."""
    found, _ = run(tmp_path, 2, """
        total = 0
        for i in range(3):
            if rank == 1 and i == 2:
                total += c.sum()
            else:
                total += a.sum()
        print(total)
    """)
    assert found.code == 1, str(found)
    assert "rank 0 in allreduce at script.py:16, rank 1 in allreduce at script.py:14" in found.err, str(found)


def test_a_batch_in_a_thread_is_refused(tmp_path):
    found, _ = run(tmp_path, 2, """
        def work():
            try:
                print(float(holder[0].sum()))
            except RuntimeError as error:
                print(error)
        holder = []
        thread = threading.Thread(target=lambda: (time.sleep(0.5), work()))
        thread.start()
        holder.append(a * 2)
        thread.join()
        pid = os.fork()
        if pid == 0:
            work()
            os._exit(0)
        os.waitpid(pid, 0)
        print(f"{a.sum().item():.4f}")
    """)
    assert found.code == 0, str(found)
    told = [line for line in found.lines if line.startswith("oars: ")]
    assert len(told) == 2, found.lines
    assert "cannot be gathered in a thread" in told[0] and "in a forked child" in told[1], found.lines


@pytest.mark.parametrize("n", [2, 3])
def test_an_error_of_one_rank_in_an_operation_that_looks_at_nothing_is_raised_on_all(tmp_path, n):
    """It comes late on the others, yet is the same, and nobody waits."""
    found, seconds = run(tmp_path, n, """
        net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())
        for i, (a, b) in enumerate(batches * 2):
            try:
                if i == 5:  # no operation that could fail, but a tensor that fails here alone
                    net[0].weight.data = net[0].weight.data.new_zeros(4, 5 if rank == 1 else 6)
                out = net(a)
                print(i, f"{out.sum().item():.4f}")
            except RuntimeError as error:
                print(i, "failed", str(error)[:20])
                net[0].weight.data = torch.zeros(4, 6)
        print('end')
    """)
    assert found.code == 0 and seconds < 15, str(found)
    assert found.lines[-1] == "end" and sum("failed" in line for line in found.lines) == 1, found.lines
