"""`oars data pack`, killed at any moment: the same command again gives the same bytes, and leaves nothing half done."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packing import tree
from running import environment

from oars.data.make_images import imagenet_like

# Half of the moments are times; half are steps of the work, each with a pattern of the file that shows it was reached.
STEPS = ["train/.work/plan.json", "train/.work/*.tar.*.tmp", "train/.work/shard-*.tar", "train/.work/shard-*1.tar.json",
         "train/shard-*.tar", "train/index.npy", "train/quarantine/files.tar", "train/manifest.json",
         "val/.work/*.tmp", "val/manifest.json"]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """An archive with duplicates in it, so that shards are written twice; packed once, undisturbed."""
    root = tmp_path_factory.mktemp("killed")
    imagenet_like(root / "a", 160, 4, 150, "duplicate,duplicate-other-class,png,truncated,bad-xml", 1, 2)
    began = time.monotonic()
    finish(root / "a", root / "undisturbed")
    return root, time.monotonic() - began


def start(source: Path, out: Path, workers: int = 2, **how) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "oars", "data", "pack", str(source), str(out), "--workers",
                             str(workers), "--shard-mb", "1"], env=environment(), stdout=subprocess.DEVNULL,
                            start_new_session=True, preexec_fn=_takes_ctrl_c, **how)


def _takes_ctrl_c() -> None:
    """Also where the tests themselves run in the background of a shell, whose children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(source: Path, out: Path) -> None:
    process = start(source, out)
    assert process.wait(60) == 0


@pytest.mark.parametrize("moment", range(20))
def test_killed_and_run_again_gives_the_same_bytes(archive, tmp_path, moment):
    root, whole = archive
    out, rng = tmp_path / "out", random.Random(moment)
    for _ in range(2):  # killed twice, then left alone
        process = start(root / "a", out)
        if moment % 2:
            time.sleep(rng.uniform(0.1, whole))
        else:
            deadline = time.monotonic() + 2 * whole
            while time.monotonic() < deadline and not any(out.glob(STEPS[moment // 2])) and process.poll() is None:
                time.sleep(0.001)
        if moment % 4 < 2:
            os.killpg(process.pid, signal.SIGKILL)  # all at once, as when the machine goes down
        else:
            process.kill()  # the parent alone: its workers must notice, and not be in the way
        process.wait()
    finish(root / "a", out)
    assert tree(out) == tree(root / "undisturbed")


def test_ctrl_c_is_clean_and_the_work_goes_on(archive, tmp_path):
    root, _ = archive
    for attempt in range(20):
        out = tmp_path / f"out-{attempt}"
        process = start(root / "a", out, workers=8, stderr=subprocess.PIPE, text=True)  # some have just been born
        while process.poll() is None and not any(out.glob("train/.work/shard-*.tmp")):
            time.sleep(0.001)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
        if process.returncode:  # else it was through before the signal came
            break
    assert process.returncode == 130 and said.strip() == "oars: stopped; run the same command again to go on"
    finish(root / "a", out)
    assert tree(out) == tree(root / "undisturbed")


def test_a_killed_worker_is_one_line_and_not_a_hang(archive, tmp_path):
    root, _ = archive
    out = tmp_path / "out"
    process = start(root / "a", out, workers=1, stderr=subprocess.PIPE, text=True)
    while not any(out.glob("train/.work/shard-*.tmp")):
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)  # so that it does not finish meanwhile
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 2 and said.count("\n") == 1
    assert said.startswith("oars: a worker process ended (SIGKILL")
    finish(root / "a", out)
    assert tree(out) == tree(root / "undisturbed")


def test_two_packs_into_one_folder_are_refused(archive, tmp_path):
    root, _ = archive
    first = start(root / "a", tmp_path / "out")
    while not (tmp_path / "out/.work/lock").exists():
        time.sleep(0.001)
    time.sleep(0.02)
    os.kill(first.pid, signal.SIGSTOP)
    second = subprocess.run([sys.executable, "-m", "oars", "data", "pack", str(root / "a"), str(tmp_path / "out")],
                            env=environment(), capture_output=True, text=True, timeout=30)
    os.kill(first.pid, signal.SIGCONT)
    assert second.returncode == 2 and "another pack into" in second.stderr
    assert first.wait(60) == 0 and tree(tmp_path / "out") == tree(root / "undisturbed")
