"""Keras and TensorFlow scripts do on 2 and 3 ranks what they do on one process: lines, files, weights.

A backend takes seconds to import, so each script plays all its scenes in one process. To look at one scene alone:
``KERAS_BACKEND=jax oars run -n 2 tests/keras/scripts/fits.py dropout``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "contract"), str(HERE)]

from chaos_keras import wrong_with  # noqa: E402
from compare import files_differ, lines_differ  # noqa: E402
from test_contract import Run, oars  # noqa: E402

TF1 = HERE.parent.parent / "examples" / "tf1"
CASES = [("tensorflow", "fits", 3), ("tensorflow", "loops_tensorflow", 2), ("jax", "fits", 2), ("jax", "loops_jax", 3),
         ("torch", "fits", 2)]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OARS_DIGEST": "1"}
LOADED = {".h5", ".keras"}  # their bytes hold the last digits of every weight; the scripts load them and tell


def _lines(run: Run) -> list[str]:
    return [re.sub(r" - \d+[mu]?s - \d+[mu]?s/step", "", line) for line in run.out]


@pytest.mark.parametrize(("backend", "script", "n"), CASES)
def test_ranks_do_what_one_process_does(backend, script, n, tmp_path):
    path = str(HERE / "scripts" / f"{script}.py")
    one = Run([sys.executable, path], tmp_path / "one", KERAS_BACKEND=backend, **QUIET)
    assert one.code == 0, f"the script itself fails:\n{one}"
    many = Run([*oars(n), path], tmp_path / "ranks", KERAS_BACKEND=backend, **QUIET)
    assert many.code == 0, str(many)
    assert lines_differ(_lines(one), _lines(many)) == ""
    for folder in (one.folder, many.folder):
        for file in [p for p in folder.iterdir() if p.suffix in LOADED]:
            file.write_text("")
    assert files_differ(one.folder, many.folder) == ""
    digests = {p.read_text() for p in many.folder.glob("oars-runs/*/weights-digest-*.txt")}
    assert len(digests) == 1, "weights are not equal, to the bit, on all ranks"


DEATHS = {  # 3 ranks, of which two die: in fit, and in the loop behind it
    "tensorflow": [[1, "in a collective", 40], [0, "in a collective", 150]],
    "jax": [[0, "in a collective", 60], [2, "in a collective", 110]],
    "torch": [[2, "in a collective", 50], [1, "in a collective", 250]],
    "tf1": [[0, "in a collective", 9], [1, "in a collective", 70]],
}


@pytest.mark.parametrize("kind", DEATHS)
def test_deaths_do_not_show(kind):
    assert wrong_with(kind, 3, DEATHS[kind]) == ""


SESSIONS = {"linear_fit": (TF1, []), "softmax": (TF1, ["60"]), "cnn": (TF1, ["3"]), "session": (HERE / "scripts", [])}


@pytest.mark.parametrize("name", SESSIONS)
def test_scripts_of_tensorflow_1_run_unchanged(name, tmp_path):
    folder, args = SESSIONS[name]
    text = (folder / f"{name}.py").read_text()
    # Plain TensorFlow has neither the names nor the reader any more: it is given them by two changed lines.
    text = text.replace("import tensorflow as tf\n", "import tensorflow.compat.v1 as tf\n\ntf.disable_v2_behavior()\n")
    text = text.replace("from tensorflow.examples.tutorials.mnist import input_data",
                        "from oars.adapt.tensorflow import mnist as input_data")
    plain = tmp_path / f"{name}.py"
    plain.write_text(text)
    one = Run([sys.executable, str(plain), *args], tmp_path / "one", **QUIET)
    assert one.code == 0, str(one)
    command = oars(3 if name == "session" else 2)
    many = Run([*command[:4], "--tf1", *command[4:], str(folder / f"{name}.py"), *args], tmp_path / "ranks", **QUIET)
    assert many.code == 0, str(many)
    assert lines_differ(one.out, many.out) == ""
    # Of the placeholders of linear_fit nothing is known, so every rank computes all of it; the others are cut.
    told = "".join(path.read_text() for path in many.folder.glob("oars-runs/*/events.jsonl"))
    assert ("not cut" in told) == (name == "linear_fit")


def test_processes_started_by_hand_are_refused_in_one_line(tmp_path):
    script = tmp_path / "old.py"
    script.write_text("import tensorflow as tf\ntf.train.Server(None, job_name='worker', task_index=0)\n")
    command = oars(1)
    run = Run([*command[:4], "--tf1", *command[4:], str(script)], tmp_path / "run", **QUIET)
    assert run.code != 0
    log = next((run.folder / "oars-runs").iterdir()) / "rank-0.err"
    told = [line for line in log.read_text().splitlines() if "ClusterSpec" in line]
    assert len(told) == 1 and "Traceback" not in log.read_text()
