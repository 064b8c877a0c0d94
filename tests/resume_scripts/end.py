"""``at(step)``: the whole run dies at the step that KILL names, once there is a snapshot."""

import glob
import os
import signal
import time


def at(step):
    if os.environ.get("KILL") == str(step):
        while not glob.glob("oars-runs/*/snapshots/*.snap"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
