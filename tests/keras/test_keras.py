"""Keras and TensorFlow scripts do on 2 and 3 ranks what they do on one process: lines, files, weights.

A backend takes seconds to import, so each script plays all its scenes in one process. To look at one scene alone:
``KERAS_BACKEND=jax oars run -n 2 tests/keras/scripts/fits.py dropout``.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "contract"), str(HERE)]

from chaos_keras import wrong_with  # noqa: E402
from compare import files_differ, lines_differ  # noqa: E402
from test_contract import Run, oars  # noqa: E402

TF1 = HERE.parent.parent / "examples" / "tf1"
BACKENDS = {"tensorflow": "loops_tensorflow", "jax": "loops_jax", "torch": "loops_torch"}  # their scenes
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
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OARS_DIGEST": "1"}
# Their bytes hold the last digits of every weight; the scripts load them and tell.
LOADED = {".h5", ".keras", ".pb", ".data-00000-of-00001", ".index"}


def _lines(run: Run) -> list[str]:
    return [re.sub(r" - \d+[mu]?s - \d+[mu]?s/step", "", line) for line in run.out]


def played(backend: str, n: int, scenes: list[str], folder: Path) -> Run:
    """Play these scenes (none: all) on n ranks; 0 is plain python."""
    command = [*(oars(n) if n else [sys.executable]), str(HERE / "scripts" / f"{BACKENDS[backend]}.py"), *scenes]
    return Run(command, folder, KERAS_BACKEND=backend, XLA_FLAGS="--xla_backend_optimization_level=0", **QUIET)


def unlike(one: Run, many: Run) -> str:
    """What is not the same, or an empty string."""
    if many.code:
        return str(many)
    for file in [p for run in (one, many) for p in run.folder.rglob("*") if p.suffix in LOADED]:
        file.write_text("")
    told = lines_differ(_lines(one), _lines(many)) + files_differ(one.folder, many.folder)
    digests = {p.read_text() for p in many.folder.glob("oars-runs/*/weights-digest-*.txt")}
    return told or ("" if len(digests) == 1 else "weights are not equal, to the bit, on all ranks")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A backend's scenes by plain ``python``, once for all numbers of ranks; they begin beside the first of these."""
    runs: dict[str, Future[Run]] = {}
    with ThreadPoolExecutor() as pool:
        def begin(backend: str) -> Future[Run]:
            if backend not in runs:
                runs[backend] = pool.submit(played, backend, 0, SCENES[backend].split(),
                                            tmp_path_factory.mktemp(backend) / "one")
            return runs[backend]

        yield begin


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_do_what_one_process_does(backend, n, one_process, tmp_path):
    begun = one_process(backend)
    run, one = played(backend, n, SCENES[backend].split(), tmp_path / "ranks"), begun.result()
    assert one.code == 0, f"the script itself fails:\n{one}"
    assert unlike(one, run) == ""
    if backend == "tensorflow":  # what reads files did so for own elements only: 3 times, batches of 16, 16, 16 and 3
        logs = run.folder.glob("oars-runs/*/rank-*.err")
        counts = [int(re.findall(r"mapped (\d+) times", log.read_text())[0]) for log in logs]
        assert sorted(counts) == {2: [75, 78], 3: [48, 48, 57]}[n]
        (events,) = run.folder.glob("oars-runs/*/events.jsonl")
        assert re.findall(r"whole on every rank, no faster: ([\w ]+)", events.read_text()) == [
            "its rows depend on each other", "in placed_2", "its result has a EagerTensor of ",
            "a gradient goes through a loop or a branch around it", *["a gradient in it is not linear "] * 2,
            "on the way back its rows depend on each other", "a gradient in it is not linear ",
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
    run = Run([*oars(2), "--local-batchnorm", str(script)], tmp_path / "run", KERAS_BACKEND=backend, **QUIET)
    assert run.code == 0, str(run)
    np.testing.assert_allclose([float(v) for v in run.out[0].split()], [*gamma, *beta, *mean, *variance], 1e-5, 1e-6)


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
                            "from oars.adapt.tensorflow import mnist as input_data")
        text = text.replace("from tensorflow.examples.tutorials.mnist import mnist",
                            "from oars.adapt.tensorflow import mnist_model as mnist")
        plain.append((tmp_path / path.name, args))
        plain[-1][0].write_text(text)
    together = [tmp_path / "one.py", tmp_path / "ranks.py"]
    for file, first, which in zip(together, (LAYERS, ""), (plain, SESSIONS), strict=True):
        file.write_text(TOGETHER.format(first, [(str(path), args) for path, args in which]))
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(Run, [sys.executable, str(together[0])], tmp_path / "one", **QUIET)
        many = Run([*oars(2), "--tf1", str(together[1])], tmp_path / "ranks", **QUIET)
        one = begun.result()
    assert one.code == 0, str(one)
    assert many.code == 0, str(many)
    assert lines_differ(one.out, many.out) == ""
    assert len({log.read_text() for log in many.folder.glob("oars-runs/*/rank-*.log")}) == 1  # nobody has parted
    # Of the placeholders of linear_fit nothing is known, so every rank computes all of it, and so it is with those of a
    # fixed size in feeding.py, the condition in session.py and dynamic_rnn; the others are cut.
    told = "".join(path.read_text() for path in many.folder.glob("oars-runs/*/events.jsonl"))
    assert told.count("not cut") == 3  # (the first two are told in the same words)


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
    command = oars(1)
    run = Run([*command[:4], "--tf1", *command[4:], str(script)], tmp_path / "run", **QUIET)
    assert run.code != 0
    told = (next((run.folder / "oars-runs").iterdir()) / "rank-0.err").read_text()
    lines = [line for line in told.splitlines() if line.startswith("oars: tf.")]
    names = [line.split()[1] for line in lines]
    assert names == ["tf.contrib.tpu", "tf.contrib.crf", "tf.contrib.layers.conv3d", "tf.contrib.rnn.ConvLSTMCell",
                     "tf.estimator.Estimator", "tf.layers.batch_normalization", "tf.train.Server"]
    assert "leave --tf1 out" in told
    assert "Traceback" not in told


def test_what_there_is_of_contrib_is_made_of_layers(tmp_path):
    run = Run([*oars(2), "--tf1", str(HERE / "scripts" / "contrib.py")], tmp_path / "run", **QUIET)
    assert run.code == 0, str(run)
    normal = "BatchNorm/beta BatchNorm/moving_mean BatchNorm/moving_variance"
    assert run.out[1].replace(":0", "") == " ".join(
        ["Conv/weights", *(f"Conv/{name}" for name in normal.split()),
         "up/weights", *(f"up/{name}" for name in normal.split()), "out/weights", "out/biases"])
    assert run.out[2] == "[[1, 2, 3, 0], [4, 5, 6, 4], [7, 1, 8, 2]] 9 [[4, 0, 0, 0]]"
    told = "".join(path.read_text() for path in run.folder.glob("oars-runs/*/events.jsonl"))
    assert "not cut" not in told


def test_other_ways_of_keeping_together_are_refused_in_one_line(tmp_path):
    script = tmp_path / "fit.py"
    script.write_text("import keras\n")
    run = Run([*oars(2), "--sync", "server", str(script)], tmp_path / "run", KERAS_BACKEND="torch", **QUIET)
    told = (next((run.folder / "oars-runs").iterdir()) / "rank-0.err").read_text()
    assert run.code == 2
    assert told == "oars: --sync server is not for Keras on torch: use --sync local, or leave it out\n"
