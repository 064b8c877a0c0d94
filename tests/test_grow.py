"""Growing: ranks join a run that is going, and it goes on as one process would. Every run here is a real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "chaos"))
from chaos import unlearnt, unlike  # noqa: E402

ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
       "OARS_LEDGER": "1", "OARS_DIGEST": "1"}


class Run:
    """A run that is going, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int, *args: str) -> None:
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests/resume_scripts/long.py", folder)
        self.cwd, self.folder = folder, folder / "oars-runs/r"
        self.process = subprocess.Popen([sys.executable, "-m", "oars", "run", "--quiet", "--name", "r", "-n",
                                         str(ranks), "long.py", *args], cwd=folder, env=ENV, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def grow(self, ranks: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "oars", "grow", "r", "-n", ranks], cwd=self.cwd, env=ENV,
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def grown(self, ranks: str) -> str:
        """The line that ``oars grow`` prints."""
        out, err = (process := self.grow(ranks)).communicate(timeout=300)
        assert (process.returncode, err) == (0, ""), err
        return out

    def kill(self, rank: int) -> None:
        os.kill(json.loads((self.folder / f"born-{rank}").read_text())[1], signal.SIGKILL)

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_step(self, more: int) -> None:
        """Until so many more steps are done."""
        step = self.steps() + more
        wait_for(lambda: self.steps() >= step, f"step {step}")

    def end(self) -> tuple[str, str]:
        """What it printed, going fast from here on."""
        (self.cwd / "fast").touch()
        out, err = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, err
        return out, err

    def events(self, kind: str) -> list[dict]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def wait_for(true, what: str) -> None:
    deadline = time.time() + 300
    while not true():
        assert time.time() < deadline, f"never: {what}"
        time.sleep(0.02)


class Alone:
    """One process, beside a run that is to do the same."""

    def __init__(self, folder: Path, *args: str) -> None:
        folder.mkdir()
        (folder / "fast").touch()
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, ROOT / "tests/resume_scripts/long.py", *args], cwd=folder,
                                        env=ENV, text=True, stdout=subprocess.PIPE)

    def told(self) -> dict[str, list[str]]:
        """What it printed and wrote."""
        out, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == 0
        written = {name: (self.folder / name).read_text().splitlines() for name in ("log.txt", "epochs.txt")}
        return {"printed": out.splitlines(), **written}


def as_alone(run: Run, out: str, alone: Alone) -> None:
    """Printed lines, files and samples are one process's."""
    for name, lines in alone.told().items():
        ours = out if name == "printed" else (run.cwd / name).read_text()
        assert not (told := unlike(ours.splitlines(), lines)), f"{name}: {told}"
    assert not (told := unlearnt(run.folder)), told


def test_ranks_join_in_mid_epoch_and_any_may_die_afterwards(tmp_path):
    run, alone = Run(tmp_path / "run", 2), Alone(tmp_path / "alone")
    wait_for(lambda: run.steps() > 3, "steps")
    assert run.grown("+2").startswith("r runs on 4 ranks from step ")
    run.wait_for_step(3)
    run.kill(0)  # an old one, the voice
    run.wait_for_step(3)
    run.kill(2)  # a new one
    run.wait_for_step(3)
    assert run.grown("3").startswith("r runs on 3 ranks from step ")  # after deaths: 1 and 3 are left
    run.wait_for_step(3)
    run.kill(1)  # now the voice is a rank that has joined
    run.wait_for_step(3)
    out, err = run.end()
    as_alone(run, out, alone)
    grown = run.events("grown")
    assert [(event["ranks_before"], event["ranks"]) for event in grown] == [(2, 4), (2, 3)]
    assert [event["ranks"] for event in run.events("lost")] == [[0], [2], [1]]
    weights = {r: (run.folder / f"weights-digest-{r}.txt").read_text() for r in (3, 4)}
    assert weights[3] == weights[4]
    assert "3 joined, 3 deaths survived" in err
    assert not [name for name in os.listdir(run.folder) if name.startswith(("ready-", "there-", "joined-", "growing"))]


def test_new_ranks_that_die_while_they_start_cost_nothing(tmp_path):
    run, alone = Run(tmp_path / "run", 2, "keep"), Alone(tmp_path / "alone", "keep")
    wait_for(lambda: run.steps() > 3, "steps")
    process = run.grow("+2")
    wait_for((run.folder / "born-2").exists, "a new rank")
    run.kill(2)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (1, "")
    assert err == "oars: r did not grow: rank 2 died while it was starting\n"
    process = run.grow("+1")
    wait_for((run.folder / "ready-4").exists, "a new rank that is ready")
    run.kill(4)
    assert process.wait(timeout=300) == 1
    assert run.grown("3").startswith("r runs on 3 ranks from step ")
    out, err = run.end()
    as_alone(run, out, alone)
    assert [event["reason"][:12] for event in run.events("not grown")] == ["rank 2 died ", "rank 4 died "]
    assert "the run could not grow" in err and "1 joined" in err


def test_what_cannot_grow_says_so_and_what_to_do(tmp_path):
    one = Run(tmp_path / "one", 1)
    wait_for(lambda: one.steps() > 0, "a step")
    process = one.grow("+1")
    assert process.communicate(timeout=300) == ("", "oars: r cannot grow while it goes (it has one rank, which does "
                                                "not use MPI): stop it with SIGTERM, then oars resume r -n 2\n")
    assert process.returncode == 2
    one.end()
    process = one.grow("3")
    assert process.communicate(timeout=300) == ("", "oars: r is not going: oars resume r -n 3 goes on from its "
                                               "snapshot, if it has one\n")
