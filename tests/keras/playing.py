"""The scenes of ``scripts/`` on a backend, on one process and on ranks: what is to be the same, and is it?"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from compare import files_differ, lines_differ
from running import Run

HERE = Path(__file__).parent
BACKENDS = {"tensorflow": "loops_tensorflow", "jax": "loops_jax", "torch": "loops_torch"}  # their scenes
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OARS_DIGEST": "1"}
# Their bytes hold the last digits of every weight; the scripts load them and tell.
LOADED = {".h5", ".keras", ".pb", ".data-00000-of-00001", ".index"}


def _lines(run: Run) -> list[str]:
    return [re.sub(r" - \d+[mu]?s - \d+[mu]?s/step", "", line) for line in run.lines]


def played(backend: str, n: int, scenes: list[str], folder: Path, limit: float = 480) -> Run:
    """These scenes (none: all) on n ranks; 0 is plain python. It has begun."""
    words = [HERE / "scripts" / f"{BACKENDS[backend]}.py", *scenes]
    env = {"KERAS_BACKEND": backend, "XLA_FLAGS": "--xla_backend_optimization_level=0", **QUIET}
    if n == 0:
        return Run(folder, *words, command=[sys.executable], limit=limit, **env)
    return Run(folder, "--quiet", "-n", n, *words, limit=limit, **env)


def unlike(one: Run, many: Run) -> str:
    """What is not the same, or an empty string."""
    if many.code:
        return str(many)
    for file in [p for run in (one, many) for p in run.cwd.rglob("*") if p.suffix in LOADED]:
        file.write_text("")
    told = lines_differ(_lines(one), _lines(many)) + files_differ(one.cwd, many.cwd)
    alike = len(set(many.digests().values())) == 1
    return told or ("" if alike else "weights are not equal, to the bit, on all ranks")
