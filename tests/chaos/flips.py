"""Flips: trainings in which one bit changes in the memory of one rank, and what must be true afterwards.

    python tests/chaos/flips.py --runs 200         # prints "N found, M not"
    python tests/chaos/flips.py --seed 17          # that one again, telling what happens in it
    python tests/chaos/flips.py --paced            # with the guard's own pace, in place of --guard-every 1

After each run with three ranks or more: the difference was found in the step in which it arose, the training finished,
and its weights and buffers are, to the bit, those of a run in which nothing was flipped. With two: it was found, and
the run has stopped. Paced: no round of comparisons that began behind the flip has ended without finding it, and the
ranks' weights are the same at the end. A difference may also be gone before it is looked at: an average is rounded.
"""

import argparse
import functools
import json
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from running import Run  # noqa: E402

SCRIPT = HERE / "train.py"
KINDS = [(), ("--accumulate", "3"), ("--penalty", "0.001"), ("--workers", "1"), ("--handmade",)]
POINTS = ["forward", "end of backward", "in backward", "optimizer", "in optimizer", "in exchange", "behind exchange"]


@dataclass
class Flight:
    """One run: how many ranks, which script, what flips where."""

    ranks: int
    kind: tuple
    flip: list  # [rank, point, count, what, seed]

    @classmethod
    def drawn(cls, seed):
        """The flight of a seed."""
        draw = random.Random(seed)
        ranks = draw.randint(2, 5)
        point = draw.choice(POINTS)
        # Behind the first step, as far as the shortest run (8 steps) comes by.
        often = {"in backward": (40, 140), "forward": (12, 30), "end of backward": (5, 24)}
        count = draw.randint(*often.get(point, (2, 8)))
        return cls(ranks, draw.choice(KINDS),
                   [draw.randrange(ranks), point, count, draw.choice(["weights", "momenta", "buffers"]), seed])


def fly(flight, folder, flips, *options, paced=False):
    """The run of a flight."""
    env = {"OARS_TEST_FLIPS": json.dumps(flips)} if flips else {}
    pace = () if paced else ("--guard-every", 1)
    return Run(Path(folder), "--quiet", "-n", flight.ranks, *pace, *options, SCRIPT, *flight.kind, limit=120,
               OARS_DIGEST="1", **env)


@functools.cache
def undisturbed(ranks, kind):
    """The digest of the weights, and the last file, of a run in which nothing is flipped."""
    with tempfile.TemporaryDirectory() as folder:
        run = fly(Flight(ranks, kind, []), folder, [])
        assert run.code == 0 and not run.events("differ"), run
        return run.digests()[0], torch.load(Path(folder, "best.pt"), weights_only=True)


def wrong_with(flight, folder):
    """Run a flight; what was not as it must be, or an empty string."""
    run = fly(flight, folder, [flight.flip])
    code, found = run.code, run.events("differ")
    if not list(run.folder.glob("flipped-*")):
        return f"nothing was flipped\n{run}"
    if len(found) != 1:
        return f"it was found {len(found)} times\n{run}"
    if found[0]["agreed"] < found[0]["step"] - 1:
        return f"it was found late: {found}"
    if flight.ranks == 2 and code == 1:
        return "" if "it is not known which one is right, so the run stops" in run.err else f"{run}"
    if code:
        return f"{run}"
    if flight.ranks > 2 and found[0]["ranks"] not in ([flight.flip[0]], []):
        return f"another rank is said to be alone: {found}"
    digest, saved = undisturbed(flight.ranks, flight.kind)
    if set(run.digests().values()) != {digest}:
        return f"the weights are others: {run.digests()}, not {digest}\n{run}"
    now = torch.load(Path(folder, "best.pt"), weights_only=True)
    return "" if all(torch.equal(a, now["model"][k]) for k, a in saved["model"].items()) else f"saved others\n{run}"


def wrong_when_paced(flight, folder):
    """The same with the guard's own pace. (What is found late has been averaged: the weights are others.)"""
    run = fly(flight, folder, [flight.flip], paced=True)
    code, found = run.code, run.events("differ")
    flipped = [line for path in run.folder.glob("flipped-*") for line in path.read_text().splitlines()]
    if len(flipped) != 1:
        return f"{len(flipped)} bits were flipped\n{run}"
    if len(found) > 1:
        return f"it was found {len(found)} times\n{run}"
    if found and found[0]["agreed"] > int(flipped[0].split()[-1]):
        return f"a round behind the flip has not found it: {found}, {flipped}"
    if flight.ranks == 2 and code == 1 and found:
        return "" if "it is not known which one is right, so the run stops" in run.err else f"{run}"
    digests = run.digests()
    if code or len(digests) != flight.ranks or len(set(digests.values())) != 1:
        return f"{digests}\n{run}"
    return "" if found else GONE


GONE = "gone"  # nobody has seen it, and it is not there any more


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--paced", action="store_true", help="compare as the guard does by default")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.runs)
    failed, gone = [], 0
    for seed in seeds:
        flight, folder = Flight.drawn(seed), tempfile.mkdtemp(prefix="flips-")
        wrong = (wrong_when_paced if args.paced else wrong_with)(flight, folder)
        if wrong == GONE:
            gone += 1
        elif wrong:
            failed.append(seed)
            print(f"seed {seed}: {flight}\n  {wrong}\n  kept in {folder}", flush=True)
            continue
        shutil.rmtree(folder)
        print(f"{flight}: {wrong or 'found'}" if args.seed is not None else ".", end="", flush=True)
    print(f"\n{len(seeds) - len(failed) - gone} found, {len(failed)} not" + (f": seeds {failed}" if failed else "")
          + (f", {gone} gone before a comparison" if args.paced else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
