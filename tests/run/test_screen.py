"""What the user sees: a status line that never disturbs the script's output, and the closing lines."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

from running import environment, oars

from oars.plan import Plan
from oars.supervisor.screen import Screen, closing_lines, status_text

# Steps as an adapter would record them, then silence, then a progress bar, then silence within the bar.
SCRIPT = """
    import json, os, sys, time
    def step(i):
        with open(os.environ['OARS_RUN_FOLDER'] + '/metrics.jsonl', 'a') as f:
            f.write(json.dumps(dict(step=i, loss=1 / i, samples_per_s=800.0, exchange_share=0.1, time=i)) + '\\n')
    lines, columns = os.popen('stty size').read().split()  # a child of any rank may ask
    print('begin', os.environ['COLUMNS'], os.get_terminal_size().columns, lines, columns)
    step(1); step(2)
    time.sleep(0.8)
    print('middle')
    step(3)
    time.sleep(0.7)
    for i in range(5):
        sys.stderr.write(f'\\r{i + 1}/5 done')
        time.sleep(0.4)
    sys.stderr.write('\\n')
    print('end', input('more? '))
"""


def on_a_terminal(folder: Path, *args: str, answer: bytes = b"") -> bytes:
    """Run in a pseudo-terminal of 60 columns and return every byte that came out."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
    process = subprocess.Popen([sys.executable, "-m", "oars", *args], cwd=folder, env=environment(), stdin=slave,
                               stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    out, deadline = b"", time.time() + 30
    while time.time() < deadline:
        if select.select([master], [], [], 0.05)[0]:
            try:
                out += os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if answer and b"more? " in out:
                os.write(master, answer)
                answer = b""
    process.wait(timeout=10)
    os.close(master)
    return out


def screen(data: bytes) -> list[str]:
    """What stands on the terminal in the end: carriage returns, line feeds and erase-to-end-of-line obeyed."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", data.decode()):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, rows = row + 1, [*rows, ""]
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        else:
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part):]
            column += len(part)
    return rows


def test_the_status_line_keeps_out_of_the_way(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    for n in ("1", "2"):
        out = on_a_terminal(tmp_path, "run", "-n", n, "--name", f"r{n}", "script.py", answer=b"yes\n")
        assert b"step 2  loss 0.5  800 samples/s" in out
        assert b"step 3  loss 0.3333  800 samples/s" in out
        assert b"5 done\r\x1b[Kstep" not in out
        lines = screen(out)
        assert lines[:4] == ["begin 60 60 24 60", "middle", "5/5 done", "more? yes"]
        assert lines[4] == "end yes"
        assert [line for line in lines if line.startswith("step")] == []
        assert lines[-1 - int(n)].startswith(f"oars: {n} rank") and lines[-1] == ""
        assert n == "1" or lines[-2].startswith("oars: nothing was split: every rank did all of the work")


def test_quiet_means_no_status_line(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).replace("print('end', input('more? '))", ""))
    out = on_a_terminal(tmp_path, "run", "-n", "1", "--quiet", "script.py")
    assert b"samples/s" not in out and b"\x1b" not in out and b"5/5 done" in out


def test_the_status_line_averages_the_last_second(tmp_path):
    lines = [{"step": i, "loss": 2.0, "samples_per_s": 10 / dt, "exchange_share": 0, "time": t}
             for i, dt, t in [(1, 1, 0.0), (2, 0.5, 0.5), (3, 0.1, 0.6), (4, 0.4, 1.0)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
    assert status_text(tmp_path) == "step 4  loss 2  30 samples/s"
    assert status_text(tmp_path / "nowhere") == ""


def test_the_closing_line_tells_what_the_run_was(tmp_path):
    summary = {"ranks": 4, "steps": 938, "samples": 60000, "seconds": 10.0, "samples_per_s": 12345.4,
               "exchange_seconds": 0.71, "gathers": [
                   {"site": "train.py:31 matmul", "times": 938, "seconds": 0.41, "bytes": 12_000_000},
                   {"site": "train.py:9 getitem", "times": 3, "seconds": 0.1, "bytes": 12}]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert closing_lines(tmp_path, Plan(ranks=4), 0) == [
        f"4 ranks, 938 steps, 12,345 samples/s, 7.1 % of the time in exchange, {tmp_path}",
        "gathered at train.py:31 (matmul): 4.1 % of the time, 938 times, 12 MB"]
    (tmp_path / "summary.json").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "samples_per_s": null, "time": 3}\n')
    assert closing_lines(tmp_path, Plan(ranks=1), 137) == [f"1 rank, 1 step, exit code 137, {tmp_path}"]


def test_what_mpi_says_of_a_death_is_not_shown(tmp_path, capfd):
    shout = ["An error occurred in Socket closed", "reported by process [2156658689,0]", "on a NULL communicator",
             "   and MPI will try to terminate your MPI job as well)"]
    lines = ["before", *(f"[n1:00000] *** {line}" for line in shout), "[INFO:3] *** mine ***"[5:], "after"]
    (tmp_path / "rank-0.err").write_text("".join(line + "\n" for line in lines))
    screen = Screen(tmp_path, show=True, quiet=True, one_stream=False)
    screen.update(to_the_end=True)
    assert capfd.readouterr().err.splitlines() == ["before", ":3] *** mine ***", "after"]


BAR = """
    import sys, time, torch
    from torch import nn
    for i in range(3):
        sys.stderr.write(f"\\r {i}/3 steps")
        sys.stderr.flush()
        if i == 1:
            x = torch.randn(8, 4)
            torch.compile(lambda a: a + 1)(x)
            print("said", file=sys.stdout)
    sys.stderr.write("\\n2026-11-18 20:00:00.000001: I tensorflow/core/framework/local_rendezvous.cc:407] "
                     "Local rendezvous is aborting with status: OUT_OF_RANGE: End of sequence\\n"
                     "\\t [[{{node IteratorGetNext}}]]\\nend\\n")
"""


def test_our_lines_begin_lines_and_tensorflows_rendezvous_is_not_shown(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(BAR))
    done = oars(tmp_path, "run", "-n", "2", "script.py", code=0)
    lines = done.stderr.split("\n")  # (read as text, in which \r is \n)
    assert lines[:3] == ["", " 0/3 steps", " 1/3 steps"]
    assert lines[3].startswith("oars: compiled function <lambda> runs uncompiled")
    assert lines[4:7] == ["", " 2/3 steps", "end"] and lines[7].startswith("oars: 2 ranks")


def test_a_run_in_which_nothing_was_split_says_so(tmp_path):
    """A framework that is not known, and a model whose rows meet; not one that is split."""
    (tmp_path / "plain.py").write_text("import numpy\nprint(numpy.arange(3).sum())\n")
    (tmp_path / "whole.py").write_text(textwrap.dedent(TRAINING).replace("HERE", "x @ self.w + x.cumsum(0)"))
    (tmp_path / "rows.py").write_text(textwrap.dedent(TRAINING).replace("HERE", "x @ self.w"))
    says = {name: oars(tmp_path, "run", "-n", "2", "--name", name, f"{name}.py", code=0).stderr
            for name in ("plain", "whole", "rows")}
    assert "oars: nothing was split: every rank did all of the work (oars splits batches in " in says["plain"]
    assert ("oars: no step was split: every rank did all of the work (why, and what to change: oars explain whole)\n"
            in says["whole"])
    assert "split: every rank" not in says["rows"]
    split = {name: json.loads((tmp_path / "oars-runs" / name / "summary.json").read_text())["split_steps"]
             for name in says}
    assert split == {"plain": 0, "whole": 0, "rows": 4}


TRAINING = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 4))
        def forward(self, x):
            return HERE

    model, x = Model(), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
