"""The layers around every replaced function, in every mode, are those of the kept texts (``chains/``).

A wrong order of layers shows in some modes only, and late. If you change a table on purpose, write the text anew with
the command that the failure shows, and read the difference.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest
from chains import TABLES

HERE = Path(__file__).resolve().parent
PROGRAM = [sys.executable, str(HERE / "chains.py")]


@pytest.mark.parametrize("table", [pytest.param(table, marks=[] if table in ("torch", "jax") else [pytest.mark.more])
                                   for table in TABLES])  # TensorFlow and Keras take long to import
def test_the_layers_of_every_function_are_those_of_the_kept_text(table):
    done = subprocess.run([*PROGRAM, table], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kept = HERE / "chains" / f"{table}.txt"
    changed = list(difflib.unified_diff(kept.read_text().splitlines(), done.stdout.splitlines(), "kept", "now",
                                        lineterm="", n=1))
    if changed:
        pytest.fail("\n".join([f"other layers than in {kept.name}; if that is meant: python tests/house/chains.py "
                               f"{table} > tests/house/chains/{kept.name}", *changed]), pytrace=False)
