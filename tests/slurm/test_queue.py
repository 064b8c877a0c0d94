"""The queue of a real two-node Slurm: jobs, their ends, parts and pipelines; and PBS's commands in front of it.

``qsub``, ``qstat`` and ``qdel`` are those of Debian's slurm-wlm-torque.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nodes import Cluster, until
from running import ROOT

TRAIN = """
import os, sys, time, torch
torch.manual_seed(3)

class Slow(torch.utils.data.TensorDataset):
    def __getitem__(self, at):
        if os.path.exists(sys.argv[2]):  # samples are not read again after a resume, so this does not part the ways
            time.sleep(0.02)
        return super().__getitem__(at)

data = Slow(torch.randn(64, 4))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
for epoch in range(int(sys.argv[1])):
    for x, in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), flush=True)
"""


class Desk:
    """A folder on a login node."""

    def __init__(self, two: Cluster, folder: Path) -> None:
        self.two, self.folder = two, folder
        (folder / "train.py").write_text(TRAIN)
        (folder / "slow").touch()

    def oars(self, *args: str, code: int = 0) -> str:
        """What the command prints."""
        done = subprocess.run([sys.executable, "-m", "oars", *args], cwd=self.folder, env=self.two.env, timeout=150,
                              capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def slurm(self, *command: str) -> str:
        return subprocess.run(command, env=self.two.env, cwd=self.folder, capture_output=True, text=True, check=True,
                              timeout=30).stdout

    def run(self, name: str) -> Path:
        return self.folder / "oars-runs" / name

    def job(self, name: str) -> str:
        return json.loads((self.run(name) / "job.json").read_text())["id"]

    def state(self, name: str) -> str:
        line = next(line for line in self.oars("jobs").splitlines() if line.split()[0] == name)
        return " ".join(line.split()[2:])

    def printed(self, name: str) -> list[str]:
        """The script's own lines."""
        out = self.run(name) / "job.out"
        return [line for line in out.read_text().splitlines() if line[:1].isdigit()] if out.exists() else []

    def parts(self, name: str) -> list[dict]:
        path = self.run(name) / "parts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def hurry(self, name: str, *more: str) -> None:
        """Slurm lets a requeued job rest for two minutes; not here."""
        command = ["scontrol", "update", f"JobId={self.job(name)}", "StartTime=now", *more]
        until(lambda: self.state(name).startswith("queued BeginTime, after part "), 90, 0.5)
        until(lambda: subprocess.run(command, env=self.two.env, capture_output=True).returncode == 0, 90, 0.2)

    def last(self, name: str) -> dict:
        return ([{}] + self.parts(name))[-1]


