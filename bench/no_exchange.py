"""The limit of strong scaling on a machine: N trainings at once that never talk, each on 1/N of the batch.

    python bench/no_exchange.py -n 4 --net cnn --batch 256

Prints one line of JSON: the step time of the slowest, for which the others would have to wait.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-n", type=int, default=2, help="processes")
parser.add_argument("--batch", type=int, default=64, help="divided by the processes")
args, others = parser.parse_known_args()

train = [sys.executable, str(Path(__file__).parent / "train.py"), "--batch", str(args.batch // args.n), *others]
running = [subprocess.Popen(train, stdout=subprocess.PIPE, text=True) for _ in range(args.n)]
steps = [json.loads(process.communicate()[0])["step"] for process in running]
print(json.dumps({"step": max(steps)}))
