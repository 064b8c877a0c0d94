"""Clause 6 for what a process does besides opening files: where it is, forks, threads, sockets, programs, locks.

Scripts run under plain Python and on ranks, as in ``test_files.py``; some on one rank alone, which becomes the voice.
"""
# ruff: noqa: E501  (the scripts read best one act per line)

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest
from on_ranks import compare, ended, start

WATCHED = "import faulthandler; faulthandler.dump_traceback_later(30, exit=True)\n"

CASES = {
    "what_the_voice_has_just_made": """
        import ctypes, os, shutil, socket, subprocess
        def connect():
            with socket.socket(socket.AF_UNIX) as s: return s.connect("d/sock")
        def look():
            for act in (connect, lambda: subprocess.run(["d/prog"], capture_output=True, text=True).stdout, lambda: os.posix_spawn("d/prog", ["d/prog"], {}) > 0,
                        lambda: os.statvfs("d/prog").f_bsize > 0, lambda: bool(ctypes.CDLL("d/lib.so"))):
                try: print(act())
                except OSError as e: print(type(e).__name__, e.errno)
        lag("others", 0.7); look(); os.mkdir("d"); look()
        s = socket.socket(socket.AF_UNIX); s.bind("d/sock"); s.listen()
        with open("d/prog", "w") as f: f.write("#!/bin/sh\\ntrue\\n")
        os.chmod("d/prog", 0o755); import _ctypes; shutil.copy(_ctypes.__file__, "d/lib.so") if hasattr(_ctypes, "__file__") else None
        look(); lag("voice", 1)
        try: ctypes.CDLL("no/where.so")
        except OSError as e: print(e)
        os.remove("d/sock")
    """,
    "where_it_is_when_the_voice_moves_or_removes_the_folder": """
        import os
        os.chdir("old/deep"); lag("others", 0.4); print(os.getcwd(), os.path.abspath("x")); os.chdir("../.."); os.rename("old", "moved")
        os.chdir("empty"); lag("others", 0.4); print(os.getcwd(), os.path.abspath("x")); os.chdir(".."); os.rmdir("empty"); print(os.getcwd())
        os.mkdir("d"); os.chdir("d"); os.rmdir("../d")
        try: print(os.getcwd())
        except OSError as e: print(e)
    """,
    "folders_that_are_open_when_they_go": """
        import ctypes, os, shutil
        top, deep = os.open("old", os.O_RDONLY), os.open("old/deep", os.O_RDONLY); print(os.listdir(top) != [], os.listdir(deep)); lag("others"); shutil.rmtree("old")
        for fd in top, deep: print(ctypes.CDLL(None).fdopendir(os.dup(fd)) != 0, os.listdir(fd))
        lag("voice", 0.5); print(os.listdir(top), os.listdir(deep)); os.mkdir("old"); print(os.listdir(top), os.listdir("old"))
    """,
    "paths_as_long_as_they_may_be": """
        import os, shutil
        deep = "/".join(["d" * 249] * 16); path = deep + "/" + "f" * 95; print(len(path)); os.makedirs(deep); lag("others", 0.1)
        with open(path, "w") as f: f.write("far down")
        print(open(path).read(), os.path.getsize(path), [len(n) for n in os.listdir(deep)], os.path.exists(path[:-1]))
        for act in (lambda: open(path + "f"), lambda: open(path[:-1] + "g", "x"), lambda: os.stat("n" * 256), lambda: os.mkdir("n" * 256), lambda: os.rename(path, deep + "/" + "n" * 96),
                    lambda: os.symlink("x" * 4096, "l"), lambda: os.rename(path, deep + "/new"), lambda: os.symlink(deep, "l"), lambda: os.link("l/new", "hard"), lambda: os.unlink("l/new")):
            try: print(act() is not None)
            except OSError as e: print(type(e).__name__, e.errno)
        lag("voice", 0.1); os.chdir("/".join(["d" * 249] * 14)); print(len(os.getcwd()) > 3500, os.listdir(".") == ["d" * 249]); open("here", "w").close(); os.chdir("/".join([".."] * 14))
        print(open("hard").read(), sum(len(fs) for *_, fs in os.walk("d" * 249))); shutil.rmtree("d" * 249); print(sorted(os.listdir(".")))
    """,
    "ten_thousand_open_files": """
        import os, resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        os.mkdir("many"); files = [open(f"many/{i % 100}", "a") for i in range(10000)]; lag("others", 0.1)
        for i, f in enumerate(files): f.write(f"{i}\\n")
        for f in files: f.close()
        print(sum(os.path.getsize(f"many/{n}") for n in os.listdir("many")), len(open("many/7").readlines()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)); held = []
        try:
            while True: held.append(open("old.txt"))
        except OSError as e: print(e)
        for act in (lambda: open("more", "w"), lambda: os.listdir("many"), lambda: os.mkdir("m"), lambda: os.rename("m", "n"), lambda: os.stat("n").st_size >= 0):
            try: print(act())
            except OSError as e: print(type(e).__name__, e.errno)
        for f in held: f.close()
        print(sorted(os.listdir("."))); open("more", "w").close()
    """,
    "locks": """
        import fcntl
        f = open("old.txt"); print(fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)); lag("others"); lag("voice", 0.5)
        print(fcntl.flock(open("old"+"/a.txt"), fcntl.LOCK_SH)); g, h = open("mine", "w"), open("mine")
        print(fcntl.flock(g, fcntl.LOCK_EX))
        try: fcntl.flock(h, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e: print(e)
    """,
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_does_what_one_process_would(name: str, tmp_path: Path) -> None:
    compare(tmp_path, CASES[name], ranks=2)


def alone(tmp_path: Path, body: str) -> list[str]:
    """What rank 1 of 2 prints whose voice is not there."""
    work, script = tmp_path / "work", tmp_path / "script.py"
    work.mkdir()
    script.write_text(WATCHED + "import os\nfrom oars.adapt import files\nfrom oars.adapt.files import library\n" + textwrap.dedent(body))
    return ended(start(1, 2, work, script, tmp_path / "shared")).splitlines()


IN_A_HANDLER = r"""
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>
volatile int handled, failed;
static void handle(int number)
{
  int before = errno;
  struct stat st;
  int fd = open("h/part", O_WRONLY | O_CREAT | O_TRUNC, 0644), log = open("h/log", O_WRONLY | O_CREAT | O_APPEND, 0644);
  failed += fd < 0 || log < 0 || write(fd, "whole", 5) != 5 || write(log, "x", 1) != 1 || close(fd) || close(log);
  failed += rename("h/part", "h/made") || stat("h/made", &st) || st.st_size != 5 || mkdir("h/d", 0755) || rmdir("h/d");
  failed += link("h/made", "h/other") || unlink("h/other") || access("old.txt", R_OK) || access("h/part", F_OK) == 0;
  handled++;
  errno = before;
}
void begin(int first, int every)
{
  struct sigaction how = {.sa_handler = handle, .sa_flags = SA_RESTART};
  struct itimerval timer = {{0, every}, {0, first}};
  sigaction(SIGALRM, &how, NULL);
  setitimer(ITIMER_REAL, &timer, NULL);
}
"""
BEFORE_MAIN = r"""
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
#include <sys/stat.h>
__attribute__((constructor)) static void first(void)
{
  struct stat st;
  int fd = open("log", O_WRONLY | O_CREAT | O_APPEND, 0644), there = stat("by_voice", &st) == 0;
  dprintf(fd, "%s %d\n", WHO, there);
  close(fd);
  mkdir(WHO, 0755);
}
#ifdef MAIN
int main(void) { puts("main"); return rename("main", "moved"); }
#endif
"""


def test_files_in_a_signal_handler_are_one_voices(tmp_path: Path) -> None:
    """A handler in C, every five milliseconds, in the middle of what the script does with files."""
    (tmp_path / "handler.c").write_text(IN_A_HANDLER)
    library = tmp_path / "handler.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, "handler.c"], cwd=tmp_path, check=True)
    body = f"""
        import ctypes, os
        library = ctypes.CDLL({str(library)!r}); handled, failed = (ctypes.c_int.in_dll(library, n) for n in ("handled", "failed"))
        os.mkdir("h"); library.begin(1000, 5000); i = 0
        while handled.value < 200 or i < 200:
            i += 1; name = f"f{{i % 7}}"
            with open(name, "w") as f: f.write(name)
            os.rename(name, "moved"); os.mkdir("m"); assert os.listdir("m") == [] and open("moved").read() == name; os.rmdir("m"); os.unlink("moved"); os.stat("old.txt")
        library.begin(0, 0); print(failed.value, os.path.getsize("h/log") == handled.value, sorted(os.listdir("h")), sorted(os.listdir("."))); os.truncate("h/log", 3)
    """
    compare(tmp_path, body, ranks=2)


def test_files_before_main_are_one_voices(tmp_path: Path) -> None:
    """Constructors of a program and of a library that it is linked with; the dynamic loader may run either before ours."""
    (tmp_path / "early.c").write_text(BEFORE_MAIN)
    subprocess.run(["cc", "-shared", "-fPIC", '-DWHO="library"', "-o", "libearly.so", "early.c"], cwd=tmp_path, check=True)
    subprocess.run(["cc", "-DMAIN", '-DWHO="main"', "-o", "early", "early.c", "-Wl,--no-as-needed", "-L.", "-learly",
                    f"-Wl,-rpath,{tmp_path}"], cwd=tmp_path, check=True)
    body = f"""
        import os, subprocess
        lag("others"); print(subprocess.run([{str(tmp_path / "early")!r}], capture_output=True, text=True).stdout)
        open("by_voice", "w").close(); lag("others", 0.5); print(open("log").read(), sorted(os.listdir(".")))
    """
    compare(tmp_path, body, ranks=2)


@pytest.mark.parametrize("hard", [False, True])
def test_a_limit_for_the_size_of_files_holds_for_the_scripts_own(hard: bool, tmp_path: Path) -> None:
    """What the library copies and writes down is more than the limit; only where it may not lift that, copying fails."""
    body = f"""
        import os, resource, signal, subprocess
        open("new.txt", "w").write("n" * 9000); lag("others")
        limit = 40000 if {hard} else 5000; resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit if {hard} else resource.RLIM_INFINITY))
        def tries(what, act):
            try: print(what, act())
            except OSError as e: print(what, type(e).__name__, e.errno, e.filename)
        def writes(name, mode, size):
            with open(name, mode, buffering=0) as f: return f.write(b"w" * size), f.write(b"more")
        tries("new", lambda: writes("fresh", "wb", limit)); tries("append", lambda: writes("log", "ab", limit)); tries("all", lambda: writes("large", "wb", limit - 4))
        tries("grown", lambda: os.truncate("new.txt", limit + 1)); tries("cut", lambda: os.truncate("new.txt", 10)); print(resource.getrlimit(resource.RLIMIT_FSIZE)[0] == limit)
        for i in range({40 if hard else 150}): open(f"small-{{i}}", "w").close()
        for i in range({40 if hard else 150}): os.remove(f"small-{{i}}")
        sh = lambda command: subprocess.run(command, shell=True, capture_output=True, text=True)
        for command in ("head -c 50000 /dev/zero > by_child", "truncate -s 7 larger", "cp larger copied", "ls | wc -l", "mv old.txt moved; rm -r old; cat moved; wc -c < larger"):
            done = sh(command + " 2> /dev/null"); print(done.stdout, done.returncode)
        if not {hard}:
            with open("huge", "r+b") as f: print(f.write(b"begin"), f.seek(0, 2))
            print(os.path.getsize("huge"), open("huge", "rb").read(8)); done = sh("dd if=/dev/zero of=huge bs=1 count=3 seek=5 conv=notrunc 2> /dev/null; wc -c < huge"); print(done.stdout, done.returncode)
        print({{n: os.lstat(n).st_size for n in sorted(os.listdir(".")) if os.path.isfile(n)}})
    """

    def larger(folder: Path) -> None:
        for name, size in (("log", 10), ("large", 30000), ("larger", 30000), ("huge", 60000)):
            (folder / name).write_bytes(b"o" * size)

    compare(tmp_path, body, ranks=2, prepared=larger)


@pytest.mark.parametrize("act", [
    "ctypes.PyDLL(None).open(b'x', os.O_WRONLY | os.O_CREAT, 0o644)",  # as C code does that keeps the interpreter's lock
    "os.fork() or os._exit(0)",
    "subprocess.run(['true'], preexec_fn=int)",
    "subprocess.run(['true'], extra_groups=[] if os.geteuid() == 0 else None)",  # a fork of which Python tells nobody
])
def test_a_promotion_goes_on_while_a_thread_waits_for_it(act: str, tmp_path: Path) -> None:
    body = f"""
        import ctypes, subprocess, threading, time
        done = []
        def act():
            started.wait(); {act}
            done.append(time.monotonic())
        started = threading.Event(); thread = threading.Thread(target=act); thread.start()
        with library.alone():
            started.set(); time.sleep(0.5)
            for _ in range(20): os.stat("/"); time.sleep(0.01)
            until = time.monotonic()
        thread.join(); print(done[0] > until)
        files.promote(); print(sorted(os.listdir(".")) == (["x"] if "PyDLL" in {act!r} else []))
    """
    assert alone(tmp_path, body) == ["True", "True"]


def test_a_loader_worker_goes_on_in_the_real_folder(tmp_path: Path) -> None:
    body = """
        os.makedirs("outputs/1"); os.chdir("outputs/1"); (r, w), pid = os.pipe(), os.fork()
        if pid == 0:
            os.read(r, 1); os.path.exists("/tmp"); print(os.getcwd() == os.readlink("/proc/self/cwd"), os.path.exists("after"), flush=True)
            with open("by_worker", "w") as f: f.write("x")
            os._exit(0)
        files.promote(); open("after", "w").close(); os.write(w, b"x"); os.waitpid(pid, 0); print(sorted(os.listdir(".")))
    """
    assert alone(tmp_path, body) == ["True True", "['after', 'by_worker']"]
    assert (tmp_path / "work" / "outputs" / "1" / "by_worker").read_text() == "x"


def test_a_folder_of_a_rank_is_known_by_its_name_though_it_has_the_number_of_one_that_the_voice_removed(tmp_path: Path) -> None:
    """File systems give numbers again at once, or late, or never; so the voice's lines are written here."""
    body = """
        os.makedirs("old"); open("old/x", "w").write("old"); os.makedirs("a/b"); open("a/b/x", "w").write("x"); os.mkdir("c"); here = os.getcwd()
        gone, stays = os.open("c", os.O_RDONLY), os.open("a/b", os.O_RDONLY)
        with open(files._shared + "/ledger", "a") as f:
            for name, i in (("old", stays), ("older", gone)):
                kept = f"0-1-0-i{os.fstat(i).st_ino}"; os.mkdir(f"{files._shared}/kept/{kept}"); f.write(f"\\nd {kept} {here}/{name};\\n")
            f.write(f"\\n- {here}/a;\\n\\n- {here}/a/b;\\n\\n- {here}/c;\\n")
        os.mkdir("in", dir_fd=stays); print(sorted(os.listdir(stays)), os.stat("x", dir_fd=stays).st_size, sorted(os.listdir("a/b")))
        os.chdir("a/b"); print(os.path.relpath(os.getcwd(), here), open("x").read()); os.chdir(here); os.rmdir("c")
        try: print(os.stat(".", dir_fd=gone).st_ino == os.fstat(gone).st_ino, os.mkdir("y", dir_fd=gone))
        except FileNotFoundError as e: print("gone")
        print(os.path.exists("older/y"))
    """
    assert alone(tmp_path, body) == ["['in', 'x'] 1 ['in', 'x']", "a/b x", "gone", "False"]


def test_a_rank_whose_folder_is_gone_can_become_the_voice(tmp_path: Path) -> None:
    body = """
        os.mkdir("d"); os.chdir("d"); open("../x", "w").close(); os.rmdir("../d"); files.promote(); print(os.listdir(".."))
    """
    alone(tmp_path, body)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["x"]


def test_a_socket_keeps_its_name_when_its_rank_becomes_the_voice(tmp_path: Path) -> None:
    body = """
        import socket
        s = socket.socket(socket.AF_UNIX); s.bind("s"); print(s.getsockname()); files.promote(); print(s.getsockname())
    """
    assert alone(tmp_path, body) == ["s", "s"]


def test_a_child_that_is_forked_while_threads_use_files_goes_on(tmp_path: Path) -> None:
    body = """
        import threading, time
        os.mkdir("d"); held = [os.scandir("d") for _ in range(300)]; stop = []
        def lists():
            while not stop: os.listdir("d")
        threads = [threading.Thread(target=lists) for _ in range(3)]
        for thread in threads: thread.start()
        until, forks = time.time() + 2, 0
        while time.time() < until:
            if (pid := os.fork()) == 0: os.listdir("d"); os._exit(0)
            asked = time.time()
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.time() > asked + 10: print("a child hangs"); os.kill(pid, 9); os.waitpid(pid, 0); until = 0; break
                time.sleep(0.0005)
            forks += 1
        stop.append(1); print(forks > 0)
    """
    assert alone(tmp_path, body) == ["True"]


def test_no_line_is_lost_when_processes_of_a_rank_first_change_a_file_at_the_same_moment(tmp_path: Path) -> None:
    body = """
        import os, time
        for i in range(40):
            go, workers = time.time() + 0.03, []
            for k in range(2):
                if (pid := os.fork()) == 0:
                    while time.time() < go: pass
                    fd = os.open(f"log{i}", os.O_WRONLY | os.O_APPEND); time.sleep(0.01); os.write(fd, b"line\\n"); os._exit(0)
                workers.append(pid)
            for pid in workers: os.waitpid(pid, 0)
        print([os.path.getsize(f"log{i}") for i in range(40)])
    """

    def logs(folder: Path) -> None:
        for i in range(40):
            (folder / f"log{i}").write_bytes(b"x" * 300000)

    compare(tmp_path, body, ranks=2, prepared=logs)
