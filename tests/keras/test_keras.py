"""Keras and TensorFlow scripts do on 2 and 3 ranks what they do on one process: lines, files, weights.

A backend takes seconds to import, so each script plays all its scenes in one process. To look at one scene alone:
``KERAS_BACKEND=jax oars run -n 2 tests/keras/scripts/fits.py dropout``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from chaos_keras import wrong_with
from compare import lines_differ
from playing import BACKENDS, QUIET, played, unlike
from running import EXAMPLES, Run

HERE = Path(__file__).parent
TF1 = EXAMPLES / "tf1"
# A backend's scenes share a process: most of the time goes into importing it and compiling. On torch they are cheap:
# all are played. make test-keras plays all scenes on all backends.
SCENES = {
    "tensorflow": "one_row_first tables small_batches losses_of_ones_own dropout batchnorm other_data pipeline "
                  "eager_loop compiled_loop_with_updates_by_hand gan functions_in_functions without_keras "
                  "example_of_a_loop whole_beside_cut restored_before_built files_of_images words_and_places "
                  "loss_of_each_row words_that_are_all_the_same words_for_numbers mirrored "
                  "weights_without_names served far_from_right loops_in_a_graph gradients_of_ones_own "
                  "a_clipping_between_models a_look_at_all_rows a_model_that_counts",
    "jax": "small_batches batchnorm dropout tables callbacks sampler train_step stateless_loop updates_by_hand "
           "gradients_of_ones_own a_clipping_between_models",
    "torch": "",
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A backend's scenes by plain ``python``, once for all numbers of ranks; they begin beside the first of these."""
    runs: dict[str, Run] = {}

    def begin(backend: str) -> Run:
        if backend not in runs:
            runs[backend] = played(backend, 0, SCENES[backend].split(), tmp_path_factory.mktemp(backend) / "one")
        return runs[backend]

    return begin


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.more)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_do_what_one_process_does(backend, n, one_process, tmp_path):
    one, run = one_process(backend), played(backend, n, SCENES[backend].split(), tmp_path / "ranks")
    assert run.code is not None and one.code == 0, f"the script itself fails:\n{one}"
    assert unlike(one, run) == ""
    if backend == "tensorflow":  # what reads files did so for own elements only: 3 times, batches of 16, 16, 16 and 3
        logs = run.folder.glob("rank-*.err")
        counts = [int(re.findall(r"mapped (\d+) times", log.read_text())[0]) for log in logs]
        assert sorted(counts) == {2: [75, 78], 3: [48, 48, 57]}[n]
        told = (run.folder / "events.jsonl").read_text()
        assert re.findall(r"replicated on every rank \(correct, not faster\): ([\w ]+)", told) == [
            "its rows depend on each other", "in placed_2", "its result has a EagerTensor of ",
            "a gradient goes through a loop or a branch around it", *["a gradient in it is not linear "] * 2,
            "in the backward pass its rows depend on each other", "a gradient in it is not linear ",
            "its rows depend on each other"]


