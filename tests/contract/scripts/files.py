"""The outside world: files written, appended, renamed, deleted and read back."""

import csv
import json
import os
import pathlib
import pickle
import shutil
import sqlite3
import tempfile
import zipfile

import numpy as np
import torch
from scenes import fit, mlp, play, scene, table
from torch.utils.data import DataLoader, Dataset, TensorDataset

x, y = table(20)


@scene
def open_and_append():
    with open("log.txt", "w") as f:
        f.write("begin\n")
    for i in range(3):
        with open("log.txt", "a") as f:
            print("line", i, file=f)
    with open("log.txt", "r+") as f:
        first = f.readline()
        f.seek(0)
        f.write("BEGIN")
    print(first.strip(), open("log.txt").read().splitlines(), os.path.getsize("log.txt"), os.path.exists("log.txt"))
    with open("x.txt", "x") as f:
        f.write("once")
    try:
        open("x.txt", "x")
    except FileExistsError as error:
        print(type(error).__name__)
    with open("bytes.bin", "wb") as f:
        f.write(bytes(range(256)))
    with open("bytes.bin", "rb") as f:
        f.seek(250)
        print(list(f.read()))


@scene
def folders():
    os.makedirs("out/deep/er", exist_ok=True)
    os.mkdir("single")
    pathlib.Path("out/p").mkdir(parents=True)
    pathlib.Path("out/p/note.txt").write_text("a note\n")
    pathlib.Path("out/p/raw").write_bytes(b"\x00\x01")
    (pathlib.Path("out") / "deep" / "x.json").write_text(json.dumps({"a": 1}))
    print(sorted(os.listdir("out")), sorted(p.name for p in pathlib.Path("out").rglob("*")), os.path.isdir("single"))
    print(pathlib.Path("out/p/note.txt").read_text().strip(), sorted(str(p) for p in pathlib.Path(".").glob("out/*/*")))
    for where, folders, names in sorted(os.walk("out")):
        print(where, sorted(folders), sorted(names))
    os.rmdir("single")
    print(os.path.exists("single"), [e.name for e in os.scandir("out") if e.name == "p"])
    try:
        os.makedirs("out/p")
    except FileExistsError as error:
        print(type(error).__name__)
    here = os.getcwd()
    os.chdir("out/p")
    open("relative.txt", "w").write("here")
    os.chdir(here)
    print(open("out/p/relative.txt").read())


@scene
def rename_copy_delete():
    for name in "abcde":
        pathlib.Path(f"{name}.txt").write_text(name * 3)
    os.rename("a.txt", "a2.txt")
    os.replace("b.txt", "a2.txt")
    shutil.copy("c.txt", "c2.txt")
    shutil.copyfile("c.txt", "c3.txt")
    shutil.move("d.txt", "d2.txt")
    os.remove("e.txt")
    pathlib.Path("c2.txt").rename("c4.txt")
    pathlib.Path("c3.txt").unlink()
    os.makedirs("tree/sub")
    pathlib.Path("tree/sub/leaf").touch()
    shutil.copytree("tree", "tree2")
    shutil.rmtree("tree")
    print(
        sorted(p for p in os.listdir() if p[0] in "abcdet" and len(p) < 8 and not p.endswith(".pt")),
        os.path.exists("tree"),
    )
    print(open("a2.txt").read(), open("d2.txt").read(), sorted(os.listdir("tree2/sub")))
    try:
        os.remove("e.txt")
    except FileNotFoundError as error:
        print(type(error).__name__)
    try:
        open("e.txt")
    except FileNotFoundError as error:
        print(error.filename)


class Cached(Dataset):
    """Every sample is kept in a file of its own when it is first read."""

    def __init__(self, folder):
        self.folder = folder
        os.makedirs(folder)

    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        path = f"{self.folder}/{i}.npy"
        if not os.path.exists(path):
            np.save(path, x[i].numpy())
        return torch.from_numpy(np.load(path)), y[i]


@scene
def cache_filled_by_reading():
    for workers in (0, 1):
        fit(DataLoader(Cached(f"cache-{workers}"), 6, shuffle=True, num_workers=workers))
        print(sorted(os.listdir(f"cache-{workers}")))


