"""Chaos for Keras and TensorFlow: ranks die in ``fit``, in compiled loops and in sessions, and it must not show.

    python tests/keras/chaos_keras.py --runs 40                  # prints "N survived, M not"
    python tests/keras/chaos_keras.py --seed 17                  # that one again
    python tests/keras/chaos_keras.py --runs 15 --kind tf1       # sessions only

After each run: it finished, its printed lines (losses, metrics, predictions, weights) are those of one process, and as
many deaths were noticed as happened.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "chaos"), str(HERE.parent / "contract")]
from chaos import sail_script  # noqa: E402
from compare import lines_differ  # noqa: E402
from running import OARS, finished  # noqa: E402

# what runs: its script, options of oars run, the environment, how many collectives there are at least
KINDS = {
    "tensorflow": ("voyage.py", [], {"KERAS_BACKEND": "tensorflow"}, 150),
    "jax": ("voyage.py", [], {"KERAS_BACKEND": "jax"}, 120),
    "torch": ("voyage.py", [], {"KERAS_BACKEND": "torch"}, 280),
    "tape": ("tape.py", [], {"KERAS_BACKEND": "tensorflow"}, 100),
    "tf1": ("session.py", ["--tf1"], {}, 60),
    "layers": ("layers.py", ["--tf1"], {}, 60),
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}


def lines_of(kind, known={}):  # noqa: B006 (once for each kind is enough)
    """What one process prints."""
    script, options, more, _ = KINDS[kind]
    if kind not in known:
        command = [sys.executable, str(HERE / "scripts" / script)]
        if options:
            command = [*OARS, "run", "--quiet", "-n", "1", *options, command[1]]
        with tempfile.TemporaryDirectory() as folder:
            known[kind] = finished(folder, *command, code=0, timeout=300, **more, **QUIET).stdout.splitlines()
    return known[kind]


def wrong_with(kind, ranks, deaths, timeout=300):
    """Run it with these deaths; what was not as it must be, or an empty string."""
    script, options, more, _ = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        run = sail_script(HERE / "scripts" / script, ranks, deaths, folder, *options, limit=timeout, **more, **QUIET)
        if run.code:
            return f"exit code {run.code}: {run.err[-2000:]}"
        lost = {rank for event in run.events("lost") for rank in event["ranks"]}
    if lost != {death[0] for death in deaths if death[2] > 1}:  # the first collective is the start's: all begin again
        return f"lost were {sorted(lost)}"
    return lines_differ(lines_of(kind), run.lines)


def drawn(seed, kinds):
    """The run of a seed: what, on how many ranks, who dies where."""
    draw = random.Random(seed)
    kind = draw.choice(kinds)
    ranks = draw.randint(2, 3)
    doomed = draw.sample(range(ranks), draw.randint(1, ranks - 1))
    return kind, ranks, [[rank, "in a collective", draw.randint(1, KINDS[kind][3])] for rank in doomed]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--kind", choices=list(KINDS), help="only these")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.runs)
    runs = [(seed, drawn(seed, [args.kind] if args.kind else list(KINDS))) for seed in seeds]
    failed = []
    for seed, run in runs:
        began = time.monotonic()
        wrong = wrong_with(*run)
        print(f"seed {seed}: {run} {time.monotonic() - began:.0f} s {wrong or 'survived'}", flush=True)
        failed += [seed] if wrong else []
    print(f"{len(runs) - len(failed)} survived, {len(failed)} not" + (f": seeds {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