@pytest.fixture(scope="module")
def desk(cluster, tmp_path_factory):
    return Desk(cluster, tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def limited(desk):
    """A run whose time is over before it is: submitted first, looked at last."""
    (desk.folder / "slow-parts").touch()
    desk.oars("submit", "--per-node", "1", "--time", "1m", "--partition", "low", "--name", "limited", "--",
              "--exclude=n2", "--signal=B:USR1@50", "--exclusive", "--", "train.py", "60", "slow-parts")
    return time.monotonic()


def plain(desk: Desk, *args: str) -> list[str]:
    """What one process prints."""
    done = subprocess.run([sys.executable, "train.py", *args], cwd=desk.folder, env=desk.two.env, capture_output=True,
                          text=True, check=True, timeout=120)
    return done.stdout.splitlines()


def test_submit_log_result_are_three_commands(desk, limited):
    until(lambda: desk.parts("limited"), 90)  # it has its node
    said = desk.oars("submit", "--per-node", "1", "--time", "5m", "--name", "it", "train.py", "3", "")
    assert said == f"oars: job {desk.job('it')}, oars-runs/it; watch it with: oars log it -f\n"
    followed = desk.oars("log", "it", "-f")
    assert [line for line in followed.splitlines() if line[:1].isdigit()] == plain(desk, "3", "")
    assert desk.state("it") == "done" and desk.oars("wait", "it") == "oars: it is done\n"
    assert desk.oars("log", "it", "--rank", "0").splitlines()[:3] == plain(desk, "3", "")
    assert "it has 1 ranks, 0 to 0" in desk.oars("log", "it", "--rank", "3", code=2)


def test_two_ranks_of_a_job_train_as_one_process_does(desk):
    desk.oars("submit", "-N", "1", "--per-node", "2", "--time", "5m", "--name", "pair", "train.py", "2", "")
    assert desk.oars("wait", "pair") == "oars: pair is done\n"
    ours, theirs = desk.printed("pair"), plain(desk, "2", "")
    assert [line.split()[0] for line in ours] == ["0", "1"]
    losses = [float(line.split()[1]) for line in theirs]
    assert [float(line.split()[1]) for line in ours] == pytest.approx(losses, rel=1e-4)


def test_how_a_job_failed_is_told(desk):
    (desk.folder / "three.py").write_text("raise SystemExit(3)\n")
    (desk.folder / "raises.py").write_text("{}['key']\n")
    (desk.folder / "gone.py").write_text("")
    (desk.folder / "env.sh").write_text("export PYTHONPATH=/nowhere${PYTHONPATH:+:$PYTHONPATH}\nrm -f gone.py\n")
    (desk.folder / "old/torch-1.0.dist-info").mkdir(parents=True)
    (desk.folder / "old/torch-1.0.dist-info/METADATA").write_text("Name: torch\nVersion: 1.0\n")
    (desk.folder / "old.sh").write_text(f"export PYTHONPATH={desk.folder}/old:$PYTHONPATH\n")
    for name, more in (("three", []), ("raises", []), ("gone", ["--env", "env.sh"]), ("other", ["--env", "old.sh"])):
        (desk.folder / f"{name}.py").touch()
        desk.oars("submit", "--per-node", "1", "--name", name, *more, f"{name}.py")
    assert desk.oars("wait", "three", code=3) == "oars: three is failed: exit code 3\n"
    assert desk.oars("wait", "raises", code=1) == "oars: raises is failed: exit code 1: KeyError: 'key'\n"
    assert desk.oars("wait", "gone", code=2) == "oars: gone is failed: exit code 2: no such script: gone.py\n"
    assert desk.state("three") == "failed exit code 3"
    assert "other is failed: torch is 1.0 on n" in desk.oars("wait", "other", code=2)


def test_a_cancelled_run_does_not_come_back(desk):
    desk.oars("submit", "--per-node", "1", "--time", "5m", "--name", "begun", "train.py", "900", "slow")
    desk.oars("submit", "--per-node", "1", "--name", "held", "--", "--hold", "--", "train.py", "900", "slow")
    assert desk.state("held") == "queued JobHeldUser"
    until(lambda: desk.printed("begun"), 90)
    for name in ("begun", "held"):
        assert desk.oars("cancel", name) == f"oars: job {desk.job(name)} is cancelled, oars-runs/{name}\n"
        desk.oars("wait", name, code=143 if name == "begun" else 1)
        assert desk.state(name) == "cancelled"
    assert desk.last("begun")["again"] is False
    assert desk.oars("cancel", "begun", code=2) == "oars: begun has ended already: cancelled\n"


def test_ctrl_c_comes_before_the_job_is_there_or_after_it(desk):
    came = []
    for number in range(8):
        name = f"interrupted{number}"
        command = [sys.executable, "-m", "oars", "submit", "--per-node", "1", "--name", name, "--", "--hold", "--",
                   "train.py", "1", ""]
        going = subprocess.Popen(command, cwd=desk.folder, env=desk.two.env, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, start_new_session=True)
        until(lambda name=name: (desk.run(name) / "job.json").exists(), 60, 0.001)
        time.sleep(0.004 * number * number)  # the last surely comes when the job is there
        os.killpg(going.pid, signal.SIGINT)  # as a terminal sends it: the scheduler's own command hears it too
        said = going.communicate(timeout=60)[0]
        held = [line for line in desk.slurm("squeue", "-h", "-o", "%i %Z %j").splitlines() if line.endswith(f" {name}")]
        came.append(desk.run(name).exists())
        assert len(held) == came[-1], (number, held, said)
        if came[-1]:
            assert held[0].split()[0] == desk.job(name)
            desk.oars("cancel", name)
    assert any(came), said


def test_an_unknown_partition_is_refused_in_slurms_words(desk):
    before = sorted(desk.run(".").iterdir())
    for on in ("slurm", "torque"):
        said = desk.oars("submit", "--on", on, "--per-node", "1", "--partition", "nosuch", "train.py", code=2)
        who = {"slurm": "Slurm", "torque": "PBS"}[on]
        assert said.startswith(f"oars: {who} says: invalid partition specified: nosuch; ")
        assert said.count("\n") == 1
    (desk.folder / "bad.toml").write_text("[stage.a]\ncommand = 'true'\n[stage.b]\ncommand = 'true'\nneeds = ['a']\n"
                                          "partition = 'nosuch'\n")
    assert "stage b: Slurm says: invalid partition" in desk.oars("submit", "--per-node", "1", "bad.toml", code=2)
    assert [path for path in sorted(desk.run(".").iterdir()) if path not in before and "bad-b" in path.name] == []
    until(lambda: "bad-a" not in desk.slurm("squeue", "--noheader", "--format=%j"), 90, 0.2)


PIPELINE = """
[stage.report]
command = "cat model.txt {train}/summary.json >report.txt"
needs = ["train", "check"]
makes = ["report.txt"]

[stage.pack]
command = "mkdir -p packed && echo 1 >packed/a && echo pack >>order.txt"
makes = ["packed"]

[stage.check]
command = "test -s packed/a"
needs = ["pack"]

[stage.train]
command = "oars run stage.py"
needs = ["pack"]
time = "5m"
makes = ["model.txt"]
"""


def stages(desk: Desk) -> dict[str, str]:
    """What ``oars pipeline status`` says of each, without the folders."""
    done = subprocess.run([sys.executable, "-m", "oars", "pipeline", "status", "p.toml"], cwd=desk.folder,
                          env=desk.two.env, capture_output=True, text=True, timeout=60)
    needs = {"report": 2, "check": 1, "train": 1, "pack": 0}
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    rows = [[row[0], *row[1 + needs[row[0]]:]] for row in rows]
    return {name: " ".join([state, *why]) for name, state, folder, *why in rows}


def test_a_pipeline_stops_at_what_fails_and_goes_on_from_there(desk):
    (desk.folder / "p.toml").write_text(PIPELINE)
    (desk.folder / "stage.py").write_text("raise SystemExit('no weights')\n")
    said = desk.oars("submit", "--per-node", "1", "p.toml").splitlines()
    assert [line.partition(",")[0].split(":")[0] for line in said] == ["pack", "check", "train", "report"]
    assert ", after train, check, " in said[3]
    twice = desk.oars("submit", "--per-node", "1", "p.toml", code=2)
    assert re.match(r"oars: p.toml, stage \w+ is (queued|running) \(", twice)
    until(lambda: stages(desk)["report"].startswith("cancelled"), 150, 0.5)
    assert stages(desk) == {"pack": "done", "check": "done", "train": "failed exit code 1",
                            "report": "cancelled needs train, which has failed"}
    (desk.folder / "stage.py").write_text("open('model.txt', 'w').write(open('packed/a').read())\n")
    said = desk.oars("submit", "--per-node", "1", "p.toml").splitlines()
    assert [line.split(",")[0].split()[1] for line in said] == ["done", "done", "job", "job"]
    until(lambda: set(stages(desk).values()) == {"done"}, 150, 0.5)
    assert (desk.folder / "report.txt").read_text().startswith("1\n{")  # and the summary of the training
    assert (desk.folder / "order.txt").read_text() == "pack\n"
    (desk.folder / "packed/a").write_text("2\n")  # the same size, and other bytes
    said = desk.oars("submit", "--per-node", "1", "p.toml").splitlines()
    assert [line.split(",")[0].split()[1] for line in said] == ["job", "job", "job", "job"]
    until(lambda: set(stages(desk).values()) == {"done"}, 150, 0.5)


def test_pbs_commands_submit_show_and_cancel(desk):
    desk.oars("submit", "--on", "torque", "--per-node", "1", "--time", "5m", "--name", "pbs", "train.py", "2", "")
    desk.oars("submit", "--on", "torque", "--per-node", "1", "--time", "5m", "--name", "pbs2", "--", "-h", "--",
              "train.py", "900", "slow")
    assert desk.slurm("qstat", "-f", desk.job("pbs")).count("Job_Name = pbs")
    assert desk.oars("log", "pbs", "-f").splitlines()[:2] == plain(desk, "2", "")
    assert desk.state("pbs") == "done" and desk.state("pbs2").startswith("queued")
    desk.oars("cancel", "pbs2")
    until(lambda: desk.state("pbs2") == "cancelled", 90, 0.5)


def test_a_run_in_three_parts_ends_with_the_losses_of_one(desk, limited):
    """The first part ends with its time, the second makes room for another job, the third comes to the end."""
    until(lambda: desk.last("limited").get("event") == "ended", 120)
    assert desk.last("limited") | {"time": 0} == {
        "event": "ended", "part": 1, "time": 0, "code": 143, "why": "time limit", "again": True}
    first = len(desk.printed("limited"))
    assert first > 0
    desk.hurry("limited", "TimeLimit=30")  # from here on it has the time it needs
    until(lambda: len(desk.printed("limited")) > first, 60)
    desk.slurm("sbatch", "--exclude=n2", "--exclusive", "--time=1", "--output=/dev/null", "--wrap", "sleep 1")
    until(lambda: desk.last("limited").get("event") == "ended", 60)
    assert [desk.last("limited")[key] for key in ("code", "why", "again")] == [143, "preempted", True]
    (desk.folder / "slow-parts").unlink()
    desk.hurry("limited")
    assert desk.oars("wait", "limited") == "oars: limited is done\n"
    assert [part["snapshot"] is not None for part in desk.parts("limited") if part["event"] == "began"] == [
        False, True, True]
    assert desk.printed("limited") == plain(desk, "60", "")


@pytest.mark.parametrize("on", ["slurm", "pbs"])
def test_the_walk_through_of_the_docs_works_as_written(desk, tmp_path, on):
    page = (ROOT / "docs/clusters.md").read_text()
    (tmp_path / "train.py").write_text((ROOT / "examples/linear_fit.py").read_text())
    (tmp_path / "pipeline.toml").write_text(re.search(r"^```toml\n(.*?)^```", page, re.M | re.S)[1])
    (tmp_path / "bin").mkdir()
    tools = {"oars": f'exec {sys.executable} -m oars "$@"'}
    if on == "pbs":  # a site that has no sbatch of its own
        tools |= {name: f'exec {shutil.which(name)} "$@"' for name in ("qsub", "qstat", "qdel")}
    for name, text in tools.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path}/bin:{desk.two.env['PATH']}"
    if on == "pbs":
        path = f"{tmp_path}/bin"
        for tool in Path("/usr/bin").iterdir():
            if tool.name not in ("sbatch", *tools):
                (tmp_path / "bin" / tool.name).symlink_to(tool)
    for block in re.findall(rf"^```sh {on}\n(.*?)^```", page, re.M | re.S):
        done = subprocess.run(["bash", "-euc", block], cwd=tmp_path, env={**desk.two.env, "PATH": path}, timeout=150,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("done" in done.stdout) == ("log" in block)
    first = tmp_path / f"oars-runs/{'first' if on == 'slurm' else 'pbs-first'}/run.json"
    assert json.loads(first.read_text())["doctor"]["hosts"] == ["n1", "n2"]


def test_a_failed_node_is_told(desk):
    desk.oars("submit", "--per-node", "1", "--time", "5m", "--name", "node", "--", "--nodelist=n2", "--no-requeue",
              "--", "train.py", "900", "slow")
    until(lambda: desk.parts("node"), 60)
    desk.two.tool("kill", "n2")
    desk.slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    until(lambda: desk.state("node") == "failed node failure", 90, 0.5)
