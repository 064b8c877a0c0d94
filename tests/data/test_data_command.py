"""`oars data`: help with examples, one line for what the user can put right, nothing heavy imported for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packing import data
from running import environment, oars


@pytest.mark.parametrize("verb", ["pack", "check", "show", "stats", "export", "make"])
def test_every_verb_has_help_with_an_example(verb):
    assert f"  oars data {verb} " in data(verb, "--help").stdout
    assert f"    {verb} " in data("--help").stdout


@pytest.mark.parametrize(("args", "says"), [
    ([], "the following arguments are required: VERB; see oars data --help"),
    (["pack", "a"], "the following arguments are required: OUT; see oars data pack --help"),
    (["pack", "nosuch", "out"], "no such file or folder: nosuch"),
    (["pack", "a", "b", "--workers", "0"], "argument --workers: 0 is no number of workers: 1 or more; see oars data "
     "pack --help"),
    (["check", "nosuch"], "nosuch holds no packed images: there is no manifest.json in it; make one with `oars data "
     "pack`"),
    (["show", "nosuch"], "nosuch: No such file or directory"),
    (["make", "faces", "x"], "argument KIND: invalid choice: 'faces' (choose from "),
    (["make", "digits", "x", "--damage", "all"], "--damage is for imagenet-like; digits has none"),
])
def test_bad_input_is_one_line_and_exit_code_2(args, says, tmp_path):
    done = oars(tmp_path, "data", *args)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"oars: {says}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_imports_nothing_heavy():
    script = ("import sys; from oars.data.command import parser; parser();"
              "print({'numpy', 'torch', 'PIL', 'rich', 'h5py'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
