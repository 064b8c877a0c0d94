"""The examples train the same with `python` and with `oars run -n 2`, and know nothing of oars."""

from __future__ import annotations

import gzip
import json
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from running import EXAMPLES, finished

# Fewer steps than by default, where that saves time; the demo covers digits_cnn in full.
SHORT = {
    "linear_fit": ["--epochs", "2"],
    "digits_softmax": ["--epochs", "1", "--images", "6000"],
    "digits_cnn": ["--images", "1000", "--batch-size", "50"],
    "gan": ["--epochs", "1"],
    "char_lm": ["--epochs", "1", "--steps", "21"],
}
# Examples that make their data on the spot. All of their steps are split.
MAKING = {
    "resnet_folders": ["--images", "160", "--epochs", "1", "--batch-size", "16"],
    "ppo": ["--rounds", "2", "--carts", "8", "--steps", "16", "--epochs", "2", "--batch-size", "64"],
    "bert_csv": ["--rows", "160", "--pretrain", "1", "--epochs", "1"],
    "unet_hdf5": ["--images", "40", "--epochs", "1", "--side", "32", "--batch-size", "8"],
    "series_netcdf": ["--days", "300", "--epochs", "1"],
}
QUICK = ("resnet_folders", "ppo")  # the others: make test-all


def run(command, folder):
    done = finished(folder, *command, code=0, timeout=300)
    return [line for line in done.stdout.splitlines() if not line.startswith(("time per step", "oars"))]


@pytest.mark.parametrize("name", SHORT)
def test_an_example_prints_the_same_on_two_ranks(name, tmp_path):
    words = [str(EXAMPLES / f"{name}.py"), *SHORT[name]]
    _same(words, tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.more)
                                  for name in MAKING])
def test_an_example_that_makes_its_data_is_split_in_every_step(name, tmp_path):
    _same([str(EXAMPLES / f"{name}.py"), *MAKING[name]], tmp_path / "one", tmp_path / "two")
    summary = json.loads((tmp_path / "two/oars-runs/it/summary.json").read_text())
    assert summary["split_steps"] == summary["steps"] > 3


def _same(words, *folders):
    commands = [sys.executable, *words], [sys.executable, *"-m oars run --quiet --name it -n 2".split(), *words]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as pool:
        one, two = pool.map(run, commands, folders)
    assert len(one) == len(two) and any("loss" in line or "critic" in line for line in one)
    number = re.compile(r"-?\d+(?:\.\d+)?")
    for a, b in zip(one, two, strict=True):
        assert number.sub("#", a) == number.sub("#", b)
        # Losses are compared as after a handful of steps: rounding grows as training goes on.
        assert [float(v) for v in number.findall(a)] == pytest.approx([float(v) for v in number.findall(b)], rel=1e-3)


def test_examples_that_make_their_data_are_short():
    for name in MAKING:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 120, name


def test_no_example_imports_oars():
    for script in EXAMPLES.glob("*.py"):
        assert not re.search(r"^\s*(import|from) oars", script.read_text(), re.M), script.name


def test_digits_are_the_same_for_the_same_seed_and_legible():
    sys.path.insert(0, str(EXAMPLES))
    import digits

    x, y = digits.draw(600, seed=4)
    again, labels = digits.draw(600, seed=4)
    assert x.shape == (600, 28, 28) and x.dtype == np.float32 and 0 <= x.min() and x.max() <= 1
    assert np.array_equal(x, again) and np.array_equal(y, labels) and set(y) == set(range(10))
    assert not np.array_equal(x, digits.draw(600, seed=5)[0])
    # Each image lies nearer to the mean of its own class than to most others.
    means = np.stack([x[y == k].mean(0) for k in range(10)])
    distance = ((x[:, None] - means[None]) ** 2).sum((2, 3))
    assert (distance.argmin(1) == y).mean() > 0.6


@pytest.mark.parametrize("packed", [False, True])
def test_real_mnist_files_are_read_when_given(packed, tmp_path):
    sys.path.insert(0, str(EXAMPLES))
    import digits

    rng = np.random.default_rng(0)
    for part, n in (("train", 7), ("t10k", 3)):
        images, labels = rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n, np.uint8)
        for name, a in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            data = struct.pack(">BBBB", 0, 0, 8, a.ndim) + struct.pack(f">{a.ndim}I", *a.shape) + a.tobytes()
            path = tmp_path / (name + ".gz" * packed)
            path.write_bytes(gzip.compress(data) if packed else data)
    x, y, test_x, test_y = digits.load(tmp_path, train=5, test=3)
    assert x.shape == (5, 28, 28) and test_x.shape == (3, 28, 28) and x.max() <= 1 and y.dtype == np.int64
    with pytest.raises(SystemExit, match="holds neither"):
        digits.load(tmp_path / "nowhere")
