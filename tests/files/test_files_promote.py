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
from on_ranks import ended, heard, kill, prepare, say, tree
from running import environment

from oars.adapt.files.library import preload

DRIVER = """
import builtins, fcntl, os, runpy, signal, sys, time
from pathlib import Path
rank, shared, script = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
locks = [os.open(f"{shared}-alive-{r}", os.O_RDWR | os.O_CREAT) for r in range(3)] if rank >= 0 else []
if locks: fcntl.lockf(locks[rank], fcntl.LOCK_EX); os.write(locks[rank], b"alive")
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
        for r in range(who):
            while not os.fstat(locks[r]).st_size: time.sleep(0.001)
            fcntl.lockf(locks[r], fcntl.LOCK_EX)
        fate.left = changes
        files.promote()
        fate.left = None
def another(command):
    # a program that is none of the run's
    with files.library.plain():
        return os.system(command)
builtins.die, builtins.promote, builtins.rank, builtins.another = die, promote, rank, another
sys.argv = sys.argv[3:]
sys.path[0] = os.path.dirname(script)
if rank >= 0:
    from oars.adapt import files
    files.install(rank, rank == 0, shared)
    sys.addaudithook(fate)
runpy.run_path(script, run_name="__main__")
"""


def start(rank: int, folder: Path, script: Path, *args: object, **env: str) -> subprocess.Popen[str]:
    shared = script.parent / "shared"
    command = [sys.executable, "-c", DRIVER, str(rank), str(shared), str(script), *map(str, args)]
    if rank >= 0:
        command = [*preload(), *command]
    environ = environment(**{"PYTHONDONTWRITEBYTECODE": "1", **env})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


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
import hashlib, json, os, random, shutil, sys
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
def look(folder):
    for e in sorted(os.scandir(folder), key=lambda e: e.name):
        yield e.path, os.readlink(e.path) if e.is_symlink() else [*look(e.path)] if e.is_dir() else open(e.path).read()
print(hashlib.sha256(repr([*look(".")]).encode()).hexdigest())
"""


def alone(tmp_path: Path, script: Path, acts: int) -> tuple[dict[str, object], str]:
    """What one process leaves after so many acts, and prints at the end."""
    folder = tmp_path / f"plain-{acts}"
    prepare(folder)
    output = ended(start(-1, folder, script, acts, []))
    return tree(folder), output


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
    final = alone(tmp_path, script, acts)
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
            assert tree(run) == alone(tmp_path, script, first)[0]
            say(one, "go")
        if seed % 3 == 0:  # it lives on to the end, and after that the other goes on unmoved
            assert ended(one) == final[1]
            assert tree(run) == final[0]
            say(two, "go")
        else:
            time.sleep(chance.uniform(0, 0.15))
            kill(one)
            say(two, "promote")
            assert heard(two) == "promoted", two.communicate()
            assert tree(run) == alone(tmp_path, script, second)[0]
            say(two, "go")
        assert ended(two) == final[1]
        assert tree(run) == final[0]
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
        os.link("run.log", "same.log"); import socket; heard = socket.socket(socket.AF_UNIX); heard.bind("sock"); heard.listen(); os.mkfifo("pipe"); pipe = os.open("pipe", os.O_RDWR)
        die()
        rows.write("half")
        promote()
        log.write("done\\n"); log.close(); more.write("four\\n"); more.close(); table.writerow([3, 4]); rows.close()
        os.write(twin, b"678"); os.write(fd, b"9"); print(os.read(other, 99), os.get_inheritable(fd), os.lseek(twin, 0, 1)); os.close(fd); os.close(twin)
        asks = socket.socket(socket.AF_UNIX); asks.connect("sock"); asks.send(b"hi"); print(heard.accept()[0].recv(2)); w = os.open("pipe", os.O_WRONLY); os.write(w, b"by"); print(os.read(pipe, 2)); os.remove("sock"); os.remove("pipe")
        gone.write(" there"); gone.seek(0); print(gone.read()); nameless.write(b"y"); nameless.seek(0); print(nameless.read())
        replaced.write("old"); replaced.close(); m[8990:] = b"m" * 10; m.flush(); m.close(); mapped.seek(0); print(mapped.read(4)); logging.error("two")
        print(sorted(os.listdir(folder)), os.path.samefile("out", folder)); os.fsync(folder); moving.write("b"); moving.close()
        print(open("out/fd", "rb").read(), open("old.txt").read(), open("same.log").read(), open("out/m", "rb").read().count(b"m"))
    """
    compare(tmp_path, body, place)


