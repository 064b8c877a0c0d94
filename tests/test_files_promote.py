"""Clause 6 when the voice dies: the first survivor's files become the run's, as if one process had written them all.

Ranks are real processes and die by SIGKILL: at random moments, or where the script says ``die()``. ``promote()`` in a
script waits for the death of the ranks before and makes this rank the voice; on plain Python it does nothing.
"""
# ruff: noqa: E501  (the scripts read best one act per line)

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_files import SOURCE, prepare, tree

DRIVER = """
import builtins, fcntl, os, runpy, signal, sys, time
from pathlib import Path
rank, shared, script = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
locks = [os.open(f"{shared}-alive-{r}", os.O_RDWR | os.O_CREAT) for r in range(3)] if rank >= 0 else []
if locks: fcntl.lockf(locks[rank], fcntl.LOCK_EX)
def die(who=0):
    if rank == who: os.kill(os.getpid(), signal.SIGKILL)
def fate(event, args):
    # dies at the n-th change of a name from now on
    if fate.left is not None and event in ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.symlink"):
        fate.left -= 1
        if fate.left < 0: die(rank)
fate.left = None
def promote(who=1, changes=None):
    if rank == who:
        for r in range(who): fcntl.lockf(locks[r], fcntl.LOCK_EX)
        fate.left = changes
        files.promote()
        fate.left = None
builtins.die, builtins.promote, builtins.rank = die, promote, rank
sys.argv = sys.argv[3:]
sys.path[0] = os.path.dirname(script)
if rank >= 0:
    from oars.adapt import files
    files.install(rank, rank == 0, shared)
    sys.addaudithook(fate)
    if "torch" in Path(script).read_text():
        import torch
        files.patch_torch(torch)
runpy.run_path(script, run_name="__main__")
"""


def start(rank: int, folder: Path, script: Path, *args: object, **env: str) -> subprocess.Popen[str]:
    shared = script.parent / "shared"
    command = [sys.executable, "-c", DRIVER, str(rank), str(shared), str(script), *map(str, args)]
    environ = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": "1", **env}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than ``tmp_path``."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        assert os.stat(place).st_dev != os.stat(tmp_path).st_dev
        yield Path(place)


@pytest.fixture(params=["on one file system", "on two file systems"])
def place(request: pytest.FixtureRequest, tmp_path: Path, memory: Path) -> Path:
    """Where overlays are."""
    return memory if request.param == "on two file systems" else tmp_path


# -- deaths at random moments ---------------------------------------------------------------------------------------

# A script of many small acts. Act ``i`` depends on nothing but ``i`` and the files, so all ranks do the same.
ACTS = """
import json, os, random, shutil, sys, time
first, meet = int(sys.argv[1]), json.loads(sys.argv[2])  # how many acts; after which of them this rank waits for a word
log = open("run.log", "a"); table = open("table.csv", "w")
def put(path, text):
    with open(path, "w") as f: f.write(text[: len(text) // 2]); f.flush(); f.write(text[len(text) // 2 :])
def act(i):
    r = random.Random(i); name = f"f{r.randrange(9)}"; folder = r.choice(["old", "old/deep", "d0", "d1", "d1/in", "."]); kind = r.randrange(12)
    path = f"{folder}/{name}"; text = f"{i} " * r.randrange(1, 3000)
    if not os.path.isdir(folder): os.makedirs(folder)
    if kind < 3: put(path, text)
    elif kind == 3:
        with open(path, "a") as f: f.write(text)
    elif kind == 4: put(path + ".tmp", text); os.replace(path + ".tmp", path)
    elif kind == 5 and os.path.lexists(path): os.remove(path)
    elif kind == 6 and os.path.lexists(path): os.rename(path, f"f{r.randrange(9)}")
    elif kind == 7 and folder != ".": shutil.rmtree(folder); os.makedirs(folder + "/in"); put(folder + "/in/again", text)
    elif kind == 8 and folder[0] == "d" and os.path.isdir("d0"):
        shutil.rmtree("moved", ignore_errors=True); os.rename("d0", "moved"); os.makedirs("d0")
    elif kind == 9 and not os.path.lexists(f"{folder}/sym"): os.symlink("../old/deep" if folder == "d0" else "f1", f"{folder}/sym")
    elif kind == 10 and os.path.isfile("f1") and not os.path.lexists("hard"): os.link("f1", "hard")
    elif kind == 11 and os.path.isfile("old.txt"):
        with open("old.txt", "r+") as f: f.write(f"{i:09}"); f.truncate()
    log.write(f"{i}\\n"); log.flush(); table.write(f"{i},{name}\\n")
    if i % 7 == 0: table.flush()
for i in range(first):
    if i in meet:
        table.flush(); print(i, flush=True); word = input()
        if word.startswith("promote"): promote(rank, *map(int, word.split()[1:])); print("promoted", flush=True); input()
    act(i)
log.close(); table.close()
"""


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


