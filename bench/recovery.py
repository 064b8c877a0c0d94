"""Kills a rank in the middle of training, ours and torchrun elastic's, and takes the time to the next completed step.

    python bench/recovery.py                 # 20 kills on either side, then what being ready costs
    python bench/recovery.py --quick         # a smoke run: 3 kills, the small nets
    python bench/recovery.py --only kill --json raw.json

Ours is `oars run -n 3 bench/train.py`, a plain script. Theirs is bench/train_elastic.py, the same training written by
hand for torchrun, with a checkpoint every 20 steps. The sides take turns; a pair of runs loses the same rank, rank 0 in
its turn, after about the same step. What did not go on as it should is said, and its folder kept.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from table import CORES, HERE, LONG, Report, oars, quartiles, take_turns, work

RANKS, STEPS, EVERY = 3, 80, 20  # EVERY: steps between torchrun's checkpoints
NET = ["--net", "cnn", "--batch", "48"]
LIMIT = 120  # seconds from the start, and again from the kill; a training takes about 10, so what takes longer hangs
# A step left out, done twice or without the dead rank's rows moves the losses of the next five by 0.01 and more, a new
# order of summation by 1e-6. Only later does the training itself blow that up.
SAME, WITHIN = 1e-3, 5
OURS = [*oars(RANKS), *NET, "--warmup", "0", "--steps", str(STEPS)]
THEIRS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
THEIRS += ["--max-restarts", "100", str(HERE / "train_elastic.py"), *NET, "--steps", str(STEPS), "--every", str(EVERY)]
# As shipped, workers that torchrun starts again share one store with the dead, find their addresses there, and cannot
# connect (compare pytorch issue 135712).
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Broken(Exception):
    """A training that did not go on as it should."""


def train(command, folder, look, kill=None, limit=LIMIT, **more):
    """Run a training in ``folder``; with ``kill`` (a rank, a step, a wait) kill that rank in the midst. When that was.

    ``look`` tells how many steps are done, and each rank's pid.
    """
    source = os.pathsep.join(p for p in (str(HERE.parent / "src"), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    killed_at = None
    with open(folder / "out.txt", "w") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        end = time.monotonic() + limit
        try:
            while kill and killed_at is None and process.poll() is None and time.monotonic() < end:
                done, pids = look(folder)
                if done >= kill["step"]:
                    time.sleep(kill["wait"])
                    killed_at = time.time()
                    os.kill(pids[kill["rank"]], signal.SIGKILL)
                    end = time.monotonic() + limit
                time.sleep(0.02)
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Broken(f"not done {limit} s later") from None
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    if code:
        raise Broken(f"exit code {code}")
    if kill and killed_at is None:
        raise Broken("it ended before anybody could be killed")
    return killed_at


def lines(folder, name):
    """The complete lines of a file of our run folder, as far as it is there."""
    text = "".join(path.read_text() for path in folder.glob(f"oars-runs/*/{name}"))
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def look_at_ours(folder):
    """Steps done, and the pid of each rank."""
    pids = {int(path.name[4:]): int(path.read_text()) for path in folder.glob("oars-runs/*/pid-*")}
    return len(lines(folder, "metrics.jsonl")), pids


def ours(folder, kill, truth):
    """One run of ours that loses a rank; ``truth`` is the losses of one that does not."""
    killed_at = train(OURS, folder, look_at_ours, kill)
    steps, events = lines(folder, "metrics.jsonl"), lines(folder, "events.jsonl")
    if [s["step"] for s in steps] != list(range(1, STEPS + 1)):
        raise Broken(f"steps {[s['step'] for s in steps]}")
    lost = [e for e in events if e["event"] == "lost"]
    back = [e for e in events if e["event"] == "recovered"]
    if len(lost) != 1 or lost[0]["ranks"] != [kill["rank"]] or len(back) != 1:
        raise Broken(f"events {lost + back}")
    # Not the next line: a rank may die when its part of a step is done, and that step then ends as if nothing had been.
    after = steps[back[0]["step"] - 1]["time"] - killed_at
    at = lost[0]["step"]
    near = slice(max(0, at - 2), at + WITHIN)  # the step before may have ended without the dead rank
    apart = [abs(step["loss"] - true) for step, true in zip(steps[near], truth[near], strict=True)]
    return {
        "noticed": lost[0]["time"] - killed_at,
        "phase": lost[0]["phase"],
        "next": after,
        "regained": after,
        "lost": sum(not d <= SAME for d in apart) + sum(e["event"] == "passed over" for e in events),
        "apart": max(apart),
        "at": at,
        "step": median_gap([s["time"] for s in steps[: at - 1]]),
    }


def look_at_theirs(folder):
    """Steps done, and the pid of each rank."""
    rows = steps_of_theirs(folder)
    return max((step for _, step, _, _, _ in rows), default=0), {rank: pid for _, _, _, pid, rank in rows}


def steps_of_theirs(folder):
    """What the ranks wrote down: how often started again, step, time, pid, rank."""
    rows = []
    for rank in range(RANKS):
        path = folder / f"steps-{rank}.txt"
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):
                restarts, step, at, pid = line.split()
                rows.append((int(restarts), int(step), float(at), int(pid), rank))
    return rows


def theirs(folder, kill, limit=LIMIT, store=OWN_STORE):
    """One run of theirs that loses a rank."""
    killed_at = train(THEIRS, folder, look_at_theirs, kill, limit, **store)
    rows = steps_of_theirs(folder)
    reached = max(step for restarts, step, _, _, _ in rows if restarts == 0)
    again = [(at, step) for restarts, step, at, _, _ in rows if restarts]
    if not again or max(again)[1] != STEPS:
        raise Broken(f"restarts {max(row[0] for row in rows)}, steps {max(row[1] for row in rows)}")
    return {
        "next": min(again)[0] - killed_at,
        "regained": min(at for at, step in again if step > reached) - killed_at,
        "lost": reached - (min(again)[1] - 1),
        "at": reached + 1,
        "step": median_gap([at for restarts, _, at, _, rank in rows if restarts == 0 and rank == 0]),
    }


def median_gap(times):
    """Between steps: seconds, without the first few."""
    return statistics.median(b - a for a, b in zip(times[3:], times[4:], strict=False))


def kills(repeats, seed):
    """Who dies in which repeat, and when: a rank, after which step, and how long after it is seen to be done."""
    chance = random.Random(seed)
    # 7 is prime to 20, so twenty kills fall on every distance from a checkpoint.
    return [{"rank": i % RANKS, "step": 20 + 7 * i % 40, "wait": chance.uniform(0, 0.1)} for i in range(repeats)]


def attempt(what, base, kill, *args):
    """One measured run, or why it is none; the folder of a broken one is kept."""
    folder = base / f"{what.__name__}-{kill['rank']}-{kill['step']}-{len(list(base.iterdir()))}"
    folder.mkdir()
    try:
        result = {**kill, **what(folder, kill, *args)}
        if result["lost"] and what is ours:
            raise Broken(f"{result['lost']} steps are not as without a death, losses up to {result['apart']} apart")
        shutil.rmtree(folder)
        return result
    except Broken as error:
        return {**kill, "broken": str(error), "folder": str(folder)}


def compare(repeats, seed, raw):
    """Kill on both sides in turn; the number of goals missed."""
    base = Path(tempfile.mkdtemp(prefix="recovery-"))
    calm = base / "calm"
    calm.mkdir()
    train(OURS, calm, look_at_ours)
    truth = [step["loss"] for step in lines(calm, "metrics.jsonl")]
    shutil.rmtree(calm)
    us, them = raw["ours"], raw["theirs"] = [], []
    print(f"{repeats} kills on either side ", end="", file=sys.stderr, flush=True)
    for i, kill in enumerate(kills(repeats, seed)):
        for side in ("ours", "theirs") if i % 2 == 0 else ("theirs", "ours"):
            if side == "ours":
                us.append(attempt(ours, base, kill, truth))
            else:
                them.append(attempt(theirs, base, kill))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    shipped = raw["as shipped"] = [attempt(theirs, base, kill, 30, {}) for kill in kills(min(repeats, 3), seed)]
    for side in ("ours", "theirs", "as shipped"):
        for run in raw[side]:
            if "broken" in run:
                print(f"{side}, rank {run['rank']} killed after step {run['step']}: {run['broken']}: {run['folder']}")
    if not any(base.iterdir()):
        base.rmdir()
    return show(us, them, shipped)


def show(us, them, shipped):
    """Print the table of both sides; the number of goals missed."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.title = f"{CORES} cores, one of {RANKS} ranks killed, medians of {len(us)} interleaved repeats (quarters)"
    for column in ("", "oars run", "torchrun elastic", "goal", ""):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    good = [[run for run in runs if "broken" not in run] for runs in (us, them)]
    missed = 0

    def row(name, tell, goal="", met=None):
        nonlocal missed
        missed += met is False
        said = [tell(runs) if runs else "-" for runs in good]
        table.add_row(name, *said, goal, "" if met is None else "met" if met else "missed")

    def spread(key):
        def tell(runs):
            low, middle, high = quartiles([run[key] for run in runs])
            return f"{middle:.3f} s ({low:.3f} to {high:.3f})"

        return tell

    def of_rank(rank):
        def tell(runs):
            seconds = [run["next"] for run in runs if run["rank"] == rank]
            return f"{statistics.median(seconds):.3f} s" if seconds else "-"

        return tell

    def again(runs):
        return f"{statistics.median(run['lost'] for run in runs):g} ({max(run['lost'] for run in runs)})"

    row("went on", lambda runs: f"{len(runs)} of {len(us)}", "all", len(good[0]) == len(us))
    soon = bool(good[0]) and statistics.median(run["next"] for run in good[0]) < 1
    row("from the kill to the next completed step", spread("next"), "< 1 s", soon)
    for rank in range(RANKS):
        row(f"  rank {rank} killed", of_rank(rank))
    row("  the worst", lambda runs: f"{max(run['next'] for run in runs):.3f} s")
    row("from the kill to a step not done before", spread("regained"))
    row("steps lost, median (worst)", again, "0", len(good[0]) == len(us))  # of ours, whoever lost one is not good
    row("a step before the kill", lambda runs: f"{1000 * statistics.median(run['step'] for run in runs):.4g} ms")
    Console(width=160, highlight=False).print(table)
    if good[0]:
        apart = max(run["apart"] for run in good[0])
        print(f"the {WITHIN} losses after a kill: at most {apart:.1e} from those of a run without one")
    kept = sum("broken" not in run for run in shipped)
    print(f"torchrun as shipped, without {' '.join(OWN_STORE)}=1: went on in {kept} of {len(shipped)}")
    return missed


