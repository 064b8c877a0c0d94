"""The same rows for PyTorch as tensors, for Keras and for TensorFlow."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from made import csv, images, x_of, y_of
from torch.utils.data import DataLoader, Dataset

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import oars.data  # noqa: E402
from oars.data.transforms import resize  # noqa: E402

ROWS = 23


@pytest.fixture
def data(tmp_path):
    path, options = csv(tmp_path, ROWS)
    return oars.data.open(path, **options)


def test_tensors(data):
    tensors = data.torch()
    assert isinstance(tensors, Dataset) and len(tensors) == ROWS
    x, y = pickle.loads(pickle.dumps(tensors))[5]
    assert isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.tolist() == [5, 1.25, -5] and y.item() == 2
    batches = list(DataLoader(tensors, batch_size=10))
    assert torch.equal(torch.cat([x for x, _ in batches]), torch.tensor(x_of(ROWS)))


def test_keras_learns_from_it(data):
    batches = data.keras(batch_size=10)
    assert isinstance(batches, keras.utils.PyDataset) and len(batches) == 3
    np.testing.assert_array_equal(np.concatenate([batches[at][0] for at in range(3)]), x_of(ROWS))
    shuffled = data.keras(batch_size=10, shuffle=True, seed=1)
    first = np.concatenate([shuffled[at][1] for at in range(3)])
    assert first.tolist() != y_of(ROWS).tolist() and sorted(first) == sorted(y_of(ROWS))
    shuffled.on_epoch_end()
    assert np.concatenate([shuffled[at][1] for at in range(3)]).tolist() != first.tolist()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    told = model.fit(shuffled, epochs=2, verbose=0)
    assert len(told.history["loss"]) == 2
    assert model.predict(data.keras(batch_size=4), verbose=0).shape == (ROWS, 3)
    with pytest.raises(IndexError):
        batches[3]
    with pytest.raises(ValueError, match="batch_size=0"):
        data.keras(batch_size=0)


def test_tensorflow_reads_samples_and_batches(data, tmp_path):
    samples = data.tf()
    assert samples.element_spec == (tf.TensorSpec((3,), tf.float32), tf.TensorSpec((), tf.int64))
    assert len(samples) == ROWS
    found = list(samples.as_numpy_iterator())
    np.testing.assert_array_equal(np.stack([x for x, _ in found]), x_of(ROWS))
    sizes = [len(y) for _, y in data.tf(batch_size=10)]
    assert sizes == [10, 10, 3]
    x, y = next(iter(oars.data.open(images(tmp_path, 5)[0]).transform(resize((4, 4))).tf(batch_size=5)))
    assert x.shape == (5, 4, 4, 3) and y.numpy().tolist() == [0, 0, 1, 1, 2]


def test_texts_reach_tensorflow(tmp_path):
    (tmp_path / "t.csv").write_text("a,t\n1,é\n2,z\n")
    (first, _) = oars.data.open(tmp_path / "t.csv").tf().as_numpy_iterator()
    assert first["t"].decode() == "é" and first["a"] == 1
