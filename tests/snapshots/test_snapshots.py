"""Snapshots and resume: a run that was killed goes on as if it had not been. Every run here is a real one."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from running import environment, oars, python, start, wait_for

SCRIPTS = Path(__file__).parent / "scripts"


def stand(folder: Path) -> Path:
    """A folder with the scripts in it."""
    folder.mkdir()
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, folder)
    return folder


def snaps(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "oars-runs/r/snapshots").glob("*.snap"))


def losses(folder: Path) -> list[float]:
    path, = folder.glob("oars-runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def kill_ranks(folder: Path) -> None:
    for pid in (folder / "oars-runs/r").glob("pid-*"):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def told(done: subprocess.CompletedProcess) -> str:
    return f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that nobody disturbed, and one on two ranks that were killed after its second snapshot."""
    top = tmp_path_factory.mktemp("killed")
    whole, cut = stand(top / "whole"), stand(top / "cut")
    undisturbed = start(whole, "run", "-n", "2", "--name", "r", "cnn.py")
    process = start(cut, "run", "-n", "2", "--name", "r", "--snapshot", "12steps", "cnn.py", SLOW="0.05")
    wait_for(lambda: len(snaps(cut)) == 2, "two snapshots")
    kill_ranks(cut)
    out, _ = process.communicate(timeout=60)
    printed, err = undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0, err
    assert process.returncode != 0 and printed.startswith(out) and len(out.splitlines()) >= 8
    return whole, printed, cut


def again(killed, tmp_path) -> Path:
    """Another copy of the killed run; a run folder that was moved is resumed where it was started."""
    copy = tmp_path / "cut"
    shutil.copytree(killed[2], copy)
    plan = copy / "oars-runs/r/run.json"
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "cwd": str(copy)}))
    return copy


