"""``oars data`` as the tests type it."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from running import oars


def data(*args: object, code: int = 0) -> subprocess.CompletedProcess:
    """``oars data`` with these arguments, which ends with this exit code and without a traceback."""
    done = oars(Path.cwd(), "data", *args, code=code)
    assert "Traceback" not in done.stderr
    return done


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, with its SHA-256."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*")) if p.is_file()}
