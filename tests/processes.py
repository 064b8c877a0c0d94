"""What runs on this machine for a run."""

from __future__ import annotations

from pathlib import Path


def left_behind(folder: Path) -> list[str]:
    """Processes that were started for a run in this folder (of hosts that are this machine: for all of them)."""
    mark, found = f"OARS_RUN_FOLDER={folder}".encode(), []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            pass
    return found
