"""Where ranks live: what users and schedulers say about hosts, and how ranks are spread over them."""

from __future__ import annotations

import os
import socket
import stat

import pytest
from running import oars

from oars.cluster import flux, lsf, pbs, place, slurm
from oars.cluster.host_list import Host, HostsError, counts, expand, parse, read_file
from oars.cluster.place import Place, Where, find, spread
from oars.hosts.reach import missing_hosts

MARKS = ("SLURM_", "PBS_", "LSB_", "FLUX_", "OMPI_", "PMI_")


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """Not inside any job, wherever the tests run."""
    for name in [name for name in os.environ if name.startswith(MARKS)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("text", "names"), [
    ("n1", ["n1"]),
    ("n[1-3]", ["n1", "n2", "n3"]),
    ("n[08-11],login", ["n08", "n09", "n10", "n11", "login"]),
    ("a[1,3-4],b7", ["a1", "a3", "a4", "b7"]),
    ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
    ("gpu-[001,003]-x.site.org", ["gpu-001-x.site.org", "gpu-003-x.site.org"]),
])
def test_lists_of_nodes_are_read_as_schedulers_write_them(text, names):
    assert expand(text) == names


def test_numbers_a_node_are_read_as_slurm_writes_them():
    assert counts("2(x3),1") == [2, 2, 2, 1]
    assert counts("16") == [16]


def test_a_slurm_job_gives_as_many_ranks_as_it_asked_for_tasks(monkeypatch):
    assert not slurm.inside()
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-3]", "JOB_CPUS_PER_NODE": "8(x2),4",
                        "TASKS_PER_NODE": "2(x2),1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert slurm.hosts() == [("n1", 8), ("n2", 8), ("n3", 4)]  # no tasks asked for: its cores
    monkeypatch.setenv("SLURM_NTASKS", "5")
    assert find(Where()) == Place([Host("n1", 2), Host("n2", 2), Host("n3", 1)], slurm.reach(), "this Slurm job", False)
    assert find(Where(hosts="n3,n1:4")).hosts == [("n3", 1), ("n1", 4)]  # a choice of it
    with pytest.raises(HostsError, match="--hosts: unknown host n4: this Slurm job has n1, n2, n3"):
        find(Where(hosts="n4:1"))


def test_a_pbs_job_has_a_line_for_each_rank(monkeypatch, tmp_path):
    (tmp_path / "nodes").write_text("b.site.org\nb.site.org\na.site.org\nb.site.org\n")
    monkeypatch.setenv("PBS_JOBID", "12.server")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert pbs.inside() and pbs.hosts() == [("b.site.org", 3), ("a.site.org", 1)]


def test_an_lsf_job_says_it_in_one_of_three_ways(monkeypatch, tmp_path):
    monkeypatch.setenv("LSB_JOBID", "12")
    monkeypatch.setenv("LSB_HOSTS", "a a b")
    assert lsf.inside() and lsf.hosts() == [("a", 2), ("b", 1)]
    monkeypatch.setenv("LSB_MCPU_HOSTS", "a 16 b 8")
    assert lsf.hosts() == [("a", 16), ("b", 8)]
    (tmp_path / "hosts").write_text("a\na\na\nb\n")
    monkeypatch.setenv("LSB_DJOB_HOSTFILE", str(tmp_path / "hosts"))
    assert lsf.hosts() == [("a", 3), ("b", 1)]