NORMALISED = """
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.BatchNormalization(momentum=0.5)])
model.compile(keras.optimizers.SGD(0.1), "mse")
for _ in range(3):
    model.train_on_batch(x, x ** 2)
print(*np.concatenate(model.get_weights()))
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])  # TensorFlow has it from the same lines as JAX
def test_local_batchnorm_takes_each_ranks_own_rows(backend, tmp_path):
    """Against the same by hand: halves normalised apart, their moving averages averaged."""
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    halves = x.reshape(2, 6, 3)
    apart = (halves - halves.mean(1, keepdims=True)) / np.sqrt(halves.var(1, keepdims=True) + 1e-3)
    gamma, beta, mean, variance = np.ones(3), np.zeros(3), np.zeros(3), np.ones(3)
    for _ in range(3):
        slope = 2 * (gamma * apart + beta - halves**2) / x.size
        gamma, beta = gamma - 0.1 * (slope * apart).sum((0, 1)), beta - 0.1 * slope.sum((0, 1))
        mean, variance = (mean + halves.mean((0, 1))) / 2, (variance + halves.var(1).mean(0)) / 2
    script = tmp_path / "normalised.py"
    script.write_text(NORMALISED)
    run = Run(tmp_path / "run", *TWO, "--local-batchnorm", script, KERAS_BACKEND=backend, **QUIET)
    assert run.code == 0, str(run)
    np.testing.assert_allclose([float(v) for v in run.lines[0].split()], [*gamma, *beta, *mean, *variance], 1e-5, 1e-6)


DEATHS = {  # on one rank more than die: in fit, or in the loop behind it
    "tensorflow": [[1, "in a collective", 40], [0, "in a collective", 150]],
    "jax": [[0, "in a collective", 110]],
    "torch": [[1, "in a collective", 23]],  # behind a step, before its metrics
    "tape": [[1, "in a collective", 76]],  # behind an evaluation
    "tf1": [[0, "in a collective", 36]],  # some weights are changed by then
}


@pytest.mark.parametrize("kind", DEATHS)
def test_deaths_do_not_show(kind):
    assert wrong_with(kind, len(DEATHS[kind]) + 1, DEATHS[kind]) == ""


TWO = "--quiet", "-n", 2
SESSIONS = [(TF1 / "linear_fit.py", []), (TF1 / "softmax.py", ["--steps", "50"]), (TF1 / "cnn.py", ["--steps", "3"]),
            (HERE / "scripts" / "session.py", []), (HERE / "scripts" / "layers.py", []),
            (HERE / "scripts" / "feeding.py", [])]
TOGETHER = """
import functools, runpy, sys
import tensorflow as tf
tf.compat.v1.disable_v2_behavior()
{}
for path, args in {}:
    print("==", path.rpartition("/")[2])
    sys.argv = [path, *args]
    with tf.Graph().as_default():
        runpy.run_path(path)
"""
# What plain TensorFlow still has, out of sight, and of what it has not another way.
LAYERS = """
from tensorflow.python.layers import layers
from tensorflow.python.ops import rnn_cell_impl
import tensorflow.compat.v1 as old
nn = old.nn
old.layers, nn.rnn_cell = layers, rnn_cell_impl
nn.dynamic_rnn = functools.partial(nn.dynamic_rnn, parallel_iterations=1)  # else dropout is dealt out as it comes

def batch_normalization(x, training, momentum, name=None):
    tf, images = old, len(x.shape) == 4
    with tf.variable_scope(name, "batch_normalization"):
        gamma, beta, mean, variance = (
            tf.get_variable(name, x.shape[-1:], initializer=initial(), trainable=name in ("gamma", "beta"))
            for name, initial in (("gamma", tf.ones_initializer), ("beta", tf.zeros_initializer),
                                  ("moving_mean", tf.zeros_initializer), ("moving_variance", tf.ones_initializer)))
    whole = x if images else x[:, None, None]
    made, new, spread = tf.nn.fused_batch_norm(whole, gamma, beta, epsilon=1e-3)
    if not images:  # it is told as that of what the batch is a sample of
        spread *= tf.cast(tf.shape(x)[0] - 1, tf.float32) / tf.cast(tf.shape(x)[0], tf.float32)
    kept, _, _ = tf.nn.fused_batch_norm(whole, gamma, beta, mean, variance, epsilon=1e-3, is_training=False)
    for moving, value in ((mean, new), (variance, spread)):
        tf.add_to_collection("update_ops", moving.assign(momentum * moving + (1 - momentum) * value))
    made = tf.cond(training, lambda: made, lambda: kept)
    return made if images else made[:, 0, 0]

