"""What one voice's files cost: processes with the file library preloaded beside plain ones, in turns.

    python bench/files.py                      # about six minutes
    python bench/files.py --quick              # one minute, coarser
    python bench/files.py --only opens         # or torch, writes

Four processes take turns: *plain*, *again* (plain too: what it differs by is noise), the *voice* (the library preloaded
as the run's first rank has it) and a *rank* (as every other rank has it, in the same run). Each figure is processor
time, the kernel's included, and a median over the turns; a difference or a ratio is taken within each turn first. Files
are made in the temporary folder (TMPDIR); /dev/shm will not do, for it is the same for all ranks. Where many files have
just been removed, ext4 takes long to make others, by chance for one process and not for another: see what *again* says.

- an `os.open` and `os.close` of a file for reading, by its absolute and by its relative name; goal: at most 5 us more;
- `import torch` in a new process; goal: at most 2 % slower;
- small files written, into a folder that was there before and into one that the run has made; goal: within 1.3 of
  plain.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from oars.adapt.files.library import preload

SOURCE = Path(__file__).resolve().parents[1] / "src"
KINDS = ("plain", "again", "voice", "rank")
WORKER = """
import os, sys, time
from pathlib import Path
from oars.adapt import files
kind, shared = sys.argv[1:]
if kind in ("voice", "rank"):
    files.install(KINDS.index(kind) - 2, kind == "voice", Path(shared))

def opens(name, count):
    for _ in range(int(count)):
        os.close(os.open(name, os.O_RDONLY))

def writes(folder, count):
    os.makedirs(folder, exist_ok=True)
    for i in range(int(count)):
        with open(f"{folder}/{i}.txt", "w") as file:
            file.write("a small file")

def torch():
    import torch

for line in sys.stdin:
    what, *words = line.split()
    began = time.process_time()
    globals()[what](*words)
    print(time.process_time() - began, flush=True)
""".replace("KINDS", repr(KINDS))


class Worker:
    """A process of one kind, which does what it is told and says what processor time it took."""

    def __init__(self, kind, folder):
        before = preload() if kind in ("voice", "rank") else []
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
               "TMPDIR": str(folder / "temporary")}
        self.process = subprocess.Popen([*before, sys.executable, "-c", WORKER, kind, str(folder / "shared")], env=env,
                                        cwd=folder / "work", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("a process has ended; its error is above")
        return float(answer)

    def end(self):
        self.process.communicate()


def turns(folder, count, ask):
    """Seconds of each kind, turn by turn, in an order that rotates. ``ask``: what a kind takes in a turn."""
    took = {kind: [] for kind in KINDS}
    for turn in range(count):
        for i in range(len(KINDS)):
            kind = KINDS[(i + turn) % len(KINDS)]
            took[kind].append(ask(kind, turn))
    return took


def opens(folder, quick):
    each, found = 2000, {}
    (folder / "work" / "data.txt").write_text("something to read")
    workers = {kind: Worker(kind, folder) for kind in KINDS}
    workers["voice"]("writes", "written", 1000)  # so that the others have a ledger to look things up in
    for what, name in (("absolute", folder / "work" / "data.txt"), ("relative", "data.txt")):
        took = turns(folder, 30 if quick else 200, lambda kind, turn, name=name: workers[kind]("opens", name, each))
        found[f"open and close, {what} name"] = {kind: [s / each * 1e6 for s in took[kind]] for kind in KINDS}
    for worker in workers.values():
        worker.end()
    return found


def import_torch(folder, quick):
    def one(kind, turn):
        worker = Worker(kind, folder)
        seconds = worker("torch")
        worker.end()
        return seconds

    turns(folder, 1, one)  # what the page cache has not got yet
    return {"import torch": turns(folder, 3 if quick else 20, one)}


def writes(folder, quick):
    count, found = 2000 if quick else 10_000, {}
    turns_ = 3 if quick else 7
    for turn in range(turns_):
        for kind in KINDS:
            (folder / "work" / f"there-{kind}-{turn}").mkdir()
    workers = {kind: Worker(kind, folder) for kind in KINDS}
    for what, where in (("there", "that was there"), ("new", "of the run's own")):
        def one(kind, turn, what=what):
            return workers[kind]("writes", f"{what}-{kind}-{turn}", count)

        found[f"{count} small files, folder {where}"] = turns(folder, turns_, one)
    for worker in workers.values():
        worker.end()
    return found


def compared(what, took):
    """A row of the table: each kind's median, how it differs from plain, and whether the goal is reached."""
    if what.startswith("open"):
        unit, goal, how = "us", "+5 us", "{:+.2f}"
        beside = {kind: statistics.median(map(float.__sub__, took[kind], took["plain"])) for kind in KINDS}
        reached = max(beside["voice"], beside["rank"]) <= 5
    else:
        unit, goal, how = "s", "1.02" if what == "import torch" else "1.3", "{:.3f}"
        beside = {kind: statistics.median(map(float.__truediv__, took[kind], took["plain"])) for kind in KINDS}
        reached = max(beside["voice"], beside["rank"]) <= float(goal)
    for kind in KINDS:
        median = f"{statistics.median(took[kind]):.3g} {unit}"
        yield median if kind == "plain" else f"{median} ({how.format(beside[kind])})"
    yield f"{goal}: {'reached' if reached else 'missed'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("opens", "torch", "writes"), default=("opens", "torch", "writes"))
    parser.add_argument("--json", help="keep every figure here")
    args = parser.parse_args()
    found = {}
    for name, measure in (("opens", opens), ("torch", import_torch), ("writes", writes)):
        if name in args.only:
            with tempfile.TemporaryDirectory(prefix="bench-files-") as made:
                folder = Path(made)
                for inner in ("work", "shared", "temporary"):
                    (folder / inner).mkdir()
                found |= measure(folder, args.quick)
    table = Table(box=box.SIMPLE, title="processor time, medians of turns; in brackets: beside plain, in the same turn")
    for column in ("", *KINDS, "goal"):
        table.add_column(column, justify="left" if not column else "right")
    for what, took in found.items():
        table.add_row(what, *compared(what, took))
    Console(width=150).print(table)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
