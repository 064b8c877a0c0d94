"""The voice is killed at a random moment of scripts that write by native code and child processes.

The survivor, which notices between two acts, goes on: its lines and the files at the end are those of one process.
"""
# ruff: noqa: E501  (the scripts read best one act per line)

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from on_ranks import prepare, tree
from running import environment

from oars.adapt.files.library import preload

DRIVER = """
import builtins, fcntl, os, runpy, sys
from pathlib import Path
rank, shared, script = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
alive = os.open(f"{shared}-alive", os.O_RDWR | os.O_CREAT) if rank >= 0 else -1
if rank == 0: fcntl.lockf(alive, fcntl.LOCK_EX); os.write(alive, b"x")
promoted = False
def look():
    global promoted
    if rank != 1 or promoted: return
    while not os.fstat(alive).st_size: pass
    try: fcntl.lockf(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: return
    promoted = True
    files.promote()
builtins.look = look
sys.argv = sys.argv[3:]
if rank >= 0:
    from oars.adapt import files
    files.install(rank, rank == 0, shared)
runpy.run_path(script, run_name="__main__")
while rank == 1 and not promoted: look()
"""

SCRIPT = """
    import os, sqlite3, subprocess, h5py, numpy as np, pyarrow as pa, pyarrow.parquet as pq
    os.makedirs("out", exist_ok=True); db = sqlite3.connect("out/d.db"); db.execute("create table if not exists t (x)")
    for i in range(12):
        look(); pq.write_table(pa.table({"a": list(range(500 * (i + 1)))}), "out/part.tmp"); os.replace("out/part.tmp", "out/t.parquet")
        look(); subprocess.run(f"echo {i} >> log; cp log copy; mv copy log.{i % 3}; mkdir -p d{i % 4}/in; echo {i} > d{i % 4}/in/x; test {i} -ne 7 || rm -r old", shell=True, check=True)
        look(); db.execute("insert into t values (?)", (i,)); db.commit()
        look()
        with h5py.File("out/x.h5", "a") as f: f[f"a{i}"] = np.arange(1000) * i
        look(); subprocess.run(f"mv d{i % 4} e && mv e d{i % 4}; sed -i s/^{i}$/n{i}/ log", shell=True, check=True)
        with open("by_hand", "a") as f: f.write(f"{i} "); f.flush(); look(); f.write("done\\n")
    print(db.execute("select count(*), sum(x) from t").fetchone(), pq.read_table("out/t.parquet").num_rows, open("log").read().split(), sorted(os.listdir(".")), sorted(os.listdir("out"))); db.close()
    with h5py.File("out/x.h5") as f: print([int(f[k][1]) for k in sorted(f)])
    os.remove("out/d.db"); os.remove("out/x.h5")
"""


def started(rank: int, folder: Path, script: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, str(rank), str(script.parent / "shared"), str(script)]
    if rank >= 0:
        command = [*preload(), *command]
    env = environment(PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(script.parent))
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object], float]:
    base = tmp_path_factory.mktemp("plain")
    prepare(base / "w")
    script = base / "script.py"
    script.write_text(textwrap.dedent("import builtins; builtins.look = lambda: None\n" + textwrap.dedent(SCRIPT)))
    begun = time.monotonic()
    output, errors = started(-1, base / "w", script).communicate(timeout=60)
    assert output, errors
    return output, tree(base / "w"), time.monotonic() - begun


SEEDS = [pytest.param(seed, marks=[pytest.mark.more] if seed > 2 else []) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_files_are_whole_and_the_survivors(seed: int, tmp_path: Path, one_process: tuple[str, dict[str, object], float]) -> None:
    expected, wanted, seconds = one_process
    script, run = tmp_path / "script.py", tmp_path / "w"
    script.write_text(textwrap.dedent(SCRIPT))
    prepare(run)
    voice, survivor = (started(rank, run, script) for rank in range(2))
    try:
        while not (tmp_path / "shared-alive").exists():
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0.2, 1.5 * seconds))
        voice.kill()
        output, errors = survivor.communicate(timeout=60)
        assert survivor.returncode == 0, errors
        assert output == expected, errors
        assert tree(run) == wanted
    finally:
        for process in (voice, survivor):
            process.kill()
            process.communicate()
