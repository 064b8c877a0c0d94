"""Two nodes of a real Slurm, as the tests use them, and what runs on them leave in their folders."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from running import OARS, SOURCE, TESTS

HERE = Path(__file__).resolve().parent
TRAIN = TESTS / "chaos/train.py"
STALL = 15  # so a lease is 9 s, and who goes on does so after 11.25


class Cluster:
    """Two nodes, as the tests use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": SOURCE,
                    "CUDA_VISIBLE_DEVICES": "", "OARS_LEDGER": "1", "OARS_DIGEST": "1",
                    "PRTE_MCA_prte_tmpdir_base": str(folder)}  # what killed daemons leave goes with the tests

    def tool(self, verb: str, *more: str) -> None:
        """``two_nodes.sh``; what it says if it cannot is the test's error."""
        done = subprocess.run([HERE / "two_nodes.sh", verb, self.folder, *more], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0, done.stderr

    @contextmanager
    def without(self, node: str) -> Iterator[None]:
        """Cut a node's power; it comes back for the next test, however this one ends."""
        self.tool("kill", node)
        try:
            yield
        finally:
            self.tool("start")

    def batch(self, folder: Path, *args: str, each: int = 2, **env: str) -> None:
        """Submit a job with ``each`` ranks on both nodes that is ``oars run --name it`` with these arguments."""
        words = " ".join(map(str, [*OARS, "run", "--quiet", "--name", "it", *args]))
        (folder / "job.sh").write_text(f"#!/bin/sh\n{words} >out 2>err\necho $? >code.part\nmv code.part code\n")
        subprocess.run(["sbatch", "--quiet", "--no-kill", "--nodes=2", f"--ntasks-per-node={each}",
                        "--output=slurm.out", "job.sh"], cwd=folder, env={**self.env, **env}, check=True, timeout=20)

    def alloc(self, folder: Path, *command: str, each: int = 2) -> subprocess.Popen:
        """Run a command here, as on a login node, that has ``each`` slots on both nodes."""
        return subprocess.Popen(["salloc", "--quiet", "--nodes=2", f"--ntasks-per-node={each}", *map(str, command)],
                                cwd=folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Hosts:
    """Hosts without a scheduler (``hosts.sh``), as the tests use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": SOURCE, "PATH": f"{folder}/bin:{os.environ['PATH']}",
                    "CUDA_VISIBLE_DEVICES": "", "OARS_LEDGER": "1", "OARS_DIGEST": "1", "OMP_NUM_THREADS": "1",
                    "PRTE_MCA_prte_tmpdir_base": str(folder)}

    def tool(self, verb: str, *more: str) -> None:
        done = subprocess.run([HERE / "hosts.sh", verb, self.folder, *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    def run(self, host: str, folder: Path, *args: object, **env: str) -> subprocess.Popen:
        """``oars run`` on a host, in this folder."""
        command = " ".join(["cd", str(folder), "&&", "exec", *OARS, "run", "--quiet", "--name", "it", "--stall",
                            str(STALL), *map(str, args)])
        return subprocess.Popen([HERE / "hosts.sh", "on", self.folder, host, "sh", "-c", command],
                                env={**self.env, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(ready, seconds: float, every: float = 0.05):
    """What ``ready`` gives once that is something; to ask may take a process, so not too often."""
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(every)
    return found


def ended(folder: Path, seconds: float = 150) -> tuple[int, str, str]:
    """A batch job's exit code, output and errors."""
    until((folder / "code").exists, seconds)
    return int((folder / "code").read_text()), (folder / "out").read_text(), (folder / "err").read_text()


def steps(folder: Path) -> int:
    metrics = folder / "oars-runs/it/metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def events(folder: Path, kind: str) -> list[dict]:
    path = folder / "oars-runs/it/events.jsonl"
    every = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in every if event["event"] == kind]
