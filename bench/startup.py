"""What starting many ranks costs, phase by phase, on this machine: time, memory, files.

    python bench/startup.py                    # 2, 8 and 64 ranks; a minute or two on two cores
    python bench/startup.py --ranks 4 --json raw.json

Each number of ranks is one `oars run` of a small training that notes the time at its first line, behind its imports and
behind its first two steps. While it waits its memory is read from /proc. Files are counted by strace, where it is
installed, in a run of two ranks: what the main thread of a rank opens, and what it looks for and does not find. Last,
what the supervisor looks at all the time is made as large as so many ranks would make it: the run folder and the board.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from oars.engine.board import Board

SOURCE = Path(__file__).resolve().parents[1] / "src"
TRAIN = """
import os, time
times = [time.time()]
import torch
times.append(time.time())
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
for step, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=128)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.time())
print(*times, flush=True)
while not os.path.exists("go"):
    time.sleep(0.2)
"""
PHASES = ("rank start", "World set-up", "to the script", "import torch", "first step", "second step", "leaving")


def environment():
    """One thread a rank, and this source."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(ranks, folder, *before):
    """Start it; it waits for a file "go"."""
    (folder / "train.py").write_text(TRAIN)
    command = [*before, sys.executable, "-m", "oars", "run", "--quiet", "--report-bindings", "--stall", "0", "--name",
               "it", "-n", str(ranks), "train.py"]
    return subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def measure(ranks):
    """Seconds of each phase, and each rank's memory and open files."""
    with tempfile.TemporaryDirectory(prefix="oars-startup-") as name:
        folder = Path(name)
        process = run(ranks, folder)
        run_folder = folder / "oars-runs/it"
        while not (run_folder / "rank-0.log").exists() or not (run_folder / "rank-0.log").read_text().strip():
            if process.poll() is not None:
                sys.exit(process.stderr.read())
            time.sleep(0.05)
        pids = [json.loads((run_folder / f"born-{rank}").read_text())[1] for rank in range(ranks)]
        memory, cpu = [kilobytes(pid) for pid in pids], [cpu_seconds(pid) for pid in pids]
        open_files = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        go = time.time()
        (folder / "go").touch()
        out, err = process.communicate()
        leaving = time.time() - go
        launched = json.loads((run_folder / "run.json").read_text())["launched"]
        there, met = map(float, re.search(r"started in \S+ s: (\S+) s until .*?, (\S+) s until", err).groups())
    begin, torch, first, second, *_ = map(float, out.split())
    times = [there, met, begin - launched - there - met, torch - begin, first - torch, second - first, leaving]
    return {"ranks": ranks, "seconds": dict(zip(PHASES, times, strict=True)), "CPU s": sum(cpu) / ranks,
            "open files": open_files, "own MB": max(own for own, _ in memory) / 1024,
            "share MB": sum(share for _, share in memory) / ranks / 1024}


def cpu_seconds(pid):
    """What a process has used up."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kilobytes(pid):
    """What is a process's own, and its share of what it has in common with others (Pss)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return found["Private_Clean"] + found["Private_Dirty"], found["Pss"]


def files():
    """Of a rank's main thread: files opened and bytes in them, and names that were looked for in vain."""
    if shutil.which("strace") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="oars-startup-") as name:
        folder = Path(name)
        (folder / "go").touch()
        run(2, folder, "strace", "-ff", "-qq", "-e", "trace=%file", "-o", str(folder / "trace")).communicate()
        for trace in folder.glob("trace.*"):
            text = trace.read_text(errors="replace")
            if re.search(r'^execve\("[^"]+", \[.*"oars\.run\.rank"', text, re.M):
                opened = re.findall(r'^openat\([^"]*"([^"]+)", O_RDONLY[^)]*\) = \d', text, re.M)
                real = {path for path in opened if not path.startswith(("/proc", "/sys", "/dev"))}
                size = sum(os.path.getsize(path) for path in real if os.path.isfile(path))
                return {"opened": len(real), "MB": size / 1e6, "in vain": text.count("ENOENT"),
                        "calls": text.count("\n")}
    return None


def looks(ranks, files_each=6):
    """Seconds for one look at the run folder, which comes ten times a second, and at the board, once a second."""
    with tempfile.TemporaryDirectory(prefix="oars-startup-") as name:
        folder = Path(name)
        for number in range(ranks * files_each):
            os.close(os.open(folder / f"rank-{number}.log", os.O_CREAT))
        board = Board.create(folder / "board", ranks, hosts=2)
        found = {"ranks": ranks}
        for what, look in (("folder", lambda: set(os.listdir(folder))), ("board", board.read)):
            began = time.perf_counter()
            look()
            found[what] = time.perf_counter() - began
        board.close()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--far", type=int, nargs="+", default=[64, 1024, 32_000], help="ranks that are not started")
    parser.add_argument("--json", help="keep every figure here")
    args = parser.parse_args()
    found = [measure(ranks) for ranks in args.ranks]
    table = Table(box=box.SIMPLE, title=f"{len(os.sched_getaffinity(0))} cores; seconds, from one phase's end to the "
                  "next's")
    table.add_column("")
    for one in found:
        table.add_column(f"{one['ranks']} ranks", justify="right")
    for phase in PHASES:
        table.add_row(phase, *(f"{one['seconds'][phase]:.2f}" for one in found))
    table.add_row("CPU s a rank", *(f"{one['CPU s']:.2f}" for one in found))
    for name in ("own MB", "share MB", "open files"):
        table.add_row(f"{name} a rank", *(f"{one[name]:.0f}" for one in found))
    Console().print(table)
    counted = files()
    if counted is not None:
        print("a rank opens {opened} files ({MB:.0f} MB in all) and looks for {in vain} that are not there, in "
              "{calls} calls with a file's name".format_map(counted))
    far = [looks(ranks) for ranks in args.far]
    for one in far:
        print(f"{one['ranks']} ranks: a look at the run folder takes {one['folder']:.4f} s, at the board "
              f"{one['board']:.4f} s")
    if args.json:
        Path(args.json).write_text(json.dumps({"starts": found, "files": counted, "looks": far}, indent=1) + "\n")


if __name__ == "__main__":
    main()