def test_functions_that_the_script_holds_switch_too(tmp_path: Path, place: Path) -> None:
    body = """
        import os, shutil, tempfile, holder as held
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
    (tmp_path / "holder.py").write_text("from builtins import open as kept\ndef put(path): kept(path, 'w').write(path)\n")
    compare(tmp_path, body.replace("import os", "import os, sys; open('written.py', 'w').write('x = 3'); sys.path.append('.'); import os", 1), place)


def test_loader_workers_follow(tmp_path: Path, place: Path) -> None:
    """Processes forked before the death: one waits, one writes all the while, one has a file open."""
    body = """
        import os, select, time
        def child(act):
            ready, go, parent = os.pipe(), os.pipe(), os.getpid()
            if pid := os.fork():
                os.read(ready[0], 1); return lambda: (os.write(go[1], b"x"), os.waitpid(pid, 0))
            def wait():
                while not select.select([go[0]], [], [], 0.02)[0] and os.getppid() == parent: pass  # orphans go on, as loader workers do
            try: act(lambda: os.write(ready[1], b"x"), wait); os._exit(0)
            except BaseException as e: print("child", repr(e), flush=True); os._exit(1)
        os.mkdir("made"); open("made/p", "w").write("p"); open("old.txt", "a").write("mine")
        def waits(ready, go):
            ready(); go(); print(open("made/p").read(), open("old.txt").read(), os.path.exists("made/late"), flush=True); open("made/q", "w").write("q"); os.remove("old/a.txt")
        def writes(ready, go):
            ready()
            for i in range(300): os.mkdir(f"made/n{i}"); os.rename(f"made/n{i}", f"n{i}"); os.symlink(f"{i}", f"n{i}/s"); os.rename(f"n{i}/s", f"made/s{i}")
            go()
        def holds(ready, go):
            f = open("made/held", "w"); f.write("a"); f.flush(); g = open("app", "a"); g.write("b"); g.flush(); ready(); go(); os.listdir("."); f.write("c"); f.close(); g.write("d"); g.close()
        ends = [child(waits), child(holds)]
        die()
        ends.append(child(writes))
        time.sleep(0.01)
        promote()
        open("made/late", "w").write("late")
        for end in ends: end()
        print(sorted(os.listdir("made")), open("app").read(), len(os.listdir(".")), open("made/held").read())
    """
    compare(tmp_path, body, place)


def test_a_change_that_a_dead_voices_worker_has_begun_is_waited_for(tmp_path: Path, place: Path) -> None:
    body = """
        import os, sys, time
        if rank == 0:
            ready = os.pipe()
            if not os.fork():
                def slow(event, args):  # raised between what oars does first and the change itself
                    if event == "os.remove" and args[0] == "old/a.txt": os.write(ready[1], b"x"); time.sleep(0.5)
                sys.addaudithook(slow); os.remove("old/a.txt"); os.remove("old.txt"); os._exit(0)
            os.read(ready[0], 1); die()
        promote()
        print(os.path.exists("old/a.txt"), flush=True); time.sleep(0.7 * (rank > 0)); print(os.path.exists("old/a.txt"), os.path.exists("old.txt"))
    """
    compare(tmp_path, body, place)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_databases_go_on(mode: str, tmp_path: Path, place: Path) -> None:
    body = f"""
        import os, sqlite3
        os.mkdir("d"); one = sqlite3.connect("d/a.db"); two = sqlite3.connect("b.db"); three = sqlite3.connect("c.db")
        for c in (one, two, three): c.execute("pragma journal_mode={mode}"); c.execute("create table t (x)"); c.executemany("insert into t values (?)", [(i,) for i in range(500)]); c.commit()
        one.execute("insert into t values (-1)"); two.execute("insert into t values (-1)")  # in a transaction
        if rank == 0:
            for c in (two, three): c.executemany("insert into t values (?)", [("x" * 3000,)] * 2000)  # spills into the file
        die()
        promote()
        for c in (one, two, three): c.execute("insert into t values (-2)"); c.commit(); c.execute("insert into t values (-3)"); c.commit(); c.close()
        for name in ("d/a.db", "b.db", "c.db"):
            c = sqlite3.connect(name); print(c.execute("select count(*), sum(x) from t").fetchall(), c.execute("pragma integrity_check").fetchall())
            c.execute("insert into t values (7)"); c.commit(); c.execute("vacuum"); c.close()
        print(sorted(os.listdir(".")), os.listdir("d"))
    """
    compare(tmp_path, body, place)


def test_what_the_voice_was_ahead_with_is_undone_until_the_survivor_comes_to_it(tmp_path: Path, place: Path) -> None:
    """Links in place of folders, folders in place of files, several names of one file, other programs' files."""
    body = """
        import os, shutil
        if rank == 0:
            shutil.rmtree("old"); os.symlink("empty", "old"); os.makedirs("made/deep"); open("made/deep/x", "w").write("half"); os.rename("made", "renamed")
            os.remove("old.txt"); os.mkdir("old.txt"); open("old.txt/in", "w"); open("twin1", "w").write("spoilt"); open("empty/new", "w").write("x"); os.rmdir("gone")
            open("locked", "a").write("spoilt"); os.mkdir("shared"); open("shared/x", "w"); another("echo yours > shared/other; echo yours > other"); die()
        promote()
        print(sorted(os.listdir(".")), sorted(os.listdir("old")), open("old.txt").read(), open("old/deep/b.txt").read(), os.listdir("empty"), os.stat("gone").st_mode)
        print(open("twin1").read(), open("twin2").read(), os.path.samefile("twin1", "twin2"), open("locked").read(), os.stat("locked").st_uid)
        open("twin1", "a").write(" more"); print(open("twin2").read()); open("old/a.txt", "w").write("A"); os.rename("old", "older")
    """

    def prepared(folder: Path) -> None:
        (folder / "twin1").write_text("twin")
        (folder / "gone").mkdir(0o750)
        os.link(folder / "twin1", folder / "twin2")
        (folder / "locked").write_text("locked")
        if os.geteuid() == 0:
            os.chown(folder / "locked", 65534, -1)
        if folder.parent.name == "plain":  # what the voice's other program leaves
            (folder / "shared").mkdir()
            (folder / "shared" / "other").write_text("yours\n")
            (folder / "other").write_text("yours\n")

    compare(tmp_path, body, place, prepared=prepared)


