"""The clock of these scripts: ``tick()`` at the beginning of each step; after the last one, the script ends.

The script's first argument is the number of steps. The clock is read by ``time.clock_gettime``, which ranks do not
agree about: ``time.perf_counter`` is a message in a run on ranks. Each rank keeps its own marks, and what is shown are
the first rank's.
"""

import json
import sys
import time

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
_marks = []


def tick():
    """A step begins."""
    _marks.append(time.clock_gettime(time.CLOCK_MONOTONIC))
    if len(_marks) > STEPS:
        print(json.dumps({"marks": _marks}), flush=True)
        sys.exit()
