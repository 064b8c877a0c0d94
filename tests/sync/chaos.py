"""Chaos in the ways of keeping together: trainings on 4 ranks in which some die, drawn by a seed.

    python tests/sync/chaos.py --runs 5                 # of each way; prints "N survived, M not"
    python tests/sync/chaos.py --sync server --seed 17  # that one again

After each run: the training finished with its number of steps, the survivors' weights are equal to the bit, and every
sample was learnt from in every epoch, but for those of which the run said that no batch was left to take them.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training import TRAIN, trained  # noqa: E402

WAYS = {
    "local": ["--sync", "local", "--every", "4"],
    "gossip": ["--sync", "gossip"],
    "server": ["--sync", "server", "--servers", "2"],
    "server, s = 4": ["--sync", "server", "--servers", "2", "--staleness", "4"],
}
POINTS = {"batch": 40, "forward": 40, "backward": 36, "in backward": 200, "in a collective": 30, "end": 1}
SERVING = {"push": 70, "behind push": 70, "turn": 36, "behind turn": 36, "handing over": 3}


def drawn(way, seed):
    """Who dies where: one worker, or two where there are four; of two servers one."""
    draw = random.Random(f"{way} {seed}")
    served = way.startswith("server")
    doomed = draw.sample(range(2), draw.randint(0, 1)) if served else draw.sample(range(4), draw.randint(1, 2))
    servers = draw.sample((2, 3), 1 if not doomed else draw.randint(0, 1)) if served else []
    deaths = []
    for ranks, points in ((doomed, POINTS), (servers, SERVING)):
        for rank in ranks:
            point = draw.choice(list(points))
            deaths.append([rank, point, draw.randint(1, points[point])])
    return deaths


def wrong_with(way, deaths, folder):
    """What was not as it must be, or an empty string."""
    run = trained(Path(folder), "-n", "4", *WAYS[way], TRAIN, "--norm", deaths=tuple(deaths))
    if run.code or [line.split()[2] for line in run.lines] != ["12", "24", "36"]:
        return f"exit code {run.code}: {run.lines} {run.err[-1500:]}"
    if len(set(run.digests().values())) != 1:
        return "the survivors' weights differ"
    lost = {rank for event in run.events("lost") for rank in event["ranks"]}
    if not lost <= {death[0] for death in deaths}:
        return f"ranks {lost} were called lost"
    told = sum(event["samples"] for event in run.events("passed over"))
    learnt = run.learnt()
    missing = 3 * 240 - sum(learnt.values())
    if missing != told or max(learnt.values()) > 3:
        return f"{missing} samples are missing, {told} were told; at most {max(learnt.values())} times"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", choices=WAYS, help="only this way")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    args = parser.parse_args()
    survived = failed = 0
    for way in [args.sync] if args.sync else WAYS:
        for seed in [args.seed] if args.seed is not None else range(args.first, args.first + args.runs):
            deaths, began = drawn(way, seed), time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                wrong = wrong_with(way, deaths, folder)
            survived, failed = survived + (not wrong), failed + bool(wrong)
            print(f"{way}, seed {seed}: {deaths}, {time.monotonic() - began:.0f} s {wrong}", flush=True)
    print(f"{survived} survived, {failed} not")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