def ready(report, repeats, quick):
    """Step time on 2 ranks with fault tolerance on, as it always is, against off."""
    for net in ("cnn", "mlp400") if quick else LONG:
        command, threads = [*oars(2), *work(net, LONG)], max(1, CORES // 2)
        sides = [(command, threads), (command, threads, {"OARS_SURVIVE": "0"})]
        report.pair(f"{net}, 2 ranks, ready for a death, against not", sides, repeats, 1.01, take=take_turns)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 kills and two repeats, to see that it works")
    parser.add_argument("--only", choices=("kill", "ready"), help="measure this part alone")
    parser.add_argument("--kills", type=int, help="runs on either side (default 20, quick 3)")
    parser.add_argument("--repeats", type=int, help="pairs of runs for the cost of being ready (default 7, quick 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--json", metavar="FILE", help="keep every single result")
    args = parser.parse_args()

    import torch

    report, raw, missed = Report(), {"cores": CORES, "torch": torch.__version__, "seed": args.seed}, 0
    print(f"{CORES} cores; torch {torch.__version__}")
    if args.only != "ready":
        missed += compare(args.kills or (3 if args.quick else 20), args.seed, raw)
    if args.only != "kill":
        repeats = args.repeats or (2 if args.quick else 7)
        ready(report, repeats, args.quick)
        report.show(repeats)
        raw["ready"], missed = report.raw, missed + report.missed
    if args.json:
        Path(args.json).write_text(json.dumps(raw, indent=1))
    if missed:
        print(f"{missed} goal{'s' * (missed > 1)} missed")


if __name__ == "__main__":
    main()
