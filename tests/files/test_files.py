"""Clause 6, one voice: every rank runs the script, one rank's files are real, all ranks see what one process would.

Each test is a small script (the many in ``test_files_table.py``, the special ones here). It runs under plain Python and
at the same time, in another folder, on three ranks (plain processes: no MPI is needed), the voice first, last or in
between by deliberate delays. All must print the same lines, and the real tree must be that of plain Python.
"""
# ruff: noqa: E501  (the scripts of the table read best one act per line)

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from on_ranks import compare, start
from running import environment


def test_summary_writers_write_one_event_file(tmp_path: Path) -> None:
    body = """
        import os, torch
        from torch.utils.tensorboard import SummaryWriter
        with SummaryWriter("logs") as w: w.add_scalar("x", 1.0, 0); lag("others")
        print(len(os.listdir("logs")), os.path.getsize("logs/" + os.listdir("logs")[0]) > 0)
        with SummaryWriter("logs2") as w: w.add_scalar("x", 1.0, 0)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        print([e.value for e in EventAccumulator("logs2").Reload().Scalars("x")])
        import shutil; shutil.rmtree("logs2")
    """
    compare(tmp_path, body, ranks=2, only="logs/")
    assert len(os.listdir(tmp_path / "run" / "w" / "logs")) == 1


def test_a_compiler_cache_is_one_for_all_ranks_and_real(tmp_path: Path) -> None:
    body = """
        import os, subprocess
        os.makedirs("cache/in", exist_ok=True); open(f"cache/in/{os.getpid()}", "w").write("source")
        print(subprocess.run(["cat", f"cache/in/{os.getpid()}"], capture_output=True, text=True).stdout)
    """
    compare(tmp_path, body, only="cache/in/", TORCHINDUCTOR_CACHE_DIR="cache")
    assert len(os.listdir(tmp_path / "run" / "w" / "cache" / "in")) == 3


def test_an_hdf5_file_is_opened_where_the_rank_has_it(tmp_path: Path) -> None:
    """With a stand-in for h5py that, like it, opens files behind Python's back."""
    (tmp_path / "h5py.py").write_text(
        "import posix\n"
        "class File:\n"
        "    def __init__(self, name, mode='r', driver=None):\n"
        "        flags = {'r': 0, 'w': 577, 'a': 66}[mode]\n"
        "        self.fd = posix.open(name, flags, 0o644)\n"
    )
    body = """
        import os, posix, h5py
        f = h5py.File("x.h5", "w"); posix.write(f.fd, b"data"); lag("others")
        f = h5py.File("x.h5", "a"); posix.write(f.fd, b"D")
        print(posix.read(h5py.File("x.h5").fd, 9), os.path.getsize("x.h5"))
    """
    compare(tmp_path, body)


@pytest.mark.skipif(os.geteuid() != 0 and "CI" not in os.environ, reason="needs root to become somebody else")
def test_what_one_process_may_not_write_no_rank_may(tmp_path: Path) -> None:
    body = """
        import os
        for act in (lambda: open("x", "w"), lambda: open("old/x", "w"), lambda: open("old.txt", "a"), lambda: os.mkdir("d"), lambda: os.remove("old.txt"),
                    lambda: os.rename("old.txt", "n"), lambda: os.rmdir("empty"), lambda: os.listdir("empty"), lambda: os.chmod("old.txt", 0o777),
                    lambda: os.symlink("a", "b"), lambda: os.truncate("old.txt", 0), lambda: open("old/deep/ok", "w").write("ok"), lambda: open("empty/x"),
                    lambda: open("old/a.txt", "a").write("+"), lambda: os.remove("old/a.txt"), lambda: os.rename("old/a.txt", "old/deep/a.txt")):
            try: print(act())
            except OSError as e: print(type(e).__name__, e)
        print(os.access("old", os.W_OK), open("old.txt").read(), open("old/deep/ok").read(), open("old/a.txt").read())
    """

    def close(folder: Path) -> None:
        for name, mode in {"": 0o755, "old": 0o555, "old.txt": 0o444, "empty": 0, "old/deep": 0o777, "old/a.txt": 0o666}.items():
            (folder / name).chmod(mode)

    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    for folder in (tmp_path / "temporary", tmp_path / "shared"):
        folder.mkdir()
        folder.chmod(0o777)
    compare(tmp_path, body, prepared=close, UID_IN_TEST="65534")


