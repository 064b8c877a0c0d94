"""The contract, kept: every script in ``scripts/`` does on 2, 3 and 4 ranks what it does on one process.

A script is run once by ``python`` and once by ``oars run`` for each number of ranks, each in a folder of its own. The
printed lines, the files left behind and (to the bit) the weights of the ranks are compared. Scripts that get on with
each other share a process, since most of the time goes into starting ranks. To look at one scene alone:
``oars run -n 2 tests/contract/scripts/losses.py by_hand``.
"""

from __future__ import annotations

import re
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
from compare import files_differ, lines_differ
from running import Run

HERE = Path(__file__).parent
GROUPS = [
    ["loaders", "loaders_workers", "batches"],
    ["handmade", "loops", "loops_more"],
    ["losses", "losses_model", "models", "batchnorm"],
    ["tensors", "reductions", "files"],
    ["output", "tutorial"],  # what these write to stderr is compared too
    ["compiled"],
    ["models_varying", "hooks", "whole_batch", "modes"],
    ["noise", "cells"],
    ["ecosystem"],
    ["memory", "objects"],
    ["errors", "threads"],
]
TOGETHER = str(HERE / "scripts" / "together.py")
LIMIT = 240  # seconds; far more than any script needs, so that a hang is told from a slow machine


def own(err: str) -> list[str]:
    """The lines that are the script's."""
    return [line for line in err.splitlines() if not line.startswith("oars")]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    """A group's run by plain ``python``, once for all numbers of ranks; it begins beside the first of these."""
    runs: dict[str, Run] = {}

    def begin(group: list[str]) -> Run:
        if group[0] not in runs:
            folder = tmp_path_factory.mktemp(group[0]) / "one"
            runs[group[0]] = Run(folder, TOGETHER, *group, command=[sys.executable], limit=LIMIT)
        return runs[group[0]]

    return begin


def test_every_script_is_in_a_group():
    scripts = {p.stem for p in (HERE / "scripts").glob("*.py")} - {"scenes", "small", "together"}
    assert sorted(scripts) == sorted(name for group in GROUPS for name in group)


# Two ranks play every scene; more of them are for make test-all. Four tell no more than three of what is compiled.
NUMBERS = [(group, n) for group in GROUPS for n in (2, 3, 4) if n < 4 or group[0] not in ("output", "compiled")]


@pytest.mark.parametrize(("group", "n"), [
    pytest.param(group, n, id=f"{'+'.join(group)}-{n}", marks=[pytest.mark.more] if n > 2 else [])
    for group, n in NUMBERS])
def test_ranks_do_what_one_process_does(group, n, one_process, tmp_path):
    one, told = one_process(group), []
    many = Run(tmp_path / "ranks", "--quiet", "-n", n, TOGETHER, *group, limit=LIMIT, OARS_DIGEST="1")
    assert many.code is not None and one.code == 0, f"the scripts themselves fail:\n{one}"
    if differ := lines_differ(one.lines, many.lines):
        told.append(f"printed lines differ:\n{differ}")
    if "output" in group and (differ := lines_differ(own(one.err), own(many.err))):
        told.append(f"lines on stderr differ:\n{differ}")
    if differ := files_differ(one.cwd, many.cwd):
        told.append(f"files differ:\n{differ}")
    if len(many.digests()) != n or len(set(many.digests().values())) != 1:
        told.append(f"weights are not equal, to the bit, on {n} ranks: {many.digests()}")
    if told or many.code:
        pytest.fail(f"{', '.join(group)} on {n} ranks\n" + "\n".join(told) + f"\n{many}", pytrace=False)


def test_models_that_draw_noise_are_split(tmp_path):
    run = Run(tmp_path, "--quiet", "-n", 2, HERE / "scripts" / "noise.py", "of_each_kind", "layouts",
              "drawn_again_in_backward", OARS_LOG="debug")
    assert run.code == 0, str(run)
    ways = re.findall(r"of (Two|Images|Net) at \S+: from now on (\w+)", (run.folder / "rank-0.debug").read_text())
    assert set(ways) == {("Two", "split"), ("Images", "split"), ("Net", "split")}


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.more)])
def test_every_sample_is_read_once_and_by_one_rank(n, tmp_path):
    """Without and with workers. Ranks report their reads by datagram, so that no overlay of files comes between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    listener.bind(("127.0.0.1", 0))
    listener.setblocking(False)
    port = str(listener.getsockname()[1])
    run = Run(tmp_path / "run", "--quiet", "-n", n, HERE / "probes/reads.py", port, 0, 2)
    assert run.code == 0, str(run)
    assert run.lines[-1] == "compiler: False"  # nothing was compiled
    reads = []
    try:
        while True:
            reads.append(listener.recv(200).decode().split())
    except BlockingIOError:
        listener.close()
    counts = Counter((workers, what, index) for _, workers, what, index in reads)
    assert len(counts) == 2 * (2 * 40 + 23), "two epochs of 40 rows, one evaluation of 23"
    assert set(counts.values()) == {1}, f"read more than once: {[k for k, v in counts.items() if v > 1][:5]}"
    for workers in "02":
        shares = Counter(rank for rank, by, what, _ in reads if (by, what) == (workers, "train-0"))
        assert len(shares) == n
        assert max(shares.values()) - min(shares.values()) <= 4, "four batches, whose shares differ by one at most"
