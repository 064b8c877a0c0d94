"""Hosts without a scheduler, and the link between them is cut: one side goes on, and the other stops by itself.

``hosts.sh`` makes the hosts (network namespaces, each with a cable to a common switch) and pulls a cable out; nothing
is killed, and no connection is closed. Needs root.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos import lines_of, unlearnt, unlike
from nodes import TRAIN, Hosts, events, steps, until
from running import left_behind

KIND = ["--epochs", "12"]


@pytest.fixture
def hosts(tmp_path_factory):
    three = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        three.tool("start", "a", "b", "c")
        yield three
    finally:
        three.tool("stop")


def pids_on(folder: Path, host: str) -> set[int]:
    """The ranks there, as this machine numbers them: their namespace is that host's."""
    found = set()
    mark = f"OARS_RUN_FOLDER={folder}".encode()
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else [b""]
            if words[0] == sys.executable.encode() and b"oars.rank.main" in words and host_of(process) == host \
                    and mark in (process / "environ").read_bytes():
                found.add(int(process.name))
        except OSError:
            pass
    return found


def stopped(pids: set[int]) -> float:
    """When the last of them was gone."""
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)
    return time.time()


def host_of(process: Path) -> str:
    done = subprocess.run(["nsenter", "--target", process.name, "--uts", "hostname"], capture_output=True, text=True)
    return done.stdout.strip()


def test_equal_sides_the_one_with_the_voice_goes_on_and_the_other_stops(hosts, tmp_path):
    started = hosts.run("a", tmp_path, "--hosts", "a:1,b:1,c:2", TRAIN, *KIND)  # a and b against c
    until(lambda: steps(tmp_path) > 10, 150)
    theirs = pids_on(tmp_path, "c")
    assert len(theirs) == 2
    hosts.tool("cut", "c")
    gone = stopped(theirs)
    out, err = started.communicate(timeout=150)
    assert started.returncode == 0, err
    printed, logged = lines_of(KIND)
    assert unlike(out.splitlines(), printed) == ""
    assert unlike((tmp_path / "log.txt").read_text().splitlines(), logged) == ""
    run, lost = tmp_path / "oars-runs/it", events(tmp_path, "lost")
    assert [pair for event in lost for pair in zip(event["ranks"], event["hosts"], strict=True)] == [
        (2, "c"), (3, "c")]
    assert gone < lost[0]["time"]  # they stopped first, then the others went on
    assert "nothing has been heard of c for 11 s" in err and "2 deaths survived" in err
    assert unlearnt(run) == "" and not list(run.glob("side-*"))
    assert json.loads((run / "end.json").read_text())["code"] == 0
    until(lambda: not left_behind(tmp_path), 20)


def test_the_larger_side_goes_on_without_the_command_which_stops(hosts, tmp_path):
    started = hosts.run("a", tmp_path, "--hosts", "a:1,b:2", TRAIN, *KIND)
    until(lambda: steps(tmp_path) > 10, 150)
    ours = pids_on(tmp_path, "a")
    assert len(ours) == 1
    hosts.tool("cut", "b")
    gone = stopped(ours)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 75
    assert err.startswith("oars: this host is cut off from b, where 2 of the 3 ranks are: those here are stopped."), err
    run = tmp_path / "oars-runs/it"
    until((run / "end.json").exists, 150)
    assert json.loads((run / "end.json").read_text())["code"] == 0
    lost = events(tmp_path, "lost")
    assert [(event["ranks"], event["left"]) for event in lost] == [([0], 2)] and gone < lost[0]["time"]
    printed, logged = lines_of(KIND)
    assert unlike((tmp_path / "log.txt").read_text().splitlines(), logged) == ""
    assert unlike((run / "rank-1.log").read_text().splitlines()[-1:], printed[-1:]) == ""
    assert unlearnt(run) == ""
    until(lambda: not left_behind(tmp_path), 20)
