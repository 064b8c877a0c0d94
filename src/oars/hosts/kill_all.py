"""No process of a run is left behind: whatever was started for it is found by its environment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def kill_all(folder: Path, spare: str = "") -> None:
    """Kill every process on this host that was started for this run: workers and other children too.

    ``folder`` is as ranks were given it; it is not looked at, for it may have gone with the network.
    """
    mark = f"OARS_RUN_FOLDER={folder}".encode()
    for _ in range(50):
        found = [pid for pid in _processes() if mark in _environment(pid) and not (spare and _name(pid) == spare)]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.02)


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""
