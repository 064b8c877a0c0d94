"""Clause 6 below Python: what C++ and Rust code and child processes write is one voice's too, in whatever order ranks come.

A library of the tests (``delays.c``), preloaded before ours, lets every call that names a file wait a random time. Each
script runs under plain Python and on two ranks with such delays: the same lines, the same files.
"""
# ruff: noqa: E501

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from native_scripts import SCRIPTS
from on_ranks import build_delays, compare, seeded
from running import ROOT, finished, oars


@pytest.fixture(scope="session")
def delays(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_delays(tmp_path_factory.mktemp("delays"))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("seed", seeded(2))
def test_whatever_writes_it_is_one_voices_in_any_order(seed: int, name: str, tmp_path: Path, delays: str) -> None:
    compare(tmp_path, SCRIPTS[name], ranks=2, before=[delays], limit=180, DELAYS_SEED=str(seed),
            DELAYS_UNDER=str(tmp_path), DELAYS_MOST="3000" if seed < 2 else "50000")


def test_a_program_that_the_library_cannot_stand_before_is_named_once(tmp_path: Path) -> None:
    """Started by Python, and by a shell; one linked as usual is not named."""
    (tmp_path / "tool.c").write_text('#include <stdio.h>\nint main(void) { fputs("x", fopen("made", "w")); return 0; }')
    for name, how in (("lonely", ["-static"]), ("usual", [])):
        subprocess.run(["cc", *how, "-o", name, "tool.c"], cwd=tmp_path, check=True)
    (tmp_path / "script.py").write_text(
        "import os, subprocess\nfor name in ('lonely', 'usual'):\n    subprocess.run([f'./{name}'], check=True)\n"
        "    os.system(f'./{name}')\n")
    done = oars(tmp_path, "run", "-n", 2, "script.py", code=0)
    said = [line for line in done.stderr.splitlines() if "file library" in line]
    assert said == ["oars: files of lonely are written by every rank: statically linked programs, and those written in Go, "
                    "bypass the file library"]


def test_a_library_that_a_site_preloads_stays_in_front_of_ours(tmp_path: Path, delays: str) -> None:
    """As Darshan is: both act, also in child processes, and the script sees only the site's."""
    (tmp_path / "script.py").write_text(
        "import os, subprocess, sys\n"
        "LOOK = \"import os; m = open('/proc/self/maps').read(); print('delays.so' in m, '_preload.' in m, "
        "os.path.basename(os.environ['LD_PRELOAD']))\"\n"
        "exec(LOOK)\nsubprocess.run([sys.executable, '-c', LOOK])\nos.system('echo one >> log')\n")
    done = oars(tmp_path, "run", "-n", 2, "script.py", code=0, LD_PRELOAD=delays)
    assert done.stdout.splitlines() == ["True True delays.so"] * 2
    assert (tmp_path / "log").read_text() == "one\n"


def test_without_a_c_compiler_one_line_says_so(tmp_path: Path) -> None:
    done = finished(ROOT, sys.executable, "setup.py", "-q", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path,
                    "--force", CC="no-such-compiler")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "no-such-compiler" in line] == [done.stderr.splitlines()[-1]]
    assert "manyoars needs a working C compiler" in done.stderr
