"""Measures Keras under `oars run`: on 2 ranks against one process, and against torch.distributed and
jax.distributed by hand.

    python bench/keras_table.py                    # about 10 minutes on 2 cores; --quick for a smoke run
    python bench/keras_table.py --json raw.json

Side by side, as bench/table.py does it: the two sides take turns, and the ratio is the median of pairs.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from table import CORES, HERE, alternate, quartiles  # noqa: E402

SCRIPT = str(HERE / "keras_train.py")
NETS = {"cnn": "CNN", "mlp": "MLP with 200 parameters"}


def side(backend, net, ranks, how=""):
    """A command, its threads, its environment."""
    words = ["--net", net, *(["--by-hand", str(ranks)] if how == "by hand" else ["--loop"] if how == "loop" else [])]
    command = [sys.executable, SCRIPT, *words]
    if ranks > 1 and how != "by hand":
        command = [sys.executable, "-m", "oars", "run", "--quiet", "-n", str(ranks), SCRIPT, *words]
    return command, max(1, CORES // ranks), {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--json", metavar="FILE", help="every single result")
    args = parser.parse_args()
    repeats, raw = 1 if args.quick else args.repeats, {}
    print(f"{'':80} ours      other     ratio (spread)")
    for net, title in NETS.items():
        pairs = [(f"{title}, torch, a loop on 2 ranks against torch.distributed by hand",
                  side("torch", net, 2, "loop"), side("torch", net, 2, "by hand"))]
        pairs += [(f"{title}, {backend}, 2 ranks against {backend}.distributed by hand",
                   side(backend, net, 2), side(backend, net, 2, "by hand")) for backend in ("torch", "jax")]
        pairs += [(f"{title}, {backend}, 2 ranks against one process", side(backend, net, 2), side(backend, net, 1))
                  for backend in ("tensorflow", "jax", "torch")]
        for name, ours, other in pairs:
            results = alternate([ours, other], repeats)
            steps = [[result["step"] for result in results_] for results_ in results]
            low, middle, high = quartiles([a / b for a, b in zip(*steps, strict=True)])
            mine, its = (sorted(s)[len(s) // 2] * 1000 for s in steps)
            print(f"{name:80} {mine:6.1f} ms {its:6.1f} ms {middle:6.3f} ({low:.3f} to {high:.3f})", flush=True)
            raw[name] = results
    if args.json:
        Path(args.json).write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
