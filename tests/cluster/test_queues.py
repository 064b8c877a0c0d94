"""Job scripts, times, flags and pipelines, and all that is refused before a scheduler hears of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import SOURCE, oars

from oars.cli import split_flags
from oars.cluster import queues
from oars.cluster.pipeline import damage, write_manifest
from oars.cluster.queues import parse_time
from oars.runfolder import UsageError


def submit(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess:
    """``oars submit`` where there is a train.py."""
    (folder / "train.py").touch()
    return oars(folder, "submit", *args, **env)


def asks(folder: Path, *args: str) -> tuple[list[str], str]:
    """What a job script asks of its scheduler, and its last line without our paths."""
    done = submit(folder, "--dry-run", "--name", "it", *args)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    words = [line.partition(" ")[2] for line in lines if line.startswith(("#SBATCH ", "#PBS "))]
    return words, lines[-1].replace(str(folder), "HERE").replace(sys.executable, "python")


LAST = "exec python -m oars job HERE/oars-runs/it -- oars run --name it --per-node 4 train.py --lr 0.1"
COMMON = ["-N", "2", "--per-node", "4", "--gpus-per-node", "4", "--time", "1h30m", "--queue", "gpu", "--account", "abc"]


def test_a_job_script_for_slurm(tmp_path):
    flags = ["--", "--constraint=a100", "--mail-type", "END", "--"]
    assert asks(tmp_path, *COMMON, "--on", "slurm", *flags, "train.py", "--lr", "0.1") == ([
        "--job-name=it", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=01:30:00", "--partition=gpu",
        "--account=abc", f"--output={tmp_path}/oars-runs/it/job.out", "--open-mode=append", "--signal=B:USR1@120",
        "--requeue", "--no-kill", "--constraint=a100 --mail-type END"], LAST)
    assert asks(tmp_path, "-N", "3", "--on", "slurm", "train.py")[0][1:3] == [
        "--nodes=3", f"--output={tmp_path}/oars-runs/it/job.out"]
    assert "--exclusive" in asks(tmp_path, "-N", "3", "--on", "slurm", "train.py")[0]  # whole nodes, unless told


def test_a_job_script_for_pbs_professional(tmp_path):
    assert asks(tmp_path, *COMMON, "--on", "pbs", "--", "-m", "e", "--", "train.py", "--lr", "0.1") == ([
        "-l select=2:ncpus=4:mpiprocs=4:ngpus=4", "-l place=scatter", "-N it", "-l walltime=01:30:00", "-q gpu",
        "-A abc", "-j oe", f"-o {tmp_path}/oars-runs/it/job.pbs", "-r y", "-m e"], LAST)


def test_a_job_script_for_torque(tmp_path):
    assert asks(tmp_path, *COMMON, "--on", "torque", "train.py", "--lr", "0.1") == ([
        "-l nodes=2:ppn=4:gpus=4", "-N it", "-l walltime=01:30:00", "-q gpu", "-A abc", "-j oe",
        f"-o {tmp_path}/oars-runs/it/job.pbs", "-r y"], LAST)


def test_a_job_has_the_shells_interpreter_and_the_users_environment(tmp_path):
    (tmp_path / "my env.sh").write_text("module load cuda\n")
    done = submit(tmp_path, "--on", "slurm", "--env", "my env.sh", "--dry-run", "train.py", VIRTUAL_ENV="/a b")
    lines = done.stdout.splitlines()
    at = lines.index(f"cd {tmp_path}")
    assert f"export PYTHONPATH={SOURCE}" in lines[at:] and "export VIRTUAL_ENV='/a b'" in lines[at:]
    assert lines[-2] == f". '{tmp_path}/my env.sh'" and lines[-1].startswith(f"exec {sys.executable} -m oars job ")
    assert not (tmp_path / "oars-runs").exists()


def test_options_of_a_run_hold_in_its_job(tmp_path):
    words = ["--batch", "keep", "--scale-lr", "sqrt", "--snapshot", "10m", "--share-gpus", "--stall", "5.0"]
    last = asks(tmp_path, "--on", "slurm", *words, "-m", "timeit", "-n", "1")[1]
    assert last.endswith("-- oars run --name it --batch keep --scale-lr sqrt --share-gpus --stall 5.0 --snapshot 10m "
                         "-m timeit -n 1")


def test_flags_between_two_dashes_are_the_schedulers_and_dashes_after_the_script_are_the_scripts():
    assert split_flags(["submit", "-N", "2", "--", "-C", "a", "--", "t.py", "--", "x"]) == (
        ["submit", "-N", "2", "t.py", "--", "x"], ["-C", "a"])
    assert split_flags(["submit", "t.py", "--", "x", "--"]) == (["submit", "t.py", "--", "x", "--"], [])
    assert split_flags(["run", "--", "t.py"]) == (["run", "--", "t.py"], [])


def test_times():
    assert [parse_time(text) for text in ("90m", "1h30m", "2d", "12:00:00", "1-12:00:00", "45s")] == [
        5400, 5400, 172800, 43200, 129600, 45]
    for text in ("soon", "0", "0m", "1h-30m", "12:60:00", "1:60", "-5", "1-", "1.5"):
        with pytest.raises(UsageError, match="is not a length of time"):
            parse_time(text)


def test_a_time_without_a_unit_is_what_it_is_for_sbatch():
    assert [parse_time(text) for text in ("30", "90", "1:30", "2-6", "2-06:30")] == [
        1800, 5400, 90, 194400, 196200]


PIPES = {
    "circle": ("[stage.a]\ncommand = 'true'\nneeds = ['b']\n[stage.b]\ncommand = 'true'\nneeds = ['a']\n",
               "p.toml: these stages wait for each other in a circle: a -> b -> a"),
    "missing": ("[stage.a]\ncommand = 'true'\nneeds = ['pack']\n",
                "p.toml, stage a needs pack, and there is no such stage"),
    "no command": ("[stage.a]\ntime = '1h'\n", "p.toml, stage a: no command"),
    "time": ("[stage.a]\ncommand = 'true'\ntime = 'soon'\n",
             "p.toml, stage a: --time soon is not a length of time: use 30 (minutes), "
             "90m, 1h30m, 2d, or 12:00:00"),
    "kind": ("[stage.a]\ncommand = 'true'\nnodes = '2'\n", "p.toml, stage a: nodes = '2' is no number"),
    "few": ("[stage.a]\ncommand = 'true'\nnodes = 0\n", "p.toml, stage a: nodes = 0 is too few"),
    "quote": ("[stage.a]\ncommand = \"oars run 'x\"\n", "p.toml, stage a: No closing quotation"),
    "name": ("[stage.a]\ncommand = 'oars run --name x t.py'\n",
             "p.toml, stage a: leave out --name: the run folder is the stage's"),
    "table": ("[steps.a]\ncommand = 'true'\n", "p.toml: unknown 'steps': a stage begins with [stage.NAME]"),
    "none": ("", "p.toml: no stages: a stage begins with [stage.NAME]"),
}


@pytest.mark.parametrize("kind", PIPES)
def test_a_pipeline_that_cannot_work_is_one_line_and_nothing_is_submitted(tmp_path, kind):
    text, says = PIPES[kind]
    (tmp_path / "p.toml").write_text(text)
    done = submit(tmp_path, "--on", "slurm", "p.toml")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"oars: {says}\n")
    assert not (tmp_path / "oars-runs").exists()


@pytest.mark.parametrize(("args", "says"), [
    (["submit", "--on", "slurm", "nosuch.py"], "no such script: nosuch.py"),
    (["submit", "--on", "slurm", "nosuch.toml"], "no such pipeline: nosuch.toml"),
    (["submit", "--on", "slurm", "-N", "0", "train.py"],
     "argument -N: 0 is no number of nodes: 1 or more; see oars submit --help"),
    (["submit", "--on", "slurm", "--env", "nosuch.sh", "train.py"],
     "--env nosuch.sh: no such file, or it cannot be read"),
    (["submit", "--on", "pbs", "train.py"],
     "PBS does not tell a job how many cores its nodes have: say how many ranks, with --per-node"),
    (["submit", "--on", "slurm", "--snapshot", "now", "train.py"],
     "--snapshot now is not a period: use 30s, 10m, 2h, 100steps, or off"),
    (["submit", "-N", "2", "--", "--mem=0", "train.py"], "the scheduler's flags stand between two --, before the "
     "script, as in: oars submit -N 2 -- --constraint=a100 -- train.py; see oars --help"),
    (["log", "nosuch"], "no such run: neither nosuch nor oars-runs/nosuch is a run folder"),
])
def test_bad_input_is_one_line_and_nothing_is_submitted(tmp_path, args, says):
    (tmp_path / "train.py").touch()
    done = oars(tmp_path, *args)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"oars: {says}\n")
    assert not (tmp_path / "oars-runs").exists()


def test_without_a_scheduler_nothing_is_submitted(tmp_path):
    done = submit(tmp_path, "train.py", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, "oars: there is no scheduler here: neither sbatch (Slurm) nor qsub "
                                              "(PBS) is on the PATH; oars run needs none\n")
    done = submit(tmp_path, "--on", "slurm", "train.py", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, "oars: there is no Slurm here: no program sbatch\n")
    assert not (tmp_path / "oars-runs").exists()


@pytest.mark.parametrize(("printed", "why"), [
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=9.batch. Some of the step tasks have been OOM Killed.",
     "out of memory"),
    ("slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-15T15:00:00 DUE TO TIME LIMIT ***", "time limit"),
    ("slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-15T15:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
     "node failure"),
    ("slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-15T15:00:00 DUE TO PREEMPTION ***", "preempted"),
    ("=>> PBS: job killed: walltime 3612 exceeded limit 3600", "time limit"),
    ("=>> PBS: job killed: mem 2107400kb exceeded limit 2097152kb", "out of memory"),
    ("loss 0.3", ""),
])
def test_why_a_scheduler_ended_a_job_is_read_from_what_it_wrote(tmp_path, printed, why):
    (tmp_path / "job.out").write_text(f"loss 0.4\n{printed}\n")
    assert queues.said(tmp_path) == why


def test_a_manifest_knows_whether_what_was_made_is_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("packed").mkdir()
    for name in "ab":
        Path("packed", name).write_text(name)
    write_manifest(tmp_path, ["packed"])
    files = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert sorted(files) == ["packed/a", "packed/b"] and damage(files) == ""
    os.utime("packed/a")  # touched, not changed
    assert damage(files) == ""
    Path("packed/a").write_text("x")  # the same size
    assert damage(files) == "packed/a"
    shutil.rmtree("packed")
    assert damage(files) == "packed/a"
    with pytest.raises(UsageError, match="did not make packed"):
        write_manifest(tmp_path, ["packed"])
