"""From generated data to the picture: the network of ``higgs.py`` as it is, and cut to a third while it trains.

    make higgs                              # about five minutes on two cores
    make higgs ARGS="-n 4 --epochs 10"
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("-n", type=int, default=2, metavar="RANKS")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--data", default="higgs/HIGGS.csv.gz", help="the real HIGGS.csv.gz, if you have it")
args = parser.parse_args()


def oars(*words):
    """A command of ours, which has to end well."""
    subprocess.run([sys.executable, "-m", "oars", *map(str, words)], check=True)


if not Path(args.data).exists():
    oars("data", "make", "higgs-like", Path(args.data).parent, "--size", 200_000)
for name, options in (("higgs-whole", ()), ("higgs-cut", ("--prune", "1/3"))):
    folder = Path("oars-runs") / name
    if not folder.exists():
        oars("run", "-n", args.n, "--name", name, *options, HERE / "higgs.py", "--data", args.data, "--epochs",
             args.epochs)
oars("compare", "higgs-whole", "higgs-cut", "-o", "higgs.svg")
oars("report", "higgs-cut")
