"""Ranks on two nodes of a real Slurm, which ``two_nodes.sh`` starts and stops: needs root, slurm-wlm and munge.

The nodes are real enough for what is tested: each has its own hostname, process ids and shared memory, and one of them
can have its power cut.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from chaos import lines_of, unlearnt, unlike
from nodes import TRAIN, ended, events, steps, until
from running import OARS, left_behind

from oars.cluster.host_list import expand
from oars.watch.machine import read

LONG = """
import os, signal, time, torch
rank = int(os.path.basename(os.readlink('/proc/self/fd/1'))[5:-4])  # which no user's script knows
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({steps}):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 5 and rank == 1:
        {at_five}
    time.sleep(0.1)
print('done')
"""


def test_two_nodes_train_as_one_process_does(cluster, tmp_path):
    cluster.batch(tmp_path, TRAIN)  # no -n: all of the job
    code, out, err = ended(tmp_path)
    assert code == 0, err
    printed, logged = lines_of([])
    assert unlike(out.splitlines(), printed) == ""
    assert unlike((tmp_path / "log.txt").read_text().splitlines(), logged) == ""
    run = tmp_path / "oars-runs/it"
    assert json.loads((run / "run.json").read_text())["hosts"] == [["n1", 2], ["n2", 2]]
    assert unlearnt(run) == ""
    assert len({(run / f"weights-digest-{rank}.txt").read_text() for rank in range(4)}) == 1
    assert {path.name for path in run.glob("*-n2*")} == set()  # no marks are left
    until(lambda: not left_behind(tmp_path), 20)


def test_doctor_measures_messages_between_the_nodes_of_a_job(cluster, tmp_path):
    words = " ".join([*OARS, "doctor", "--net", "there.toml"])
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{words} >out 2>err\necho $? >code.part\nmv code.part code\n")
    subprocess.run(["sbatch", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--output=slurm.out", "job.sh"],
                   cwd=tmp_path, env=cluster.env, check=True, timeout=20)
    code, out, err = ended(tmp_path)
    assert code == 0, err
    assert "messages between two nodes\n" in out and "messages between two ranks of a node\n" in out
    machine = read(tmp_path / "there.toml")
    assert machine.nodes == 2 and machine.ranks_per_node >= 2
    assert 1e-6 < machine.hop(8) < 0.01 < machine.hop(1e9) < 100


def test_a_stopped_rank_on_another_node_is_looked_at_and_dropped(cluster, tmp_path):
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "script.py").write_text(LONG.format(steps=40, at_five=stop))
    cluster.batch(tmp_path, "--stall", "2", "script.py", each=1)  # by default: dropped if it shows no sign of life
    code, out, err = ended(tmp_path)
    assert (code, out) == (0, "done\n"), err
    assert "  rank 1 is stopped (SIGSTOP): kill -CONT" in err and f"in <module>: {stop}" in err
    assert "oars: dropped rank 1: the others continue\n" in err and "1 death survived" in err
    assert [(event["rank"], event["host"]) for event in events(tmp_path, "drop")] == [(1, "n2")]
    until(lambda: not left_behind(tmp_path), 20)


def test_ctrl_c_on_a_login_node_ends_the_ranks_of_both_nodes(cluster, tmp_path):
    (tmp_path / "script.py").write_text(LONG.format(steps=600, at_five="pass"))
    started = cluster.alloc(tmp_path, "sh", "-c", 'echo $$ >pid; exec "$@"', "-", *OARS, "run", "--quiet", "--name",
                            "it", "script.py", each=1)
    until(lambda: steps(tmp_path) > 2, 150)
    began = time.monotonic()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert time.monotonic() - began < 15  # it takes about 3, and more on a busy machine
    assert started.returncode == 130 and "KeyboardInterrupt" in err, err
    logs = [(tmp_path / f"oars-runs/it/rank-{rank}.err").read_text() for rank in range(2)]
    assert all("KeyboardInterrupt" in log for log in logs)
    until(lambda: not left_behind(tmp_path), 20)


def test_hosts_outside_of_the_job_and_runs_within_a_step_are_refused(cluster, tmp_path):
    (tmp_path / "script.py").write_text("")
    for command, says in [
        ([*OARS, "run", "--hosts", "n1:1,n9:1", "script.py"], "--hosts: unknown host n9: this Slurm job has n1, n2"),
        ([*OARS, "run", "-n", "5", "script.py"], "-n 5, but this Slurm job has 4 slots on 2 hosts: use -n 4, or "
         "--per-node to put more on each"),
        (["srun", "--quiet", "--nodes=1", "--ntasks=2", "sh", "-c", '[ $SLURM_PROCID = 1 ] || exec "$@"', "-", *OARS,
          "run", "script.py"], "this is one of 2 processes that a launcher started (SLURM_STEP_NUM_TASKS), and oars "
         "starts the ranks itself: run it once, without srun or mpirun"),
    ]:
        refused = cluster.alloc(tmp_path, *command)
        out, err = refused.communicate(timeout=30)
        assert refused.returncode == 2 and err.splitlines()[0] == f"oars: {says}"
    assert not (tmp_path / "oars-runs").exists()


def test_lists_of_nodes_are_read_as_slurm_itself_reads_them(cluster):
    text = "n[1-3,07],rack[0-1]n[08-11],login"
    told = subprocess.run(["scontrol", "show", "hostnames", text], env=cluster.env, capture_output=True, text=True,
                          check=True).stdout.split()
    assert expand(text) == told


def test_without_fault_tolerance_a_dead_node_stops_the_run_and_a_snapshot_is_kept(cluster, tmp_path):
    (tmp_path / "script.py").write_text(LONG.format(steps=600, at_five="pass"))
    cluster.batch(tmp_path, "--snapshot", "5steps", "script.py", each=1, OARS_SURVIVE="0")
    until(lambda: steps(tmp_path) > 8, 150)
    with cluster.without("n2"):
        code, _, err = ended(tmp_path, 30)
        lines = err.splitlines()
        assert (code, lines[0]) == (75, "oars: n2 was lost, with all ranks on it")
        assert re.fullmatch(r"oars: the snapshot of step \d+ is kept, continue with: oars resume it", lines[1])
        until(lambda: not left_behind(tmp_path), 20)


KIND = ["--epochs", "6"]


def check_survived(folder: Path, out: str, err: str, gone: list[tuple[int, str]], living: list[int]) -> None:
    """A training that lost a node is as if nothing had been."""
    printed, logged = lines_of(KIND)
    assert unlike(out.splitlines(), printed) == ""
    assert unlike((folder / "log.txt").read_text().splitlines(), logged) == ""
    run, lost = folder / "oars-runs/it", events(folder, "lost")
    assert [pair for event in lost for pair in zip(event["ranks"], event["hosts"], strict=True)] == gone
    assert 15 < lost[0]["step"] <= 78 and "2 deaths survived" in err
    assert unlearnt(run) == ""
    assert len({(run / f"weights-digest-{rank}.txt").read_text() for rank in living}) == 1
    until(lambda: not left_behind(folder), 20)


def test_a_dead_node_is_survived(cluster, tmp_path):
    """All of n2 dies at once: its MPI daemon, its ranks, Slurm's part there."""
    cluster.batch(tmp_path, TRAIN, *KIND)
    until(lambda: steps(tmp_path) > 15, 150)
    with cluster.without("n2"):
        code, out, err = ended(tmp_path)
        assert code == 0, err
        check_survived(tmp_path, out, err, [(2, "n2"), (3, "n2")], [0, 1])


def test_the_death_of_the_voices_node_is_survived(cluster, tmp_path):
    """n1 has the first rank, whose files and output are the run's; the command itself is on a login node."""
    started = cluster.alloc(tmp_path, "--no-kill", *OARS, "run", "--quiet", "--name", "it", TRAIN, *KIND)
    until(lambda: steps(tmp_path) > 15, 150)
    with cluster.without("n1"):
        out, err = started.communicate(timeout=150)
        assert started.returncode == 0, err
        check_survived(tmp_path, out, err, [(0, "n1"), (1, "n1")], [2, 3])