def test_a_killed_run_goes_on_to_the_bit_and_only_one_may_resume_it(killed, tmp_path):
    whole, printed, _ = killed
    folder = again(killed, tmp_path)
    first = start(folder, "resume", "r", SLOW="0.02")
    wait_for(lambda: (folder / "oars-runs/r/pid-0").exists(), "resumed ranks")
    second = oars(folder, "resume", "r")
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr == "oars: oars-runs/r is still running: another oars uses it\n"
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert err.startswith("oars: continuing from the snapshot of step 24\n")
    assert printed.endswith(out) and 5 < len(out.splitlines()) < len(printed.splitlines())
    assert losses(folder) == losses(whole)
    ours, theirs = torch.load(folder / "last.pt"), torch.load(whole / "last.pt")
    assert all(torch.equal(ours["last"][k], theirs["last"][k]) for k in theirs["last"])
    for k, state in theirs["optimizer"]["state"].items():
        assert all(torch.equal(ours["optimizer"]["state"][k][name], value) for name, value in state.items())
    events = [json.loads(line) for line in (folder / "oars-runs/r/events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [24]
    finished = oars(folder, "resume", "r")
    assert finished.returncode == 2 and "holds no snapshot: the run has finished" in finished.stderr


def test_it_goes_on_with_other_ranks_and_from_the_snapshot_before_one_that_is_cut_short(killed, tmp_path):
    whole, printed, _ = killed
    folder = again(killed, tmp_path)
    newest = folder / "oars-runs/r/snapshots/00000024.snap"
    os.truncate(newest, newest.stat().st_size - 1000)
    done = oars(folder, "resume", "r", "-n", "1")
    assert done.returncode == 0, told(done)
    assert "the snapshot of step 24 is refused: cut short" in done.stderr
    assert "continuing from the snapshot of step 12" in done.stderr
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(folder)[:12] == losses(whole)[:12]
    ours, theirs = torch.load(folder / "last.pt")["last"], torch.load(whole / "last.pt")["last"]
    assert all(torch.allclose(ours[k].double(), theirs[k].double(), atol=1e-4) for k in theirs)
    assert len(done.stdout.splitlines()) > len(printed.splitlines()) / 2


def test_a_script_that_goes_another_way_is_refused_and_nothing_is_changed(killed, tmp_path):
    folder = again(killed, tmp_path)
    script = folder / "cnn.py"
    script.write_text(script.read_text().replace("width = 8", "width = 9"))

    def contents() -> dict[str, str]:
        own = ("run.json", ".err", ".log")  # what tells of this very attempt
        files = [p for p in folder.rglob("*") if p.is_file() and not p.name.endswith((*own, ".pyc"))]
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files if not p.name.startswith("error-")}

    before = contents()
    done = oars(folder, "resume", "r", "-n", "1")
    assert (done.returncode, done.stdout) == (2, ""), told(done)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("oars: cannot resume r: the script does not go the way it went before the snapshot: ")
    assert contents() == before


def test_signals_take_a_snapshot_and_the_run_goes_on_exactly(tmp_path):
    whole, folder = stand(tmp_path / "whole"), stand(tmp_path / "cut")
    done = oars(whole, "run", "-n", "2", "--name", "r", "hand.py")
    assert done.returncode == 0, told(done)
    process = start(folder, "run", "-n", "2", "--name", "r", "hand.py", SLOW="0.04")
    wait_for((folder / "oars-runs/r/snapshots").is_dir, "a first step")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(snaps(folder)) == 1, "a snapshot")
    wait_for((folder / "appended.txt").exists, "an epoch")
    process.send_signal(signal.SIGTERM)
    began = time.time()
    out, err = process.communicate(timeout=60)
    assert time.time() - began < 15
    assert process.returncode == 143, err
    assert len(snaps(folder)) == 2
    assert f"oars: snapshot of step {snaps(folder)[1]} kept, continue with: oars resume r\n" in err
    again = oars(folder, "resume", "r")
    assert again.returncode == 0, told(again)
    assert out + again.stdout == done.stdout
    assert losses(folder) == losses(whole)
    for name in ("table.csv", "appended.txt"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_files_are_cut_back_to_the_snapshot_and_hand_made_batches_go_on_after_several_deaths(tmp_path):
    whole, folder = stand(tmp_path / "whole"), stand(tmp_path / "cut")
    printed = "\n".join([*python(whole, "hand.py"), ""])
    done = oars(folder, "run", "-n", "1", "--name", "r", "--snapshot", "10steps", "hand.py", KILL="19")
    assert done.returncode == 137, told(done)
    second = oars(folder, "resume", "r", KILL="39")
    assert second.returncode == 137, told(second)
    third = oars(folder, "resume", "r")
    assert third.returncode == 0, told(third)
    assert printed.endswith(third.stdout) and printed.startswith(done.stdout)
    assert all(line in printed.splitlines() for line in second.stdout.splitlines())
    for name in ("table.csv", "appended.txt"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_models_averages_scalers_closures_workers_and_own_checkpoints_come_back(tmp_path):
    whole, folder = stand(tmp_path / "whole"), stand(tmp_path / "cut")
    printed = "\n".join([*python(whole, "odd.py"), ""])
    done = oars(folder, "run", "-n", "1", "--name", "r", "--snapshot", "14steps", "odd.py", KILL="27")
    assert done.returncode == 137, told(done)
    rest = oars(folder, "resume", "r")
    assert rest.returncode == 0, told(rest)
    assert printed.startswith(done.stdout) and printed.endswith(rest.stdout) and len(rest.stdout.splitlines()) >= 2


def test_after_the_first_ranks_death_the_next_one_takes_snapshots(tmp_path):
    whole, folder = stand(tmp_path / "whole"), stand(tmp_path / "cut")
    done = oars(whole, "run", "-n", "2", "--name", "r", "hand.py", DIE="12")
    assert done.returncode == 0 and "1 death survived" in done.stderr, told(done)
    first = oars(folder, "run", "-n", "2", "--name", "r", "--snapshot", "10steps", "hand.py", DIE="12", KILL="27")
    assert first.returncode != 0 and snaps(folder)[-1] >= 20, told(first)
    rest = oars(folder, "resume", "r", "-n", "1")
    assert rest.returncode == 0, told(rest)
    assert done.stdout.endswith(rest.stdout) and len(rest.stdout.splitlines()) >= 4
    assert losses(folder) == losses(whole)
    for name in ("table.csv", "appended.txt"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


NARROW = """
import os, torch
from torch import nn
model = nn.Linear(200, 200)
optimizer = torch.optim.Adam(model.parameters())
for step in range(12):
    loss = model(torch.randn(8, 200)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step == 4 and WHAT == "a file in its place":
        os.rmdir(os.environ["OARS_RUN_FOLDER"] + "/snapshots")
        open(os.environ["OARS_RUN_FOLDER"] + "/snapshots", "w").close()
print("trained", step + 1)
"""


@pytest.mark.parametrize("what", ["a full disk", "a file in its place"])
def test_a_snapshot_that_cannot_be_written_is_one_line_and_training_goes_on(tmp_path, what):
    (tmp_path / "narrow.py").write_text(f"WHAT = {what!r}\n{NARROW}")
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))) if what == "a full disk" else None
    done = subprocess.run([sys.executable, "-m", "oars", "run", "-n", "1", "--name", "r", "--snapshot", "6steps",
                           "narrow.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
                          preexec_fn=limit)
    assert (done.returncode, done.stdout) == (0, "trained 12\n"), told(done)
    said = [line for line in done.stderr.splitlines() if "snapshot" in line]
    assert len(said) == 1 and "training goes on, there is none yet" in said[0], told(done)
    assert ("File too large" if what == "a full disk" else "Not a directory") in said[0] or "File exists" in said[0]


@pytest.mark.parametrize(("args", "says"), [
    (["resume"], "the following arguments are required: RUN; see oars resume --help"),
    (["resume", "nosuch"], "no such run: neither nosuch nor oars-runs/nosuch is a run folder"),
    (["resume", "broken"], "oars-runs/broken has no readable run.json: it is no run folder"),
    (["resume", "empty"], "oars-runs/empty holds no snapshot: the run has finished, or ended before its first one"),
    (["resume", "spoilt"], "oars-runs/spoilt holds no usable snapshot"),
    (["run", "--snapshot", "10", "train.py"], "--snapshot 10 is not a period: use 30s, 10m, 2h, 100steps, or off"),
])
def test_what_cannot_be_resumed_is_one_line_and_exit_code_2(tmp_path, args, says):
    (tmp_path / "train.py").write_text("")
    for name in ("broken", "empty", "spoilt"):
        (tmp_path / "oars-runs" / name).mkdir(parents=True)
        plan = {"script": "train.py", "args": [], "module": False, "cwd": str(tmp_path), "ranks": 1}
        (tmp_path / "oars-runs" / name / "run.json").write_text("{" if name == "broken" else json.dumps(plan))
    (tmp_path / "oars-runs/spoilt/snapshots").mkdir()
    (tmp_path / "oars-runs/spoilt/snapshots/00000003.snap").write_bytes(b"OARSNAP1")
    done = oars(tmp_path, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"oars: {says}"


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_made_behind_the_snapshot_is_not_there_yet(tmp_path, n):
    whole, folder = stand(tmp_path / "whole"), stand(tmp_path / "cut")
    for each in (whole, folder):
        (each / "log.txt").write_text("from before\n")
    printed = "\n".join([*python(whole, "later.py"), ""])
    done = oars(folder, "run", "-n", str(n), "--name", "r", "--snapshot", "6steps", "later.py", KILL="11")
    assert done.returncode != 0 and (folder / "last.pt").exists() and snaps(folder) == [6], told(done)
    rest = oars(folder, "resume", "r")
    assert rest.returncode == 0 and snaps(folder) == [], told(rest)
    assert printed.endswith(rest.stdout) and rest.stdout.startswith("1 nothing made yet\n"), told(rest)
    for name in ("made/best.txt", "log.txt"):
        assert (folder / name).read_text() == (whole / name).read_text(), name