@scene
def temporary():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "t.txt")
        open(path, "w").write("short-lived")
        print(open(path).read(), os.listdir(folder))
    print(os.path.exists(path))
    with tempfile.NamedTemporaryFile("w+", suffix=".txt") as f:
        f.write("named")
        f.flush()
        print(open(f.name).read())
    with tempfile.TemporaryFile() as f:
        f.write(b"nameless")
        f.seek(0)
        print(f.read())


@scene
def checkpoints():
    """Save the best, keep the last two, load and go on: what every long training does."""
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    best, kept = float("inf"), []
    os.makedirs("checkpoints")
    for epoch in range(4):
        total = 0.0
        for xb, yb in DataLoader(TensorDataset(x, y), 8, shuffle=True):
            loss = torch.nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        name = f"checkpoints/epoch-{epoch}.pt"
        torch.save({"epoch": epoch, "model": model.state_dict(), "opt": opt.state_dict(), "loss": total}, name + ".tmp")
        os.rename(name + ".tmp", name)
        kept.append(name)
        if len(kept) > 2:
            os.remove(kept.pop(0))
        if total < best:
            best = total
            torch.save(model.state_dict(), "checkpoints/best.pt")
        print(f"epoch {epoch} total {total:.9g}", sorted(os.listdir("checkpoints")))
    state = torch.load("checkpoints/epoch-3.pt", weights_only=False)
    fresh = mlp()
    fresh.load_state_dict(torch.load("checkpoints/best.pt"))
    print(state["epoch"], f"{state['loss']:.9g}")
    fit(DataLoader(TensorDataset(x, y), 8), fresh)
    torch.save(model, "whole.pt")
    print(type(torch.load("whole.pt", weights_only=False)).__name__)


@scene
def formats():
    xb, yb = next(iter(DataLoader(TensorDataset(x, y), 8)))
    out = mlp()(xb)
    np.save("out.npy", out.detach().numpy())
    np.savez("two.npz", x=xb.numpy(), y=yb.numpy())
    np.savetxt("out.csv", out.detach().numpy(), delimiter=",", fmt="%.7g")
    with open("rows.csv", "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["index", "class"])
        for i, label in enumerate(yb):
            writer.writerow([i, int(label)])
    with open("m.json", "w") as f:
        json.dump({"loss": out.mean().item(), "classes": yb.tolist()}, f)
    with open("p.pkl", "wb") as f:
        pickle.dump({"mean": xb.mean().item()}, f)
    with zipfile.ZipFile("z.zip", "w") as z:
        z.writestr("inside.txt", "zipped")
    db = sqlite3.connect(":memory:")
    print(db.execute("select 1 + 1").fetchone()[0], np.load("out.npy").shape, sorted(np.load("two.npz").files))
    print(open("rows.csv").read().split(), sorted(json.load(open("m.json"))), zipfile.ZipFile("z.zip").namelist())
    mapped = np.memmap("map.dat", dtype="float32", mode="w+", shape=(8, 6))
    mapped[:] = xb.numpy()
    mapped.flush()
    print(np.memmap("map.dat", dtype="float32", mode="r", shape=(8, 6)).sum().round(3))
    np.load("out.npy", mmap_mode="r")
    torch.save(out, pathlib.Path("by-path.pt"))
    with open("by-file.pt", "wb") as f:
        torch.save({"n": 1, "out": out.detach()}, f)
    with open("by-file.pt", "rb") as f:
        print(torch.load(f)["out"].shape)


@scene
def handles_kept_open():
    log = open("run.log", "w", buffering=1)
    model = mlp()
    for i, (xb, _) in enumerate(DataLoader(TensorDataset(x, y), 8)):
        log.write(f"{i} {model(xb).mean().item():.6f}\n")
    print(sum(1 for _ in open("run.log")), log.closed)
    log.close()
    fd = os.open("fd.txt", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"low level\n")
    os.close(fd)
    print(open("fd.txt").read().strip(), os.stat("fd.txt").st_size, os.access("fd.txt", os.R_OK))
    os.symlink("fd.txt", "link.txt")
    print(open("link.txt").read().strip(), os.path.islink("link.txt"), os.readlink("link.txt"))
    pathlib.Path("fd.txt").write_text(pathlib.Path("fd.txt").read_text() + "more\n")
    os.truncate("run.log", 4)
    os.utime("run.log", (1, 1))
    os.chmod("run.log", 0o600)
    print(os.path.getsize("run.log"), int(os.path.getmtime("run.log")), oct(os.stat("run.log").st_mode & 0o777))


play()
