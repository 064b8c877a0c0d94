"""The voice is killed at a random moment of scripts that write by native code and child processes.

The survivor, which notices between two acts, goes on: its lines and the files at the end are those of one process.

    python -m pytest tests/files/test_native_kills.py -m more     # the other moments, 60 in all of each script
"""
# ruff: noqa: E501  (the scripts read best one act per line)

from __future__ import annotations

import functools
import random
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from killed import OneProcess
from native_scripts import SCRIPTS
from on_ranks import build_delays, prepare, seeded, tree
from running import Run, python

LONG = """
    import os, sqlite3, subprocess, h5py, numpy as np, pyarrow as pa, pyarrow.parquet as pq
    os.makedirs("out", exist_ok=True); db = sqlite3.connect("out/d.db"); db.execute("create table if not exists t (x)")
    for i in range(12):
        pq.write_table(pa.table({"a": list(range(500 * (i + 1)))}), "out/part.tmp"); os.replace("out/part.tmp", "out/t.parquet")
        subprocess.run(f"echo {i} >> log; cp log copy; mv copy log.{i % 3}; mkdir -p d{i % 4}/in; echo {i} > d{i % 4}/in/x; test {i} -ne 7 || rm -r old", shell=True, check=True)
        db.execute("insert into t values (?)", (i,)); db.commit()
        with h5py.File("out/x.h5", "a") as f: f[f"a{i}"] = np.arange(1000) * i
        subprocess.run(f"mv d{i % 4} e && mv e d{i % 4}; sed -i s/^{i}$/n{i}/ log", shell=True, check=True)
        with open("by_hand", "a") as f: f.write(f"{i} "); f.flush(); f.write("done\\n")
    print(db.execute("select count(*), sum(x) from t").fetchone(), pq.read_table("out/t.parquet").num_rows, open("log").read().split(), sorted(os.listdir(".")), sorted(os.listdir("out"))); db.close()
    with h5py.File("out/x.h5") as f: print([int(f[k][1]) for k in sorted(f)])
    os.remove("out/d.db"); os.remove("out/x.h5")
"""

# Every step writes by all of these, so that the death, in or between two steps, meets some of them at work.
TRAINED = """
    import os, sqlite3, subprocess, time, h5py, numpy as np, pyarrow as pa, pyarrow.parquet as pq, torch
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(0); x = torch.randn(160, 4); net = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(net.parameters(), 0.1)
    os.makedirs("out"); db = sqlite3.connect("out/d.db"); db.execute("create table t (x)"); step = 0
    for epoch in range(2):
        for (rows,) in DataLoader(TensorDataset(x), 8):
            loss = (net(rows) - rows.sum(1, keepdim=True)).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step(); step += 1
            print(step, f"{loss.item():.3f}"); torch.save({"step": step}, "out/part.pt"); os.replace("out/part.pt", "out/last.pt")
            pq.write_table(pa.table({"a": list(range(500 * step))}), "out/part"); os.replace("out/part", "out/t.parquet")
            subprocess.run(f"echo {step} >> log; cp log copy; mv copy log.{step % 3}; mkdir -p d{step % 4}/in; echo {step} > d{step % 4}/in/x; test {step} -ne 7 || rm -r old", shell=True, check=True)
            db.execute("insert into t values (?)", (step,)); db.commit()
            with h5py.File("out/x.h5", "a") as f: f[f"a{step}"] = np.arange(1000) * step
            time.sleep(0.02)
    print(db.execute("select count(*), sum(x) from t").fetchone(), pq.read_table("out/t.parquet").num_rows, torch.load("out/last.pt"), len(open("log").readlines())); db.close()
    with h5py.File("out/x.h5") as f: print(sum(int(f[k][1]) for k in f))
    os.remove("out/d.db"); os.remove("out/x.h5")
"""


@pytest.fixture(scope="module")
def delays(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_delays(tmp_path_factory.mktemp("delays"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, delays: str) -> Callable[[str], OneProcess]:
    """Of each script, made when it is first asked for."""
    @functools.cache
    def of(name: str) -> OneProcess:
        base = tmp_path_factory.mktemp(name)
        if name == "long":
            return OneProcess(base, LONG)
        # with delays they last longer than Python's start, and ranks come in another order each time
        return OneProcess(base, SCRIPTS[name], before=[delays], DELAYS_MOST="20000", DELAYS_SEED="0")

    return of


@pytest.mark.parametrize("seed", seeded(2, 60))
def test_the_files_are_whole_and_the_survivors(seed: int, tmp_path: Path, one_process: Callable[[str], OneProcess]) -> None:
    one_process("long").survives(seed, tmp_path)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("seed", seeded(1, 60))
def test_whatever_writes_them_they_are_whole(seed: int, name: str, tmp_path: Path, one_process: Callable[[str], OneProcess]) -> None:
    one_process(name).survives(seed, tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, object]]:
    base = tmp_path_factory.mktemp("trained") / "w"
    prepare(base)
    (base / "script.py").write_text(textwrap.dedent(TRAINED))
    return python(base, "script.py"), tree(base)


@pytest.mark.parametrize("seed", seeded(1, 20))
def test_a_training_goes_on_whose_voice_is_killed_while_it_writes(
    seed: int, tmp_path: Path, trained: tuple[list[str], dict[str, object]],
) -> None:
    """By ``oars run``, with SIGKILL, between and within steps."""
    work, moment = tmp_path / "w", random.Random(seed)
    prepare(work)
    (work / "script.py").write_text(textwrap.dedent(TRAINED))
    run = Run(work, "--quiet", "-n", 2, "script.py")
    run.wait_for_step(moment.randrange(1, 35))
    time.sleep(moment.uniform(0, 0.1))
    run.kill(0)
    assert run.code == 0, run
    lines, files = trained
    assert run.lines == lines, run
    there = {name: what for name, what in tree(work).items() if not name.startswith("oars-runs")}
    assert sorted(there) == sorted(files) and [name for name in files if there[name] != files[name]] == []
