"""Scripts that write by C++, by Rust and by child processes, for tests of any order of ranks and of deaths."""
# ruff: noqa: E501  (they read best one act per line)

SCRIPTS = {
    "programs": """
        import os, shutil, subprocess
        def sh(command): return subprocess.run(command, shell=True, capture_output=True, text=True, cwd=None).stdout
        sh("echo one >> log; echo two >> log"); print(open("log").read(), sh("cat log; wc -l < log"))
        sh("cp old.txt copy; mv copy moved; mkdir -p a/b; echo x > a/b/x; ln -s a link2; ln moved hard"); print(sh("cat moved link2/b/x hard; ls a; find a | sort"))
        sh("rm -r old; tar cf t.tar a; mkdir out; tar xf t.tar -C out; rm t.tar; sed -i s/one/ONE/ log; chmod 600 log"); print(sorted(os.listdir(".")), open("out/a/b/x").read(), oct(os.stat("log").st_mode))
        os.system("echo three >> log"); print(os.popen("sort log").read()); subprocess.run(["sh", "-c", "echo $$ > /dev/null; exec touch execed"])
        subprocess.run(["touch", "clean"], env={}); subprocess.run("cd a && echo y > y && pwd -P | xargs basename", shell=True); print(sh("cat a/y; ls"), os.path.exists("clean"))
        open("run.sh", "w").write("#!/bin/sh\\necho ran $1 > ran\\ncat ran\\n"); os.chmod("run.sh", 0o755); print(sh("./run.sh x"), subprocess.run(["./run.sh", "y"], capture_output=True, text=True).stdout)
        print("LD_PRELOAD" in os.environ, sh("env | grep -c -e OARS_FILES -e '^LD_PRELOAD'"), shutil.which("sh") is not None)
        p = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=open("by_cat", "w"), text=True); p.communicate("hello"); print(open("by_cat").read())
        subprocess.run(["find", ".", "-name", "b", "-prune", "-exec", "rm", "-rf", "{}", "+"]); print(sorted(os.listdir("a")))
    """,
    "feature_cache": """
        import os, subprocess, sys
        if not os.path.exists("cache/features.txt"):
            print("computing"); os.makedirs("cache", exist_ok=True)
            subprocess.run([sys.executable, "-c", "open('cache/part', 'w').write('1 2 3'); import os; os.rename('cache/part', 'cache/features.txt')"], check=True)
        print(open("cache/features.txt").read(), os.listdir("cache"), os.path.getsize("cache/features.txt"))
    """,
    "arrow_and_parquet": """
        import os, pyarrow as pa, pyarrow.parquet as pq, pyarrow.csv as pc, pyarrow.dataset as ds
        t = pa.table({"a": list(range(100)), "b": ["x"] * 100})
        pq.write_table(t, "t.parquet"); print(pq.read_table("t.parquet").num_rows, pq.ParquetFile("t.parquet").metadata.num_columns)
        with pa.OSFile("t.arrow", "wb") as f, pa.ipc.new_file(f, t.schema) as w: w.write_table(t)
        with pa.memory_map("t.arrow") as f: print(pa.ipc.open_file(f).read_all()["a"].to_pylist()[-1])
        pc.write_csv(t.slice(0, 2), "t.csv"); print(open("t.csv").read()); ds.write_dataset(t, "set", format="parquet", partitioning=["b"])
        print(sorted(str(p) for p in ds.dataset("set").files), ds.dataset("set").count_rows()); os.replace("t.parquet", "final.parquet"); print(pq.read_metadata("final.parquet").num_rows)
        for name in ("final.parquet", "set/x/part-0.parquet"): os.remove(name)
    """,
    "hdf5": """
        import os, h5py, numpy as np
        if not os.path.exists("d.h5"):
            with h5py.File("d.h5", "w") as f: f["x"] = np.arange(10); f.attrs["n"] = 1
        with h5py.File("d.h5", "a") as f: f["y"] = f["x"][:] * 2; f.attrs["n"] += 1
        with h5py.File("d.h5", "r+") as f: f["x"][0] = 7
        with h5py.File("d.h5") as f: print(list(f), f["x"][:].tolist(), f["y"][:].tolist(), int(f.attrs["n"]), f.filename)
        try: h5py.File("d.h5", "x")
        except FileExistsError as e: print("exists")
        os.remove("d.h5")
    """,
    "sqlite": """
        import os, sqlite3, subprocess, sys
        c = sqlite3.connect("d.db"); c.execute("pragma journal_mode=wal"); c.execute("create table t (x)"); c.executemany("insert into t values (?)", [(i,) for i in range(50)]); c.commit()
        print(subprocess.run([sys.executable, "-c", "import sqlite3; c = sqlite3.connect('d.db'); c.execute('insert into t values (99)'); c.commit(); print(c.execute('select count(*) from t').fetchone())"], capture_output=True, text=True))
        print(c.execute("select count(*), max(x) from t").fetchone()); c.close(); d = sqlite3.connect("file:d.db?mode=ro", uri=True); print(d.execute("select sum(x) from t").fetchone()); d.close(); print(sorted(os.listdir(".")))
        os.remove("d.db")
    """,
    "torch": """
        import ctypes, os, torch
        torch.save({"w": torch.arange(5.0)}, "m.pt"); print(torch.load("m.pt", mmap=True)["w"], torch.jit.load("j.pt")(torch.ones(2)) if os.path.exists("j.pt") else "")
        torch.jit.script(torch.nn.Linear(2, 1)).save("j.pt"); print(torch.jit.load("j.pt").weight.shape); os.remove("j.pt"); os.rename("m.pt", "n.pt")
        print(torch.from_file("raw.bin", shared=True, size=4).fill_(3), os.path.getsize("raw.bin"), sorted(os.listdir("."))); os.remove("n.pt")
        libc = ctypes.CDLL(None, use_errno=True); fd = libc.syscall(257, -100, b"by_syscall", os.O_WRONLY | os.O_CREAT, 0o644) if os.uname().machine == "x86_64" else os.open("by_syscall", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, b"raw"); os.close(fd); print(open("by_syscall").read()); fd = os.open("old", os.O_RDONLY); os.mkdir("sub", dir_fd=fd); print(sorted(os.listdir(fd)), os.stat("a.txt", dir_fd=fd).st_size)
        with open("in_old", "w", opener=lambda p, f: os.open(p, f, dir_fd=fd)) as f: f.write("o")
        os.rename("in_old", "renamed", src_dir_fd=fd, dst_dir_fd=fd); print(sorted(os.listdir("old"))); os.unlink("a.txt", dir_fd=fd); print(os.path.exists("old/a.txt")); os.fchdir(fd); print(os.path.basename(os.getcwd()), sorted(os.listdir(".")))
    """,
    "imports": """
        import importlib, os, sys
        sys.path.insert(0, os.getcwd()); os.makedirs("made_modules/metrics"); print(importlib.util.find_spec("made_modules.metrics.accuracy") if os.path.exists("made_modules/__init__.py") else None)
        open("made_modules/__init__.py", "w"); open("made_modules/metrics/__init__.py", "w"); importlib.invalidate_caches(); import made_modules.metrics
        open("made_modules/metrics/accuracy.py", "w").write("def score(): return 0.5"); print(importlib.import_module("made_modules.metrics.accuracy").score())
        open("later.py", "w").write("x = 1"); import later; print(later.x)
    """,
}
