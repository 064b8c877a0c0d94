"""What starts ranks where mpirun cannot, which side of a cut link goes on, and what is sent by ``--stage-env``."""

from __future__ import annotations

import io
import os
import socket
import tarfile

import pytest
from running import oars

from oars.cluster import launchers
from oars.cluster.host_list import HostsError
from oars.hosts import links
from oars.hosts.lookout import addresses_of, claim, goes_on, lease, living_at
from oars.plan import Plan
from oars.supervisor import stage

PLAN = Plan(ranks=7, hosts=[("n1", 4), ("n2", 3)], cores=4)


def test_a_step_of_srun_puts_each_rank_where_the_plan_says(tmp_path):
    assert launchers.srun(PLAN, str(tmp_path)) == [
        "env", f"SLURM_HOSTFILE={tmp_path}/hosts", "srun", "--quiet", "--mpi=pmix", "--overlap",
        "--distribution=arbitrary", "--nodes=2", "--ntasks=7", "--cpu-bind=none", "--mem=0", "--export=ALL",
        "--input=none", "--kill-on-bad-exit=1"]
    assert (tmp_path / "hosts").read_text().split() == ["n1"] * 4 + ["n2"] * 3
    assert [launchers.local(PLAN, rank) for rank in (0, 3, 4, 6)] == [(0, 4), (3, 4), (0, 3), (2, 3)]


def test_how_a_rank_died_is_read_from_srun():
    log = "srun: error: n2: task 3: Killed\nsrun: error: n1: tasks 0-1: Terminated\n"
    assert launchers.srun_says(log) == ("n2: task 3: Killed", 137)
    assert launchers.srun_says("srun: error: n1: task 0: Exited with exit code 5\n")[1] == 5
    assert launchers.srun_says("srun: error: n1: task 0: Segmentation fault (core dumped)\n")[1] == 139
    assert launchers.srun_says("srun: warning\n") is None


def test_aprun_takes_as_many_ranks_on_every_node_but_the_last():
    assert launchers.aprun(PLAN) == ["aprun", "-q", "-b", "-cc", "none", "-n", "7", "-N", "4"]
    assert launchers.aprun(Plan(ranks=2)) == ["aprun", "-q", "-b", "-cc", "none", "-n", "2", "-N", "2"]
    with pytest.raises(HostsError, match="aprun puts as many ranks on every node, not 2, 4: give --per-node"):
        launchers.aprun(Plan(ranks=6, hosts=[("a", 2), ("b", 4)]))


@pytest.mark.parametrize(("args", "says"), [
    (["--launcher", "srun"], "--launcher srun: this is no Slurm job: get one with salloc, sbatch or oars submit"),
    (["--launcher", "aprun"], "--launcher aprun: aprun cannot be run here ([Errno 2] No such file or directory: "
     "'aprun')"),
])
def test_a_launcher_that_is_not_here_is_one_line_and_exit_code_2(tmp_path, monkeypatch, args, says):
    (tmp_path / "train.py").write_text("")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    done = oars(tmp_path, "run", "-n", "2", *args, "train.py")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"oars: {says}\n")
    assert not (tmp_path / "oars-runs").exists()


def test_of_two_sides_the_larger_goes_on_and_of_equal_ones_that_with_the_voice():
    everybody = range(4)
    for here in ([], [0], [1], [0, 1], [2, 3], [1, 2, 3], [0, 1, 2, 3]):
        there = set(everybody) - set(here)
        assert goes_on(here, everybody) != goes_on(there, everybody)  # never both
    assert goes_on([0, 1], everybody) and not goes_on([2, 3], everybody) and goes_on([1, 2, 3], everybody)
    assert goes_on([2, 3], [1, 2, 3]) and not goes_on([1], [1, 2, 3])  # the dead do not count


def test_only_one_side_gets_a_run_folder(tmp_path):
    for rank, host in enumerate(["a", "a", "b", "b"]):
        (tmp_path / f"born-{rank}").write_text(f'["{host}", 7]')
    (tmp_path / "lost-1").touch()
    assert living_at(tmp_path) == {0: "a", 2: "b", 3: "b"}
    assert claim(tmp_path, 3, "b") and claim(tmp_path, 3, "b") and not claim(tmp_path, 3, "a")


def test_addresses_that_every_host_has_are_nobodys(tmp_path):
    for host, text in {"a": '["10.0.0.1", "172.17.0.1"]', "b": '["10.0.0.2", "172.17.0.1"]'}.items():
        (tmp_path / f"at-{host}").write_text(text)
    assert addresses_of(tmp_path, ["b", "nosuch"], ["a"]) == ["10.0.0.2"]


def test_a_host_may_be_silent_for_less_than_a_stall():
    assert [lease(Plan(stall=seconds)) for seconds in (60.0, 0.0, 10.0)] == [24.0, 24.0, 6.0]


def test_connections_to_a_host_are_shut_and_others_are_not():
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.2", 0)) as second, \
            socket.create_connection(first.getsockname()) as cut, \
            socket.create_connection(second.getsockname()) as kept:
        assert links.shut({"127.0.0.1"}) >= 1
        cut.settimeout(5)
        assert cut.recv(1) == b""
        kept.sendall(b"x")
        assert second.accept()[0].recv(1) == b"x"


def test_the_scripts_folder_is_sent_without_runs_and_with_links_for_what_is_large(tmp_path):
    for name in ("train.py", "lib/net.py", "oars-runs/old/run.json", ".git/HEAD", "venv/pyvenv.cfg", "lib/small.txt"):
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text("x")
    (tmp_path / "code/data.bin").write_bytes(bytes(stage.LARGE + 1))
    stream = io.BytesIO()
    stage.pack(stream, {"code": str(tmp_path / "code")})
    stream.seek(0)
    assert sorted(tarfile.open(fileobj=stream).getnames()) == [
        "code", "code/data.bin", "code/lib", "code/lib/net.py", "code/lib/small.txt", "code/train.py"]
    stream.seek(0)
    stage.unpack(stream, str(tmp_path / "place"))
    assert os.readlink(tmp_path / "place/code/data.bin") == str(tmp_path / "code/data.bin")
    roots = {"env": "/opt/env", "code": "/home/me/work"}
    plan = Plan(stage={"place": "/l", "roots": roots, "bytes": 1, "seconds": 1.0})
    assert [stage.staged(plan, path) for path in ("/opt/env/bin/python", "/opt/environment", "/home/me/work")] == [
        "/l/env/bin/python", "/opt/environment", "/l/code"]