def test_what_the_survivor_was_ahead_with_becomes_real(tmp_path: Path, place: Path) -> None:
    body = """
        import os, shutil
        die()
        shutil.rmtree("old"); os.symlink("empty", "old"); os.makedirs("made/deep"); open("made/deep/x", "w").write("all"); os.rename("made", "renamed")
        os.remove("old.txt"); os.mkdir("old.txt"); open("old.txt/in", "w"); open("twin1", "w").write("other"); open("old/new", "w").write("x")
        os.rename("link", "renamed/link"); os.chmod("renamed", 0o700); os.mkdir("twice"); open("twice/a", "w"); os.rename("twice", "thrice"); os.mkdir("twice")
        promote()
        print(sorted(os.listdir(".")), sorted(os.listdir("empty")), open("twin2").read(), sorted(os.listdir("renamed")), os.stat("renamed").st_mode)
    """

    def prepared(folder: Path) -> None:
        (folder / "twin1").write_text("twin")
        os.link(folder / "twin1", folder / "twin2")

    compare(tmp_path, body, place, prepared=prepared)


def test_a_rank_behind_the_new_voice_sees_the_files_as_they_were(tmp_path: Path, place: Path) -> None:
    body = """
        import os, shutil, sys
        def one():  # what the first survivor has done before the death, and the others not yet
            shutil.rmtree("old"); os.mkdir("new"); open("new/x", "w").write("x"); open("empty/y", "w").write("y"); os.rename("link.txt", "l")
        def two():
            with open("old.txt", "r+") as f: f.write("ONE")
            with open("twin1", "a") as f: f.write("+")
        if rank == 0: two(); die()
        if rank == 1: one()
        promote()
        if rank == 1: two(); open("turn", "w"); another("touch ../turn"); die(1)
        while rank == 2 and another("test -e ../turn"): pass
        print(sorted(os.listdir(".")), sorted(os.listdir("old")), open("old/deep/b.txt").read(), os.listdir("empty"), os.readlink("link.txt"))
        print(open("old.txt").read(), open("twin1").read(), os.path.exists("new/x"), os.path.exists("turn"))
        one(); two(); promote(2); print(sorted(os.listdir(".")), open("old.txt").read(), open("twin2").read())
    """

    def prepared(folder: Path) -> None:
        (folder / "twin1").write_text("twin")
        os.link(folder / "twin1", folder / "twin2")

    compare(tmp_path, body, place, survivors=2, prepared=prepared)