layers.batch_normalization = batch_normalization
"""


def test_scripts_of_tensorflow_1_run_unchanged(tmp_path):
    plain = []
    for path, args in SESSIONS:
        # Plain TensorFlow has neither the names nor the reader any more: it is given them by two changed lines.
        text = path.read_text().replace("import tensorflow as tf\n", "import tensorflow.compat.v1 as tf\n")
        text = text.replace("from tensorflow.examples.tutorials.mnist import input_data",
                            "from oars.adapt.tf1 import mnist as input_data")
        text = text.replace("from tensorflow.examples.tutorials.mnist import mnist",
                            "from oars.adapt.tf1 import mnist_model as mnist")
        plain.append((tmp_path / path.name, args))
        plain[-1][0].write_text(text)
    together = [tmp_path / "one.py", tmp_path / "ranks.py"]
    for file, first, which in zip(together, (LAYERS, ""), (plain, SESSIONS), strict=True):
        file.write_text(TOGETHER.format(first, [(str(path), args) for path, args in which]))
    one = Run(tmp_path / "one", together[0], command=[sys.executable], **QUIET)
    many = Run(tmp_path / "ranks", *TWO, "--tf1", together[1], **QUIET)
    assert many.code == 0, str(many)
    assert one.code == 0, str(one)
    assert lines_differ(one.lines, many.lines) == ""
    assert len({log.read_text() for log in many.folder.glob("rank-*.log")}) == 1  # nobody has parted
    # Of the placeholders of linear_fit nothing is known, so every rank computes all of it, and so it is with those of a
    # fixed size in feeding.py, the condition in session.py and dynamic_rnn; the others are cut.
    told = "".join(path.read_text() for path in many.folder.glob("events.jsonl"))
    assert told.count("not split") == 3  # (the first two are told in the same words)


GONE = """
import sys
for line in ("import tensorflow.contrib.tpu", "from tensorflow.contrib import crf", "tf.contrib.layers.conv3d(1)",
             "from tensorflow.contrib.rnn import ConvLSTMCell", "tf.estimator.Estimator(1)",
             "tf.layers.batch_normalization(1, renorm=True)", "tf.keras.Sequential().compile('sgd')"):
    try:
        exec("import tensorflow as tf\\n" + line)
    except SystemExit as end:
        print(end, file=sys.stderr)
tf.train.Server(None, job_name="worker", task_index=0)
"""


def test_what_is_gone_and_processes_started_by_hand_are_refused_in_one_line(tmp_path):
    script = tmp_path / "old.py"
    script.write_text(GONE)
    run = Run(tmp_path / "run", "--tf1", "--quiet", "-n", 1, script, **QUIET)
    assert run.code != 0
    told = (run.folder / "rank-0.err").read_text()
    lines = [line for line in told.splitlines() if line.startswith("oars: tf.")]
    names = [line.split()[1] for line in lines]
    assert names == ["tf.contrib.tpu", "tf.contrib.crf", "tf.contrib.layers.conv3d", "tf.contrib.rnn.ConvLSTMCell",
                     "tf.estimator.Estimator", "tf.layers.batch_normalization", "tf.train.Server"]
    assert "leave out --tf1" in told
    assert "Traceback" not in told


def test_what_there_is_of_contrib_is_made_of_layers(tmp_path):
    run = Run(tmp_path / "run", *TWO, "--tf1", HERE / "scripts/contrib.py", **QUIET)
    assert run.code == 0, str(run)
    normal = "BatchNorm/beta BatchNorm/moving_mean BatchNorm/moving_variance"
    assert run.lines[1].replace(":0", "") == " ".join(
        ["Conv/weights", *(f"Conv/{name}" for name in normal.split()),
         "up/weights", *(f"up/{name}" for name in normal.split()), "out/weights", "out/biases"])
    assert run.lines[2] == "[[1, 2, 3, 0], [4, 5, 6, 4], [7, 1, 8, 2]] 9 [[4, 0, 0, 0]]"
    told = "".join(path.read_text() for path in run.folder.glob("events.jsonl"))
    assert "not cut" not in told


def test_other_ways_of_keeping_together_are_refused_in_one_line(tmp_path):
    script = tmp_path / "fit.py"
    script.write_text("import keras\n")
    run = Run(tmp_path / "run", *TWO, "--sync", "server", script, KERAS_BACKEND="torch", **QUIET)
    assert run.code == 2
    told = (run.folder / "rank-0.err").read_text()
    assert told == "oars: --sync server is not for Keras on torch: use --sync local, or leave it out\n"
