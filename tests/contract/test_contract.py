"""The contract, kept: every script in ``scripts/`` does on 2, 3 and 4 ranks what it does on one process.

A script is run once by ``python`` and once by ``oars run`` for each number of ranks, each in a folder of its own. The
printed lines, the files left behind and (to the bit) the weights of the ranks are compared. Scripts that get on with
each other share a process, since most of the time goes into starting ranks. To look at one scene alone:
``oars run -n 2 tests/contract/scripts/losses.py by_hand``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from compare import files_differ, lines_differ

HERE = Path(__file__).parent
GROUPS = [
    ["loaders", "loaders_workers", "batches"],
    ["handmade", "loops", "loops_more"],
    ["losses", "losses_model", "models", "batchnorm"],
    ["tensors", "reductions", "files"],
    ["output", "tutorial"],  # what these write to stderr is compared too
    ["compiled"],
    ["found", "found_more"],
]
TOGETHER = str(HERE / "scripts" / "together.py")
LIMIT = 240  # seconds; far more than any script needs, so that a hang is told from a slow machine


class Run:
    """One run of a script: its exit code, what it printed, and the folder it ran in."""

    def __init__(self, command: list[str], folder: Path, **env: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self.command = folder, command
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment(), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # the launcher ends its ranks
            try:
                out, err = self.process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                out, err = self.process.communicate()
            err += f"\n(stopped after {LIMIT} s)"
        self.code = self.process.returncode
        self.out = [line for line in out.splitlines() if not line.startswith("oars")]
        self.err = [line for line in err.splitlines() if not line.startswith("oars")]

    def __str__(self) -> str:
        return "\n".join([" ".join(self.command), f"exit code {self.code}", *self.err[-25:]])


def environment() -> dict[str, str]:
    """This process's, with the checkout on the path and one thread, which is what a rank on a small machine gets."""
    source = str(HERE.parent.parent / "src")
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}  # else TensorFlow logs its process id


def oars(n: int) -> list[str]:
    """The command line up to the script."""
    return [sys.executable, "-m", "oars", "run", "--quiet", "-n", str(n)]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    """A group's run by plain ``python``, once for all numbers of ranks; it begins beside the first of these."""
    runs: dict[str, Future[Run]] = {}
    with ThreadPoolExecutor() as pool:
        def begin(group: list[str]) -> Future[Run]:
            if group[0] not in runs:
                folder = tmp_path_factory.mktemp(group[0]) / "one"
                runs[group[0]] = pool.submit(Run, [sys.executable, TOGETHER, *group], folder)
            return runs[group[0]]

        yield begin


def test_every_script_is_in_a_group():
    scripts = {p.stem for p in (HERE / "scripts").glob("*.py")} - {"scenes", "together"}
    assert sorted(scripts) == sorted(name for group in GROUPS for name in group)


# Of what is compiled and printed four ranks tell no more than three.
@pytest.mark.parametrize(("group", "n"), [pytest.param(group, n, id=f"{'+'.join(group)}-{n}") for group in GROUPS
                                          for n in (2, 3, 4) if n < 4 or group[0] not in ("output", "compiled")])
def test_ranks_do_what_one_process_does(group, n, one_process, tmp_path):
    begun = one_process(group)
    many = Run([*oars(n), TOGETHER, *group], tmp_path / "ranks", OARS_DIGEST="1")
    one, told = begun.result(), []
    assert one.code == 0, f"the scripts themselves fail:\n{one}"
    if differ := lines_differ(one.out, many.out):
        told.append(f"printed lines differ:\n{differ}")
    if "output" in group and (differ := lines_differ(one.err, many.err)):
        told.append(f"lines on stderr differ:\n{differ}")
    if differ := files_differ(one.folder, many.folder):
        told.append(f"files differ:\n{differ}")
    digests = {p.name: p.read_text() for p in many.folder.glob("oars-runs/*/weights-digest-*.txt")}
    if len(digests) != n or len(set(digests.values())) != 1:
        told.append(f"weights are not equal, to the bit, on {n} ranks: {digests}")
    if told or many.code:
        pytest.fail(f"{', '.join(group)} on {n} ranks\n" + "\n".join(told) + f"\n{many}", pytrace=False)


@pytest.mark.parametrize("n", [2, 3])
def test_every_sample_is_read_once_and_by_one_rank(n, tmp_path):
    """Without and with workers. Ranks report their reads by datagram, so that no overlay of files comes between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    listener.bind(("127.0.0.1", 0))
    listener.setblocking(False)
    port = str(listener.getsockname()[1])
    run = Run([*oars(n), str(HERE / "probes" / "reads.py"), port, "0", "2"], tmp_path / "run")
    assert run.code == 0, str(run)
    assert run.out[-1] == "compiler: False"  # nothing was compiled
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