def test_a_stopped_voice_that_wakes_ends_and_changes_nothing(tmp_path: Path) -> None:
    body = """
        import os, signal, sys, time
        log = open("log", "w"); log.write("begun "); log.flush(); os.mkdir("d")
        if rank == 0:
            if not os.fork():  # a loader worker lives on
                while True: time.sleep(0.01); open("d/worker", "w").write("x")
            print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP); log.write("woken"); log.flush(); open("new", "w"); print("not reached")
        else:
            print("ready", flush=True); input(); from oars.adapt import files; files.promote(); log.write("done"); log.close()
    """
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(textwrap.dedent(body))
    run.mkdir()
    voice, one = started = [start(rank, run, script) for rank in range(2)]
    try:
        pid = int(heard(voice))
        assert heard(one) == "ready"
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)
        say(one, "go")
        ended(one)
        voice.send_signal(signal.SIGCONT)
        output, errors = voice.communicate(timeout=60)  # ends when its worker has ended too
        assert (voice.returncode, output) == (1, "") and "taken for dead" in errors
        assert tree(run) == {"log": (b"begun done", 0o644), "d": "folder"}
    finally:
        for process in started:
            kill(process)


def test_a_line_of_the_ledger_cut_short_by_the_death_counts_as_not_written(tmp_path: Path, place: Path) -> None:
    body = """
        import os
        if rank == 0:
            from oars.adapt import files
            ledger = os.open(files._shared + "/ledger", os.O_WRONLY | os.O_APPEND)
            os.write(ledger, b"\\n- " + os.fsencode(os.getcwd()) + b"/old.t")  # a loader worker's
            open("x", "w").write("half"); die()
        promote()
        print(os.listdir("empty"), open("old.txt").read(), os.path.exists("x")); open("x", "w").write("whole"); open("old.txt", "w").write("new")
    """
    compare(tmp_path, body, place, survivors=2)


def test_a_full_disk_changes_nothing_and_loses_nothing(tmp_path: Path, memory: Path) -> None:
    body = """
        import os, resource, signal
        open("old.txt", "w").write("new"); open("big", "w").write("x" * 200000); open("small", "w").write("small"); os.mkdir("d"); open("d/e", "w").write("e")
        die()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100000, resource.RLIM_INFINITY))
        try: promote()
        except OSError as e: print(e)
        print(open("small").read(), os.path.getsize("big"), flush=True)
        if input() == "again": resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2); promote()
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    for again in (True, False):
        run = tmp_path / f"run-{again}"
        prepare(run)
        voice, one = start(0, run, script), start(1, run, script, TMPDIR=str(memory))
        voice.communicate()
        before = tree(run)
        error, rest = heard(one), heard(one)
        assert f"'{run}/big'" in error and "File too large" in error and str(memory) in error
        assert rest == "small 200000"
        assert tree(run) == before
        say(one, "again" if again else "end")
        ended(one)
        overlay = [*memory.glob("oars-1-*/tree")]
        if again:
            assert (run / "big").stat().st_size == 200000 and (run / "old.txt").read_text() == "new" and overlay == []
        else:
            assert (Path(f"{overlay[0]}{run}") / "d" / "e").read_text() == "e"


def test_a_file_older_than_the_run_is_another_hosts(tmp_path: Path, place: Path) -> None:
    """The ledger speaks of paths of the voice's host; where this one has a file of that name, it stays."""
    body = """
        import os, oars.adapt.files as files
        if rank == 0: open(files._shared + "/ledger", "a").write(f"- {os.getcwd()}/old/a.txt;\\n"); die()  # as if it had made it, on a disk of its own
        if rank == 1: files.overlay().start += 100  # so long after the file
        promote(); print(open("old.txt").read())
    """
    compare(tmp_path, body, place)


def test_the_event_file_of_the_dead_voice_gives_way_to_the_survivors(tmp_path: Path, memory: Path) -> None:
    body = """
        import os, torch
        from torch.utils.tensorboard import SummaryWriter
        w = SummaryWriter("logs"); t = torch.arange(4.0)
        for i in range(6):
            w.add_scalar("x", i, i); w.flush(); torch.save({"t": t * i}, "m.pt")
            if i == 2: torch.save(t, "d.pt") if rank == 0 else None; die(); promote()
        w.close(); print(torch.load("m.pt")["t"])
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        print(len(os.listdir("logs")), [e.value for e in EventAccumulator("logs").Reload().Scalars("x")], os.path.exists("d.pt"))
        import shutil; shutil.rmtree("logs")
    """
    compare(tmp_path, body, memory)
