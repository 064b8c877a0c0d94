"""``tensorflow.examples.tutorials.mnist.input_data``, as scripts of 2017 import it.

Reads MNIST's four files from the folder that the script names. Where they are not, digits are drawn: a small font,
shifted and blurred, the same ones on every call. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import gzip
import os
from collections import namedtuple
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

Datasets = namedtuple("Datasets", ["train", "validation", "test"])
_FONT = ("01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
         "01110 10001 00001 00110 01000 10000 11111", "11110 00001 00001 01110 00001 00001 11110",
         "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
         "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
         "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100")


class DataSet:
    """Images and labels, handed out in shuffled batches, as the tutorial's class does."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels
        self.num_examples, self.epochs_completed, self._at = len(images), 0, 0
        self._order = np.arange(self.num_examples)

    def next_batch(self, batch_size: int, fake_data: bool = False, shuffle: bool = True) -> Any:
        """The next rows; an epoch's last batch is filled up from the next epoch."""
        if self._at == 0 and self.epochs_completed == 0 and shuffle:
            np.random.shuffle(self._order)
        chosen = self._order[self._at : self._at + batch_size]
        self._at += batch_size
        if len(chosen) < batch_size:
            self.epochs_completed += 1
            if shuffle:
                np.random.shuffle(self._order)
            self._at = batch_size - len(chosen)
            chosen = np.concatenate([chosen, self._order[: self._at]])
        return self.images[chosen], self.labels[chosen]


def read_data_sets(train_dir: str, fake_data: bool = False, one_hot: bool = False, dtype: tf.DType | None = None,
                   reshape: bool = True, validation_size: int = 5000, seed: int | None = None, **_: Any) -> Datasets:
    """MNIST from ``train_dir``, or digits that are drawn here."""
    images, labels = _read(train_dir, "train") or _draw(12000, 1)
    test = _read(train_dir, "t10k") or _draw(2000, 2)
    validation_size = min(validation_size, len(images) // 6)

    def made(images: np.ndarray, labels: np.ndarray) -> DataSet:
        shape = (len(images), 784) if reshape else (len(images), 28, 28, 1)
        return DataSet((images / np.float32(255)).reshape(shape).astype(np.float32),
                       np.eye(10)[labels] if one_hot else labels)

    return Datasets(made(images[validation_size:], labels[validation_size:]),
                    made(images[:validation_size], labels[:validation_size]), made(*test))


def _read(folder: str, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    found = []
    for kind, header in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8)):
        for end, opened in (("", open), (".gz", gzip.open)):
            path = os.path.join(folder, f"{name}-{kind}{end}")
            if os.path.exists(path):
                with opened(path, "rb") as file:  # type: ignore[operator]
                    found.append(np.frombuffer(file.read()[header:], np.uint8))
                break
    return (found[0].reshape(-1, 28, 28), found[1]) if len(found) == 2 else None


def _draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    font = np.array([[[int(c) for c in line] for line in digit.split()] for digit in _FONT], np.float32)
    large = font.repeat(3, 1).repeat(3, 2)  # 21 by 15
    images = np.zeros((count, 30, 30), np.float32)
    for image, label, down, right in zip(images, labels, rng.integers(1, 9, count), rng.integers(1, 15, count),
                                         strict=True):
        image[down : down + 21, right : right + 15] = large[label]
    blurred = np.mean([images[:, i : i + 28, j : j + 28] for i in range(3) for j in range(3)], axis=0)
    noisy = blurred * rng.uniform(150, 255, (count, 1, 1)) + rng.normal(0, 20, blurred.shape)
    return noisy.clip(0, 255).astype(np.uint8), labels