@pytest.mark.skipif(os.geteuid() != 0 and "CI" not in os.environ, reason="needs root to mount a small disk")
def test_a_full_overlay_is_named_in_the_error(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], capture_output=True).returncode:
        assert "CI" not in os.environ, "CI can mount"
        pytest.skip("cannot mount here")
    try:
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent("""
            import shutil
            from oars.adapt import files
            for act in (lambda: open("big", "w").write("x" * 10**6), lambda: shutil.copy("old", "new"), lambda: open("old", "a")):
                try: act(); print("no error")
                except OSError as e: print(e, files.explained(e))
            """)
        )
        work = tmp_path / "work"
        work.mkdir()
        (work / "old").write_bytes(b"x" * 10**6)
        process = start(1, 2, work, script, tmp_path / "shared", TMPDIR=str(small))
        lines = process.communicate(timeout=60)[0].splitlines()
        assert len(lines) == 3
        assert all("No space left" in line and str(small) in line for line in lines), lines
        assert os.listdir(work) == ["old"]
    finally:
        subprocess.run(["umount", str(small)])


def test_ranks_that_race_on_the_same_files_all_take_the_same_branch(tmp_path: Path) -> None:
    """Three ranks without any delays, many files each looked at, made, changed and removed as fast as they can."""
    body = """
        import hashlib, json, os, random
        seen = hashlib.sha256(); random.seed(1)
        for i in range(400):
            name = f"f{random.randrange(12)}"
            if not os.path.exists(name):
                with open(name, "w") as f: f.write(json.dumps([i] * random.randrange(3000)))
            elif random.random() < 0.2: os.remove(name)
            elif random.random() < 0.2: os.replace(name, f"f{random.randrange(12)}")
            else:
                with open(name, "r" if random.random() < 0.5 else "r+") as f:
                    data = json.load(f); seen.update(repr(data).encode())
                    if f.mode == "r+": f.seek(0); f.truncate(); json.dump([i], f)
            seen.update(repr(sorted(os.listdir("."))).encode())
        print(seen.hexdigest())
    """
    for attempt in range(3):
        (tmp_path / str(attempt)).mkdir()
        compare(tmp_path / str(attempt), "import os\nfor i in range(0, 12, 2): open(f'f{i}', 'x').write('[]')\n" + textwrap.dedent(body))


def test_on_one_rank_nothing_is_replaced() -> None:
    code = "import builtins, os; before = dict(vars(os)), open; import oars.adapt.files; assert before == (dict(vars(os)), open)"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_the_overlay_of_a_killed_rank_is_removed_by_the_next_run(tmp_path: Path) -> None:
    temporary, work = tmp_path / "temporary", tmp_path / "work"
    temporary.mkdir()
    work.mkdir()
    script = tmp_path / "script.py"
    script.write_text("open('x', 'w').write('x'); print('written', flush=True); import time; time.sleep(60)")
    killed = start(1, 2, work, script, tmp_path / "shared", TMPDIR=str(temporary))
    alive = start(2, 2, work, script, tmp_path / "shared", TMPDIR=str(temporary))
    try:
        for process in (killed, alive):
            assert process.stdout and process.stdout.readline() == "written\n"
        killed.kill()
        killed.communicate()
        for folder in temporary.iterdir():
            os.utime(folder, (0, 0))
        script.write_text("from oars.adapt import files; files.close(); import os; os._exit(0)")
        start(3, 2, work, script, tmp_path / "shared", TMPDIR=str(temporary)).communicate(timeout=60)
        assert [name[:7] for name in os.listdir(temporary)] == ["oars-2-"]
    finally:
        alive.kill()
        alive.communicate()
