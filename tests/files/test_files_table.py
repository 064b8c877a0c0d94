"""Clause 6, one voice, act by act: whatever Python offers to read and write files, on every rank as on one process."""
# ruff: noqa: E501  (the scripts of the table read best one act per line)

from __future__ import annotations

from pathlib import Path

import pytest
from on_ranks import compare

CASES = {
    "open_write_read": """
        with open("x.txt", "w") as f: print(f.name, f.mode, f.write("hello"))
        lag("others"); print(open("x.txt").read())
        with open("x.txt", "a") as f: f.write(" again")
        with open("x.txt", "r+") as f: f.write("J"); f.seek(0); print(f.read(), f.encoding)
        with open("b.bin", "wb", 0) as f: print(f.write(b"raw"), type(f).__mro__[-4].__name__)
        try: open("x.txt", "x")
        except FileExistsError as e: print(e)
        with open("l.txt", "w", 1, newline="\\r\\n") as f: f.write("a\\nb\\n"); print(f.line_buffering, open("l.txt", "rb").read())
    """,
    "exists_then_make": """
        import os, time
        lag("others")
        if not os.path.exists("data.txt"):
            print("making it")
            with open("data.txt", "w") as f:
                f.write("half"); f.flush(); lag("voice"); f.write(" and half")
        print(open("data.txt").read(), os.path.getsize("data.txt"), sorted(os.listdir(".")))
        print(os.path.exists("data.txt"), os.path.isfile("data.txt"), os.access("data.txt", os.R_OK))
    """,
    "exists_then_make_voice_late": """
        import os
        lag("voice")
        if not os.path.exists("data.txt"):
            print("making it"); open("data.txt", "w").write("x")
        print(open("data.txt").read(), sorted(os.listdir(".")))
    """,
    "overwrite_what_others_still_read": """
        f = open("old.txt")
        lag("others")
        text = f.read() + open("old.txt").read()
        open("old.txt", "w").write("new")
        lag("others")
        print(text, open("old.txt").read(), open("link.txt").read())
    """,
    "append_to_an_old_file": """
        import os
        for i in range(3):
            lag("others", 0.1)
            print(os.path.getsize("old.txt"), len(open("old.txt").readlines()))
            with open("old.txt", "a") as f: f.write(f"{i}\\n")
        print(open("old.txt").read())
    """,
    "write_through_links": """
        import os
        open("link.txt", "a").write("more"); lag("others")
        open("link/c.txt", "w").write("c")
        print(open("old.txt").read(), os.path.islink("link.txt"), sorted(os.listdir("old")), sorted(os.listdir("link")))
        os.unlink("link"); print(os.path.exists("link"), os.path.exists("old/a.txt"))
        os.symlink("old/deep", "link"); print(os.listdir("link"), os.readlink("link"), os.path.realpath("link/b.txt"))
        open("link/d.txt", "w").write("d"); print(sorted(os.listdir("old/deep")))
        os.symlink("nowhere", "dangling"); print(os.path.lexists("dangling"), os.path.exists("dangling"))
        os.symlink("loop", "loop")
        try: open("loop")
        except OSError as e: print(e)
    """,
    "delete_and_recreate": """
        import os
        lag("others"); print(open("old.txt").read())
        os.remove("old.txt"); lag("voice")
        print(os.path.exists("old.txt"), "old.txt" in os.listdir("."))
        try: open("old.txt")
        except FileNotFoundError as e: print(e)
        try: os.remove("old.txt")
        except FileNotFoundError as e: print(e)
        print(os.path.exists("link.txt"), os.path.lexists("link.txt"))
        open("old.txt", "w").write("young"); print(open("old.txt").read(), open("link.txt").read())
        os.remove("old.txt")
    """,
    "folders": """
        import os
        os.makedirs("out/deep/er", exist_ok=True); os.makedirs("out/deep/er", exist_ok=True); lag("others")
        open("out/deep/x", "w").write("x"); print(sorted(os.listdir("out/deep")))
        for act in (lambda: os.mkdir("out"), lambda: os.rmdir("out"), lambda: os.mkdir("no/where"), lambda: os.rmdir("old"),
                    lambda: os.listdir("none"), lambda: open("no/file", "w"), lambda: open("old.txt/x", "w"), lambda: open("out", "w"),
                    lambda: os.listdir("old.txt"), lambda: os.unlink("old"), lambda: os.rmdir("old.txt"), lambda: os.rename("zip", "zap"),
                    lambda: os.rename("old.txt", "old"), lambda: os.rename("empty", "old.txt"), lambda: os.rename("empty", "old"),
                    lambda: os.stat("old.txt/y"), lambda: os.symlink("a", "old.txt"), lambda: os.rename("old", "old/in"), lambda: os.stat("")):
            try: act()
            except OSError as e: print(type(e).__name__, e)
        os.rmdir("empty"); print(os.path.isdir("empty")); os.mkdir("empty"); print(os.listdir("empty"))
        os.removedirs("out/deep/er")
        print([(d, sorted(ds), sorted(fs)) for d, ds, fs in sorted(os.walk("."))])
    """,
    "rename": """
        import os
        lag("others"); os.rename("old.txt", "new.txt"); lag("voice", 0.1)
        print(open("new.txt").read(), os.path.exists("old.txt"))
        open("new.txt", "a").write("three"); print(open("new.txt").read())
        open("tmp", "w").write("atomic"); os.replace("tmp", "new.txt"); print(open("new.txt").read())
        lag("others"); print(sorted(os.listdir("old/deep")))
        os.rename("old", "older"); print(sorted(os.listdir("older")), os.path.exists("old"), open("older/deep/b.txt").read())
        os.rename("older/deep", "empty"); print(os.listdir("empty"), os.listdir("older"))
        os.mkdir("old"); open("old/a.txt", "w").write("A"); print(os.listdir("old"))
        os.mkdir("fresh"); open("fresh/f", "w").write("f"); os.rename("fresh", "fresher"); print(open("fresher/f").read())
        os.link("new.txt", "hard"); print(open("hard").read(), os.path.samefile("hard", "new.txt"))
    """,
    "chdir": """
        import os
        from pathlib import Path
        home = os.getcwd(); os.makedirs("out/in"); os.chdir("out"); lag("others")
        open("x", "w").write("x"); print(os.getcwd(), sorted(os.listdir()), os.listdir("in"), Path("x").resolve(), Path.cwd())
        print(open("../old.txt").read(), os.path.abspath("x"), os.path.exists(home + "/out/x"))
        os.chdir("in"); print(os.getcwd(), os.path.exists("../x")); open("../y", "w").write("y")
        os.chdir("../.."); print(os.getcwd() == home, sorted(os.listdir("out")))
        os.chdir("old"); open("z", "w").write("z"); print(sorted(os.listdir(".")), os.getcwd()); os.chdir("..")
        try: os.chdir("none")
        except OSError as e: print(e)
    """,
    "pathlib": """
        from pathlib import Path
        p = Path("out/sub"); p.mkdir(parents=True); lag("others")
        (p / "a.txt").write_text("a"); (p / "b.bin").write_bytes(b"b"); (p / "t").touch(); Path("old.txt").touch()
        print(sorted(map(str, Path(".").rglob("*.txt"))), sorted(map(str, p.iterdir())), (p / "a.txt").read_text(), p.exists())
        print((p / "a.txt").rename(p / "c.txt"), (p / "a.txt").exists(), (p / "c.txt").stat().st_size, p.is_dir(), (p / "t").is_file())
        (p / "t").unlink(); (p / "t").unlink(missing_ok=True); print(sorted(map(str, Path().glob("**/*"))))
        with Path("old.txt").open("a") as f: f.write("x")
        print(Path("old.txt").read_text(), Path("link.txt").resolve().name, Path("old").is_symlink(), Path("link").is_symlink())
    """,
    "shutil": """
        import os, shutil
        open("x", "w").write("x"); lag("others")
        print(shutil.copy("x", "old"), shutil.copy2("x", "y"), shutil.copyfile("old.txt", "z"))
        shutil.copytree("old", "copy"); print(sorted(os.listdir("copy")), sorted(os.listdir("copy/deep")))
        shutil.copytree("old", "copy", dirs_exist_ok=True); shutil.move("z", "copy"); print(sorted(os.listdir("copy")))
        shutil.move("copy", "moved"); print(os.path.exists("copy"), sorted(os.listdir("moved")))
        lag("others"); shutil.rmtree("old"); print(os.path.exists("old"), os.path.lexists("link"), os.path.exists("link"))
        shutil.rmtree("moved"); shutil.rmtree("none", ignore_errors=True); print(sorted(os.listdir(".")), shutil.disk_usage(".").total > 0)
        os.makedirs("old/deep"); print(os.listdir("old"), os.listdir("old/deep"), os.listdir("link"))
        print(os.path.basename(shutil.make_archive("arc", "tar", "old")))
        os.remove("arc.tar")
    """,
    "tempfile": """
        import os, tempfile
        with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as f: f.write("t")
        os.replace(f.name, "from_tmp.txt"); lag("others"); print(open("from_tmp.txt").read(), os.path.exists(f.name))
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as f: f.write("u")
        os.replace(f.name, "here.txt"); print(open("here.txt").read(), sorted(os.listdir(".")))
        with tempfile.NamedTemporaryFile() as f: f.write(b"x"); f.flush(); print(os.path.getsize(f.name))
        print(os.path.exists(f.name))
        with tempfile.TemporaryDirectory() as d:
            open(d + "/x", "w").write("x"); print(os.listdir(d))
            import subprocess; print(subprocess.run(["cat", d + "/x"], capture_output=True, text=True).stdout)
        print(os.path.exists(d))
        with tempfile.TemporaryFile() as f: f.write(b"abc"); f.seek(0); print(f.read())
        with tempfile.TemporaryFile(dir=".") as f: f.write(b"abc"); f.seek(0); print(f.read())
        fd, name = tempfile.mkstemp(); os.write(fd, b"q"); os.close(fd); print(open(name).read()); os.remove(name)
        with tempfile.SpooledTemporaryFile(max_size=2) as f: f.write(b"abc"); f.seek(0); print(f.read())
    """,
    "glob_and_fileinput": """
        import fileinput, glob, os
        open("n1.txt", "w").write("1\\n"); open("old/n2.txt", "w").write("2\\n"); lag("others")
        print(sorted(glob.glob("*.txt")), sorted(glob.glob("**/*.txt", recursive=True)), sorted(glob.glob("old/*")))
        with fileinput.input("old.txt", inplace=True) as lines:
            for line in lines: print(line.upper(), end="")
        print(open("old.txt").read(), sorted(os.listdir(".")))
        print(sorted((e.name, e.is_dir(), e.is_file(), e.is_symlink(), e.path) for e in os.scandir(".")))
        print(sorted(os.listdir(b".")), sorted(e.path for e in os.scandir(b"old")))
    """,
    "archives": """
        import bz2, gzip, lzma, os, tarfile, zipfile
        for m, n in ((gzip, "g.gz"), (bz2, "g.bz2"), (lzma, "g.xz")):
            with m.open(n, "wt") as f: f.write(n)
            lag("others", 0.1); print(m.open(n, "rt").read())
        with zipfile.ZipFile("z.zip", "w") as z: z.writestr(zipfile.ZipInfo("in"), "zip")
        with zipfile.ZipFile("z.zip", "a") as z: z.write("old.txt")
        with zipfile.ZipFile("z.zip") as z: print(z.namelist(), z.read("in")); z.extractall("unzipped")
        with tarfile.open("t.tar", "w") as t: t.add("old")
        with tarfile.open("t.tar") as t: t.extractall("untarred"); print(sorted(t.getnames()))
        print(sorted(os.listdir("untarred/old")), sorted(os.listdir("unzipped")))
        for n in ("g.gz", "z.zip", "t.tar", "unzipped/old.txt", "unzipped/in"): os.remove(n)
    """,
    "csv_json_pickle": """
        import csv, json, os, pickle
        with open("c.csv", "w", newline="") as f: csv.writer(f).writerows([[1, 2], [3, 4]])
        lag("others"); print(list(csv.reader(open("c.csv", newline=""))))
        json.dump({"n": 1}, open("s.json", "w")); state = json.load(open("s.json")); state["n"] += 1
        json.dump(state, open("s.json", "w")); print(open("s.json").read())
        with open("p.pkl", "wb") as f: pickle.dump([1, "x"], f)
        print(pickle.load(open("p.pkl", "rb")))
    """,
    "numpy": """
        import os, numpy as np
        if not os.path.exists("data.npy"): np.save("data.npy", np.arange(6.0))
        lag("others"); print(np.load("data.npy"), np.load("data.npy", mmap_mode="r")[2])
        m = np.load("data.npy", mmap_mode="r+"); m[0] = 9; m.flush(); print(np.load("data.npy"))
        np.savez("d.npz", a=np.ones(2)); print(np.load("d.npz")["a"]); np.savetxt("d.txt", np.eye(2)); print(np.loadtxt("d.txt"))
        with open("t.txt", "w") as f: f.write("1 2")
        lag("others"); print(np.loadtxt("t.txt"), np.genfromtxt("t.txt")); np.savetxt("t.txt", [9.0]); print(np.loadtxt("t.txt"))
        w = np.memmap("m.dat", np.int32, "w+", shape=4); w[:] = 3; w.flush(); print(np.memmap("m.dat", np.int32, "r").sum(), m.filename)
        np.arange(3).tofile("f.dat"); print(np.fromfile("f.dat", dtype=int)); os.remove("d.npz")
    """,
    "torch_save": """
        import os, torch
        from pathlib import Path
        t = torch.arange(4.0)
        for name in ("m.pt", Path("m.pt")):
            torch.save({"t": t}, name); lag("others"); print(torch.load("m.pt")["t"], torch.load(name, mmap=True)["t"])
        os.makedirs("ckpt"); torch.save(t, f="ckpt/é.pt"); print(torch.load(Path("ckpt/é.pt")), os.listdir("ckpt"))
        torch.save(t, "ckpt/tmp.pt"); os.replace("ckpt/tmp.pt", "ckpt/last.pt"); print(torch.load("ckpt/last.pt"))
        torch.save(t, "old.bin", _use_new_zipfile_serialization=False); print(torch.load("old.bin")); os.remove("old.bin")
        with open("h.pt", "wb") as f: torch.save(t, f)
        print(torch.load(open("h.pt", "rb")), torch.from_file("raw.bin", shared=True, size=3).fill_(2), os.path.getsize("raw.bin"))
        try: torch.save(t, "no/where.pt")
        except (RuntimeError, OSError) as e: print("cannot")
        try: torch.load("none.pt")
        except FileNotFoundError as e: print(e)
    """,
    "sqlite": """
        import os, sqlite3
        c = sqlite3.connect("d.db"); c.execute("create table if not exists t (x)"); lag("others")
        c.execute("insert into t values (1)"); c.commit(); c.close()
        print(sqlite3.connect("d.db").execute("select count(*) from t").fetchone(), os.path.exists("d.db"))
        print(sqlite3.connect(":memory:").execute("select 1").fetchone())
        try: sqlite3.connect("no/where.db")
        except sqlite3.OperationalError as e: print(e)
    """,
    "logging": """
        import logging, logging.handlers, os
        log = logging.getLogger("x"); log.setLevel("INFO")
        log.addHandler(logging.FileHandler("run.log")); log.addHandler(logging.handlers.RotatingFileHandler("rot.log", maxBytes=30, backupCount=2))
        for i in range(5): log.info("line %d, of some length", i); lag("others", 0.05)
        print(open("run.log").read(), sorted(n for n in os.listdir(".") if "log" in n), open("rot.log.1").read())
        print(os.path.basename(log.handlers[0].baseFilename))
    """,
    "pictures": """
        import os, matplotlib.pyplot as plt
        from PIL import Image
        plt.plot([1, 2]); plt.savefig("p.png", metadata={"Software": None}); plt.savefig("p.svg"); lag("others"); os.remove("p.svg")
        print(Image.open("p.png").size, plt.imread("p.png").shape); Image.new("RGB", (4, 3)).save("q.png"); print(Image.open("q.png").size)
    """,
    "descriptors": """
        import os
        fd = os.open("d", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640); lag("others"); os.write(fd, b"hey"); os.close(fd)
        with os.fdopen(os.open("d", os.O_RDWR), "r+") as f: print(f.read()); f.write("!")
        print(open("d").read(), oct(os.stat("d").st_mode), open(os.open("d", 0)).read())
        try: os.open("d", os.O_CREAT | os.O_EXCL)
        except OSError as e: print(e)
        os.truncate("d", 2); os.truncate("old.txt", 3); print(open("d").read(), open("old.txt").read())
        os.chmod("d", 0o600); os.utime("old/a.txt", (1, 2)); print(oct(os.stat("d").st_mode), os.stat("old/a.txt").st_mtime)
        os.chmod("old", 0o755); os.utime("old"); print(open("/dev/null", "w").write("x"), len(open("/proc/self/stat").read()) > 9)
        with open("o", "w", opener=lambda p, f: os.open(p, f, 0o600)) as f: f.write("o")
        print(open("o").read(), os.path.getsize(b"o")); os.mkfifo("pipe") if 0 else None
    """,
    "forked_workers": """
        import os
        def child(act):
            pid = os.fork()
            if pid == 0:
                act(); os._exit(0)
            os.waitpid(pid, 0)
        child(lambda: open("c.txt", "w").write("child")); lag("others"); print(open("c.txt").read(), sorted(os.listdir(".")))
        child(lambda: os.remove("old.txt")); print(os.path.exists("old.txt"))
        open("p.txt", "w").write("parent"); child(lambda: open("p.txt", "a").write("+child")); print(open("p.txt").read())
        os.mkdir("d"); child(lambda: open("d/x", "w").write("x")); print(os.listdir("d"))
    """,
    "loader_workers": """
        import torch
        from torch.utils.data import DataLoader, Dataset
        class D(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i):
                with open(f"cache-{i}.txt", "w") as f: f.write(str(i))
                return torch.ones(3) * i
        if __name__ == "__main__":
            print([b.tolist() for b in DataLoader(D(), batch_size=2, num_workers=2)]); lag("others")
            print([open(f"cache-{i}.txt").read() for i in range(4)])
    """,
    "own_module": """
        import sys, os
        sys.path.insert(0, os.getcwd()); open("written.py", "w").write("x = 3"); lag("others")
        import importlib; importlib.invalidate_caches()
        import written; print(written.x); os.remove("written.py")
    """,
    "odd_names": """
        import os
        for name in ("ü.txt", "a b", "new\\nline", "sur\\udcff", "-", ".hidden", "x" * 250):
            open(name, "w").write(name.encode("utf-8", "surrogateescape").hex()[:9]); lag("others", 0.03); print(ascii(name), open(name).read(), name in os.listdir("."))
        open("./old/../old//dot", "w").write("d"); print(open("old/./dot").read(), open(os.path.abspath("old/dot")).read(), os.path.isdir("old/"), os.path.isdir("old/deep/.."))
        os.mkdir("slash/"); print(os.path.isdir("slash")); os.rmdir("slash/")
        for bad in ("a\\0b",):
            try: open(bad, "w")
            except ValueError as e: print(e)
        for bad in (None, 1.5):
            try: os.stat(bad)
            except TypeError as e: print("type")
        for mode in ("rw", "z", "wb+t", "", "wr"):
            try: open("old.txt", mode)
            except ValueError as e: print(e)
        try: open("old.txt", "wb", encoding="utf8")
        except ValueError as e: print(e)
        print(open("old.txt").read())
    """,
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sees_what_one_process_would_and_only_the_voice_is_real(name: str, tmp_path: Path) -> None:
    compare(tmp_path, CASES[name], ranks=2 if "torch" in CASES[name] or "matplotlib" in CASES[name] else 3)
