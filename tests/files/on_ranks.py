"""A script under plain Python and on ranks that are plain processes (no MPI is needed): the same lines, the same files."""
# ruff: noqa: E501

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from running import environment

from oars.adapt.files.library import PATH, preload

# What the launcher does, and a barrier by files so that ranks meet where a case wants them to.
DRIVER = """
import os, runpy, sys, time
from pathlib import Path
rank, ranks, shared, script = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
import builtins
def lag(who, seconds=0.25):
    # `who` comes later than the others
    if rank >= 0 and (rank == 0) == (who == "voice"):
        time.sleep(seconds)
builtins.lag = lag
sys.argv = [script]
sys.path[0] = os.path.dirname(script)
if "UID_IN_TEST" in os.environ:
    import pkgutil, oars.adapt.files  # while we may still read them
    os.setuid(int(os.environ["UID_IN_TEST"]))
if rank >= 0:
    from oars.adapt import files
    files.install(rank, rank == 0, shared)
runpy.run_path(script, run_name="__main__")
"""


def build_delays(folder: Path) -> str:
    """A library (``delays.c``) that lets every call that names a file wait a random time."""
    library = folder / "delays.so"
    source = Path(__file__).with_name("delays.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return str(library)


def seeded(few: int, all_: int = 40) -> list:
    """Seeds of such delays: a few, and those for make test-all."""
    return [pytest.param(seed, marks=[pytest.mark.more] if seed >= few else []) for seed in range(all_)]


def start(
    rank: int, ranks: int, folder: Path, script: Path, shared: Path, before: Sequence[str] = (), **env: str
) -> subprocess.Popen[str]:
    """``before``: libraries that are preloaded before ours."""
    command = [sys.executable, "-c", DRIVER, str(rank), str(ranks), str(shared), str(script)]
    if rank >= 0:
        command = [*preload(":".join([*before, PATH])), *command]
    elif before:
        command = [*preload(":".join(before)), *command]
    environ = environment(**{"PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg", **env})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)


def tree(folder: Path) -> dict[str, object]:
    """Every path below ``folder`` with its kind and contents."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = "folder"
        else:
            found[name] = (path.read_bytes(), path.stat().st_mode & 0o777)
    return found


def prepare(folder: Path) -> None:
    """The files that are there before the run."""
    (folder / "old" / "deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "old.txt").write_text("one\ntwo\n")
    (folder / "old" / "a.txt").write_text("a")
    (folder / "old" / "deep" / "b.txt").write_text("b")
    (folder / "link").symlink_to("old")
    (folder / "link.txt").symlink_to("old.txt")


def compare(
    tmp_path: Path, body: str, ranks: int = 3, only: str = "", prepared: Callable[[Path], None] | None = None,
    before: Sequence[str] = (), limit: float = 60, **env: str,
) -> None:
    """Run ``body`` under plain Python and on ``ranks`` ranks; compare output and trees (but not what is below ``only``)."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    plain, run = tmp_path / "plain" / "w", tmp_path / "run" / "w"
    prepare(plain)
    prepare(run)
    if prepared:
        prepared(plain)
        prepared(run)
    (tmp_path / "temporary").mkdir(exist_ok=True)
    env = {"TMPDIR": str(tmp_path / "temporary"), **env}
    one = start(-1, 1, plain, script, tmp_path, before, **env)
    started = [start(rank, ranks, run, script, tmp_path / "shared", before, **env) for rank in range(ranks)]
    expected, errors = one.communicate(timeout=limit)
    assert one.returncode == 0, errors
    for rank, process in enumerate(started):
        output, errors = process.communicate(timeout=limit)
        assert process.returncode == 0, f"rank {rank}: {errors}"
        given = output.replace("/run/w", "/plain/w")
        told = "\n".join(difflib.unified_diff(expected.splitlines(), given.splitlines(), "plain", f"rank {rank}", n=0))
        assert given == expected, f"{told}\n{errors}"
    real, wanted = tree(run), tree(plain)
    if only:
        real, wanted = ({k: v for k, v in t.items() if not k.startswith(only)} for t in (real, wanted))
    differ = sorted(name for name in {*real, *wanted} if real.get(name) != wanted.get(name))
    assert not differ, [(name, real.get(name, "missing"), wanted.get(name, "too many")) for name in differ[:3]]
    assert not [name for name in os.listdir(tmp_path / "temporary") if name.startswith("oars-")]


def ended(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin
    process.stdin.write(word + "\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