def alone(tmp_path: Path, script: Path, acts: int) -> dict[str, object]:
    """The tree that one process leaves after so many acts."""
    folder = tmp_path / f"plain-{acts}"
    if not folder.exists():
        prepare(folder)
        ended(start(-1, folder, script, acts, []))
    return tree(folder)


@pytest.mark.parametrize("seed", range(9))
def test_whenever_ranks_are_killed_the_files_are_those_of_one_process(seed: int, tmp_path: Path, memory: Path) -> None:
    """The voice dies; the next one lives (seeds 0, 3, ...), dies later, or dies while it becomes the voice."""
    chance = random.Random(seed)
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(ACTS)
    prepare(run)
    first, second, acts = chance.randrange(1, 300), chance.randrange(1, 300), 330
    env = {"TMPDIR": str(tmp_path if seed % 2 else memory)}
    started = [start(0, run, script, 100000, [0], **env), start(1, run, script, 100000 if seed % 3 else acts, [first], **env)]
    started.append(start(2, run, script, acts, [second], **env))
    voice, one, two = started
    try:
        assert (heard(voice), heard(one), heard(two)) == ("0", str(first), str(second))
        say(voice, "go")
        time.sleep(chance.uniform(0, 0.25))
        kill(voice)
        if seed % 3 == 2:
            say(one, f"promote {chance.randrange(120)}")
            one.wait(timeout=60) if heard(one) == "" else kill(one)  # it may have been done before its time
        else:
            say(one, "promote")
            assert heard(one) == "promoted", one.communicate()
            assert tree(run) == alone(tmp_path, script, first)
            say(one, "go")
        if seed % 3 == 0:  # it lives on to the end, and after that the other goes on unmoved
            ended(one)
            assert tree(run) == alone(tmp_path, script, acts)
            say(two, "go")
        else:
            time.sleep(chance.uniform(0, 0.15))
            kill(one)
            say(two, "promote")
            assert heard(two) == "promoted", two.communicate()
            assert tree(run) == alone(tmp_path, script, second)
            say(two, "go")
        ended(two)
        assert tree(run) == alone(tmp_path, script, acts)
    finally:
        for process in started:
            kill(process)


# -- deaths where the script says ------------------------------------------------------------------------------------


