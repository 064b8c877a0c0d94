"""``oars board``: TensorBoard on runs, kept up to date while they go on.

TensorBoard looks at a folder of links, one to each run's ``tb``, so that runs have their own names and nothing of the
run folders has to move.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oars import runfolder
from oars.watch.runs import Run, WatchError, all_runs
from oars.watch.tb import update_quietly

EVERY = 2.0  # seconds


def board(runs: list[Run], top: Path, port: int | None) -> int:
    """Serve until Ctrl-C. ``runs`` is empty for all of ``top``, those still to come included."""
    if importlib.util.find_spec("tensorboard") is None:
        raise WatchError("oars board needs TensorBoard: pip install 'manyoars[watch]'")
    if not runs:
        all_runs(top)  # complains if there is no such folder
    port = _free(port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that TensorBoard ends with us then too
    with tempfile.TemporaryDirectory(prefix="oars-board-") as links:
        _link(runs or all_runs(top), Path(links))
        process = subprocess.Popen([sys.executable, "-m", "tensorboard.main", "--logdir", links, "--host", "localhost",
                                    "--port", str(port), "--reload_interval", "5"], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        try:
            print(f"TensorBoard at http://localhost:{port}/ (Ctrl-C ends it)\n"
                  f"from elsewhere: ssh -L {port}:localhost:{port} {socket.gethostname()}, then the same address\n"
                  "It answers to this machine only; to all: tensorboard --bind_all --logdir " + str(top), flush=True)
            while process.poll() is None:
                time.sleep(EVERY)
                _link(runs or all_runs(top), Path(links))
            raise WatchError(f"TensorBoard ended with exit code {process.returncode}: try {sys.executable} -m "
                             f"tensorboard.main --logdir {top}")
        except KeyboardInterrupt:
            return 0
        finally:
            process.terminate()
            process.wait()


def _link(runs: list[Run], links: Path) -> None:
    """Bring the runs' events up to date, and show runs that are new."""
    for run in runs:
        metrics, events = run.folder / runfolder.METRICS, run.folder / runfolder.TENSORBOARD
        try:
            if not events.exists() or metrics.stat().st_mtime > (events / ".upto.json").stat().st_mtime:
                update_quietly(run.folder)
        except OSError:
            continue  # no steps yet, or removed
        link = links / run.name
        if events.exists() and not link.is_symlink():
            os.symlink(events.resolve(), link)


def _free(port: int | None) -> int:
    """The port that was asked for, else the first free one from TensorBoard's own on."""
    for number in [port] if port is not None else range(6006, 6106):
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("localhost", number))
                return number
            except OSError:
                continue
    raise WatchError(f"port {port} is taken: choose another --port" if port else "no free port from 6006 to 6105")
