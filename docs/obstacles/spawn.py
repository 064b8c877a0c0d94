"""Three MPI ranks, two on host a and one on host b; one that a is asked to start on b. See spawn.sh."""

import os
import sys
import threading
import time
from pathlib import Path

from mpi4py import MPI

CHILD = """
from mpi4py import MPI
MPI.Comm.Get_parent().send(socket.gethostname(), 0)
"""
folder, key, value = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
world = MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
world.Barrier()
(folder / f"rank-{world.rank}").touch()
if world.rank:
    time.sleep(60)
    os._exit(0)
while not (folder / "go").exists():
    time.sleep(0.1)
threading.Timer(20, lambda: (print("it hangs", flush=True), os._exit(1))).start()
info = MPI.Info.Create()
info.Set(key, value)
try:
    child = MPI.COMM_SELF.Spawn(sys.executable, ["-c", CHILD], 1, info)
    print("it is on", child.recv(), flush=True)
except MPI.Exception as error:
    print("MPI says:", error, flush=True)
os._exit(0)