def compare(
    tmp_path: Path, body: str, place: Path, survivors: int = 1, prepared: Callable[[Path], None] = lambda folder: None
) -> Path:
    """Run ``body`` under plain Python and on ranks of which the voice dies; survivors print and leave what one process would."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    plain, run = tmp_path / "plain" / "w", tmp_path / "run" / "w"
    for folder in (plain, run):
        prepare(folder)
        prepared(folder)
    expected = ended(start(-1, plain, script))
    started = [start(rank, run, script, TMPDIR=str(place)) for rank in range(survivors + 1)]
    outputs = [process.communicate(timeout=60) for process in started]
    assert started[0].returncode == -signal.SIGKILL, outputs[0][1]
    for process, (output, errors) in zip(started[1:], outputs[1:], strict=True):
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, errors
            assert output.replace("/run/w", "/plain/w") == expected, errors
    assert tree(run) == tree(plain)
    return run


def test_what_is_open_is_written_on(tmp_path: Path, place: Path) -> None:
    body = """
        import csv, logging, mmap, os, sys, tempfile
        os.makedirs("out/in")
        log = open("run.log", "w"); log.write("begun\\n"); more = open("old.txt", "a"); more.write("three\\n"); more.flush()
        table = csv.writer(rows := open("out/t.csv", "w", newline="")); table.writerow([1, 2])
        fd = os.open("out/fd", os.O_RDWR | os.O_CREAT, 0o640); twin = os.dup(fd); os.write(fd, b"12345"); other = os.open("out/fd", os.O_RDONLY)
        gone = open("gone", "w+"); os.remove("gone"); gone.write("still"); nameless = tempfile.TemporaryFile(dir="."); nameless.write(b"x")
        replaced = open("r.txt", "w"); open("r.tmp", "w").write("new"); os.replace("r.tmp", "r.txt")
        mapped = open("out/m", "w+b"); mapped.truncate(9000); m = mmap.mmap(mapped.fileno(), 9000); m[:4] = b"head"
        handler = logging.FileHandler("out/in/l.log"); logging.getLogger().addHandler(handler); logging.error("one")
        folder = os.open("out", os.O_RDONLY); moving = open("from", "w"); moving.write("a"); os.rename("from", "to")
        os.link("run.log", "same.log")
        die()
        rows.write("half")
        promote()
        log.write("done\\n"); log.close(); more.write("four\\n"); more.close(); table.writerow([3, 4]); rows.close()
        os.write(twin, b"678"); os.write(fd, b"9"); print(os.read(other, 99), os.get_inheritable(fd), os.lseek(twin, 0, 1)); os.close(fd); os.close(twin)
        gone.write(" there"); gone.seek(0); print(gone.read()); nameless.write(b"y"); nameless.seek(0); print(nameless.read())
        replaced.write("old"); replaced.close(); m[8990:] = b"m" * 10; m.flush(); m.close(); mapped.seek(0); print(mapped.read(4)); logging.error("two")
        print(sorted(os.listdir(folder)), os.path.samefile("out", folder)); os.fsync(folder); moving.write("b"); moving.close()
        print(open("out/fd", "rb").read(), open("old.txt").read(), open("same.log").read(), open("out/m", "rb").read().count(b"m"))
    """
    compare(tmp_path, body, place)


def test_functions_that_the_script_holds_switch_too(tmp_path: Path, place: Path) -> None:
    body = """
        import os, shutil, tempfile, torch_like as held
        from os import listdir, makedirs, remove, rename, scandir, stat, getcwd, chdir
        from pathlib import Path
        mine, P = open, Path("out")
        makedirs("out/deep"); chdir("out/deep"); mine("x", "w").write("x"); kept = tempfile.mkdtemp(); print(os.path.isdir(kept))
        die()
        promote()
        print(getcwd(), listdir("."), os.path.samefile(".", "/proc/self/cwd"), os.path.isdir(kept)); os.rmdir(kept)
        mine("y", "w").write("y"); chdir("../.."); rename("out/deep/y", "out/z"); held.put("held"); print(sorted(e.name for e in scandir("out")))
        (P / "p").write_text("p"); print(sorted(map(str, P.iterdir())), stat("out/p").st_size); remove("out/p"); shutil.rmtree("out/deep")
        print(sorted(os.listdir()), Path("held").read_text())
        with tempfile.NamedTemporaryFile("w", delete=False) as f: f.write("t")
        shutil.move(f.name, "from_tmp"); os.chmod("from_tmp", 0o644); os.truncate("old.txt", 2)
        import written; print(written.x); print(open("old.txt").read(), os.getcwdb() == os.fsencode(getcwd()))
    """
    (tmp_path / "torch_like.py").write_text("from builtins import open as kept\ndef put(path): kept(path, 'w').write(path)\n")
    compare(tmp_path, body.replace("import os", "import os, sys; open('written.py', 'w').write('x = 3'); sys.path.append('.'); import os", 1), place)
