"""What two of the less obvious parts buy, each with it and without, in turns, and beside it a control.

    oars run -n 1 bench/corners.py    # recorded random streams looked at in memory (adapt/replay/streams.py)
    python bench/corners.py           # PyTorch's compiler imported only where it is used (adapt/torch/lazy_dynamo.py)

The control is one of the two sides against itself: what the machine can resolve. Times are processor time.
"""

import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

TURNS = 40
FIRST_STEP = """
import torch
if {0}:
    from oars.adapt.torch import lazy_dynamo
    lazy_dynamo.put_off()
w = torch.nn.Parameter(torch.zeros(3))
opt = torch.optim.SGD([w], 0.1)
opt.zero_grad()
w.sum().backward()
opt.step()
"""


def steps_of_recorded_runs(streams):
    """Microseconds per step of a small training, with glances at the streams' memory or asking for the streams."""
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    x, y = torch.randn(100, 784), torch.randint(10, (100,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    glances = {name: stream.cells for name, stream in streams.all().items()}
    took = {"in memory": [], "asked for": [], "in memory, again": []}
    for turn in range(TURNS * len(took)):
        which = list(took)[turn % len(took)]
        for name, stream in streams.all().items():
            stream.cells = [stream] if which == "asked for" else glances[name]
        streams.all()
        streams.begin()  # takes a glance of this kind for where the streams stand
        began = time.process_time()
        for _ in range(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        took[which].append((time.process_time() - began) / 50)
    report(took, 1e6, "us a step")


def first_steps():
    """Processor seconds of a process that makes one optimizer step."""
    took = {"put off": [], "imported": [], "put off, again": []}
    for turn in range(7 * len(took)):
        which = list(took)[turn % len(took)]
        program = FIRST_STEP.format(which != "imported")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took[which].append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    report(took, 1, "s a start")


def report(took, unit, what):
    """The median of each side, and its ratio to the first."""
    first = statistics.median(next(iter(took.values())))
    for name, each in took.items():
        middle = statistics.median(each)
        print(f"{name}: {unit * middle:.4g} {what}, {middle / first:.3f} of the first")


torch.set_num_threads(1)
try:
    from oars.adapt.torch.context import ctx
except ImportError:
    raise SystemExit("run this where oars is installed") from None
if ctx.record is None:
    first_steps()
else:
    from oars.adapt.replay.streams import streams

    steps_of_recorded_runs(streams)
