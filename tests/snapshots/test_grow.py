"""Growing: ranks join a run that is going, and it goes on as one process would. Every run here is a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import unlearnt, unlike
from running import Run, start, wait_for

LONG = Path(__file__).parent / "scripts/long.py"


def begun(folder: Path, ranks: int, *args: str, **env: str) -> Run:
    """A run that is going, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    shutil.copy(LONG, folder)
    return Run(folder, "--quiet", "-n", ranks, "long.py", *args, name="r", limit=300, OARS_LEDGER="1", OARS_DIGEST="1",
               **env)


def grow(run: Run, ranks: str) -> subprocess.Popen:
    return start(run.cwd, "grow", "r", "-n", ranks)


def grown(run: Run, ranks: str) -> str:
    """The line that ``oars grow`` prints."""
    out, err = (process := grow(run, ranks)).communicate(timeout=300)
    assert (process.returncode, err) == (0, ""), err
    return out


def finish(run: Run) -> None:
    """It goes fast from here on, and ends well."""
    (run.cwd / "fast").touch()
    assert run.code == 0, run.err


class Alone:
    """One process, beside a run that is to do the same."""

    def __init__(self, folder: Path, *args: str) -> None:
        folder.mkdir()
        (folder / "fast").touch()
        self.run = Run(folder, LONG, *args, command=[sys.executable], limit=300)

    def told(self) -> dict[str, list[str]]:
        """What it printed and wrote."""
        assert self.run.code == 0
        written = {name: (self.run.cwd / name).read_text().splitlines() for name in ("log.txt", "epochs.txt")}
        return {"printed": self.run.lines, **written}


def as_alone(run: Run, alone: Alone) -> None:
    """Printed lines, files and samples are one process's."""
    for name, lines in alone.told().items():
        ours = run.out if name == "printed" else (run.cwd / name).read_text()
        assert not (told := unlike(ours.splitlines(), lines)), f"{name}: {told}"
    assert not (told := unlearnt(run.folder)), told


def test_ranks_join_in_mid_epoch_and_any_may_die_afterwards(tmp_path):
    run, alone = begun(tmp_path / "run", 2), Alone(tmp_path / "alone")
    wait_for(lambda: run.steps() > 3, "steps")
    assert grown(run, "+2").startswith("r runs on 4 ranks from step ")
    run.wait_for_step(3)
    run.kill(0)  # an old one, the voice
    run.wait_for_step(3)
    run.kill(2)  # a new one
    run.wait_for_step(3)
    assert grown(run, "3").startswith("r runs on 3 ranks from step ")  # after deaths: 1 and 3 are left
    run.wait_for_step(3)
    run.kill(1)  # now the voice is a rank that has joined
    run.wait_for_step(3)
    finish(run)
    as_alone(run, alone)
    assert [(event["ranks_before"], event["ranks"]) for event in run.events("grown")] == [(2, 4), (2, 3)]
    assert [event["ranks"] for event in run.events("lost")] == [[0], [2], [1]]
    assert sorted(run.digests()) == [3, 4] and len(set(run.digests().values())) == 1
    assert "3 joined, 3 deaths survived" in run.err
    assert not [name for name in os.listdir(run.folder) if name.startswith(("ready-", "there-", "joined-", "growing"))]


def test_new_ranks_that_die_while_they_start_cost_nothing(tmp_path):
    run, alone = begun(tmp_path / "run", 2, "keep"), Alone(tmp_path / "alone", "keep")
    wait_for(lambda: run.steps() > 3, "steps")
    process = grow(run, "+2")
    wait_for((run.folder / "born-2").exists, "a new rank")
    run.kill(2)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (1, "")
    assert err == "oars: r did not grow: rank 2 died while it was starting\n"
    process = grow(run, "+1")
    wait_for((run.folder / "ready-4").exists, "a new rank that is ready")
    run.kill(4)
    assert process.wait(timeout=300) == 1
    assert grown(run, "3").startswith("r runs on 3 ranks from step ")
    finish(run)
    as_alone(run, alone)
    assert [event["reason"][:12] for event in run.events("not grown")] == ["rank 2 died ", "rank 4 died "]
    assert "the run could not grow" in run.err and "1 joined" in run.err


@pytest.mark.more
def test_a_death_where_old_ranks_let_new_ones_in_does_not_end_the_run(tmp_path):
    """MPI hangs on the first rank, which waits for the dead one: it is one more death to the rank that is left."""
    run = begun(tmp_path / "run", 3, OARS_TEST_DEATHS=json.dumps([[1, "old connecting", 1]]))
    alone = Alone(tmp_path / "alone")
    wait_for(lambda: run.steps() > 3, "steps")
    process = grow(run, "+2")
    process.communicate(timeout=120)
    wait_for((run.folder / ".died-1").exists, "the death")
    run.wait_for_step(3)
    finish(run)
    as_alone(run, alone)
    assert len(set(run.digests().values())) == 1


def test_what_cannot_grow_says_so_and_what_to_do(tmp_path):
    one = begun(tmp_path / "one", 1)
    wait_for(lambda: one.steps() > 0, "a step")
    process = grow(one, "+1")
    assert process.communicate(timeout=300) == ("", "oars: r cannot grow while it runs (it has one rank, which does "
                                                "not use MPI): stop it with SIGTERM, then oars resume r -n 2\n")
    assert process.returncode == 2
    finish(one)
    process = grow(one, "3")
    assert process.communicate(timeout=300) == ("", "oars: r is not running: oars resume r -n 3 continues from its "
                                               "snapshot, if it has one\n")