def test_a_flux_instance_is_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("FLUX_URI", "local:///x")
    monkeypatch.setenv("FLUX_ENCLOSING_ID", "f1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert flux.inside()
    with pytest.raises(HostsError, match="^Flux does not say which hosts this job has .*: name them with --hosts$"):
        flux.hosts()
    tool = tmp_path / "flux"
    tool.write_text("#!/bin/sh\necho '8 n[1-2]'\necho '2 fat1'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    assert flux.hosts() == [("n1", 4), ("n2", 4), ("fat1", 2)]


def test_hostfiles_of_open_mpi_and_mpich_and_plain_ones(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\na slots=4 max_slots=8\nb max_slots=8 slots=2\n\nc:3   # three\nd\nd\n")
    assert read_file(str(file)) == [("a", 4), ("b", 2), ("c", 3), ("d", 2)]


HERE = Host(socket.gethostname(), 2)


def test_ranks_fill_the_hosts_in_their_order():
    three = Place(parse("a:2,b:2,c:4"), ["ssh"], "--hosts", True)
    assert spread(three, None, None) == [("a", 2), ("b", 2), ("c", 4)]
    assert spread(three, 3, None) == [("a", 2), ("b", 1)]
    assert spread(three, None, 1) == [("a", 1), ("b", 1), ("c", 1)]
    assert spread(three, 5, 3) == [("a", 3), ("b", 2)]
    assert place.only_here([HERE]) and place.only_here([Host("localhost", 1)])
    assert not place.only_here([HERE, Host("b", 1)])


@pytest.mark.parametrize(("args", "says"), [
    (["--hosts", "a:4,b:x"], "--hosts a:4,b:x: 'b:x' is no host: write it as name:ranks, as in a:4,b:4"),
    (["--hosts", "a:4,,b:4"], "--hosts a:4,,b:4: '' is no host: write it as name:ranks, as in a:4,b:4"),
    (["--hosts", "a:0"], "--hosts a:0: a has no slots: give it 1 or more, or leave it out"),
    (["--hosts", "a:1,a.site.org:1"], "--hosts a:1,a.site.org:1: a is named twice"),
    (["--hosts", "nosuch.invalid:2"], "--hosts: unknown host nosuch.invalid: its name has no address"),
    (["--hosts", "localhost,127.0.0.2:1"], "--hosts: localhost has no slots: write localhost:4 for 4 ranks there, "
     "or give --per-node"),
    (["-n", "5", "--hosts", "localhost:2,127.0.0.2:2"], "-n 5, but --hosts has 4 slots on 2 hosts: use -n 4, or "
     "--per-node to put more on each"),
    (["--hostfile", "nosuch"], "cannot read the hostfile nosuch: No such file or directory"),
    (["--hostfile", "bad"], "bad, line 2: 'b 4' is no host: write it as name slots=ranks"),
    (["--hostfile", "none"], "none, line 1: a has no slots: give it 1 or more, or leave it out"),
    (["--hostfile", "empty"], "the hostfile empty names no host"),
    (["--hosts", "a:1", "--hostfile", "bad"], "--hosts and --hostfile both name the hosts: give one of them"),
    (["--per-node", "0"], "argument --per-node: 0 is no number of ranks: 1 or more; see oars run --help"),
    (["-n", "4", "--per-node", "2"], "-n 4, but --per-node 2 on one host: leave one of them out"),
])
def test_bad_hosts_are_one_line_and_exit_code_2(tmp_path, args, says):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "bad").write_text("a slots=2\nb 4\n")
    (tmp_path / "none").write_text("a slots=0\n")
    (tmp_path / "empty").write_text("# nobody\n")
    done = oars(tmp_path, "run", *args, "train.py")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"oars: {says}\n")
    assert not (tmp_path / "oars-runs").exists()


def test_a_host_where_nothing_can_be_started_is_one_line_and_exit_code_2(tmp_path, monkeypatch):
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\n[ $1 = -G ] && echo hostname 127.0.0.1 && exit\n"
                   "echo ssh: connection refused >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.py").write_text("")
    done = oars(tmp_path, "run", "--name", "r", "--hosts", "localhost:1,elsewhere:1", "train.py")
    assert (done.returncode, done.stderr) == (2, "oars: cannot start ranks on elsewhere: ssh: connection refused; all "
                                              f"hosts must reach each other, and see {tmp_path}/oars-runs/r\n")


def test_a_host_that_does_not_come_up_in_time_is_named():
    hosts, seen = [["a", 2], ["b", 1], ["c", 1]], {"born-0", "born-2", "mpirun.log"}
    assert missing_hosts(hosts, seen, 119.0) == ""
    assert missing_hosts(hosts, seen, 121.0) == "no rank has come up on c in 121 s"
    assert missing_hosts(hosts, seen | {"gone-b"}, 1.0) == "b was lost while the ranks were starting"


def test_one_of_several_processes_of_a_launcher_refuses_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    (tmp_path / "train.py").write_text("")
    done = oars(tmp_path, "run", "train.py")
    assert (done.returncode, done.stderr) == (2, "oars: this is one of 4 processes that a launcher started "
                                              "(SLURM_STEP_NUM_TASKS), and oars starts the ranks itself: run it once, "
                                              "without srun or mpirun\n")
