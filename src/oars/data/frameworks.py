"""Data for PyTorch as tensors, for Keras and for TensorFlow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from oars.data.errors import DataError
from oars.data.needs import need

if TYPE_CHECKING:
    from oars.data.dataset import Data


def mapped(sample: Any, change: Any) -> Any:
    """A sample with each of its parts changed."""
    if isinstance(sample, tuple):
        return tuple(mapped(part, change) for part in sample)
    if isinstance(sample, dict):
        return {name: mapped(part, change) for name, part in sample.items()}
    return change(sample)


def stacked(samples: list[Any]) -> Any:
    """Samples as one array, or as one for each of their names."""
    if samples and isinstance(samples[0], dict):
        return {name: stacked([sample[name] for sample in samples]) for name in samples[0]}
    if len({np.shape(sample) for sample in samples}) > 1:
        raise DataError(
            f"samples differ in shape ({np.shape(samples[0])}, ...): bring them to one size with transform()"
        )
    return np.stack(samples) if samples else np.empty(0)


def batch(data: Data, rows: Any) -> Any:
    """Some samples as one: arrays with a row for each."""
    samples = data.__getitems__(rows)
    if isinstance(samples[0], tuple):
        return tuple(stacked([sample[at] for sample in samples]) for at in range(2))
    return stacked(samples)


class TorchData:
    """Samples as tensors; texts stay texts."""

    def __init__(self, data: Data) -> None:
        self.dataset = data

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Any) -> list[Any]:
        import torch

        def change(part: Any) -> Any:
            return part if isinstance(part, (str, bytes)) else torch.as_tensor(part)

        return [mapped(sample, change) for sample in self.dataset.__getitems__(indices)]


def torch_data(data: Data) -> Any:
    """A PyTorch data set of tensors."""
    torch = need("torch", "torch()", "torch")
    kind = type("TorchData", (TorchData, torch.utils.data.Dataset), {"__reduce__": lambda self: (torch_data, (data,))})
    return kind(data)


def keras_data(data: Data, batch_size: int, shuffle: bool, seed: int) -> Any:
    """Batches for ``model.fit``, ``evaluate`` and ``predict``."""
    keras = need("keras", "keras()", "keras")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is no number of rows")

    class KerasData(keras.utils.PyDataset):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._epoch = 0
            self._begin()

        def _begin(self) -> None:
            data.set_epoch(self._epoch)
            rows = np.arange(len(data))
            self._order = np.random.default_rng((seed, self._epoch)).permutation(rows) if shuffle else rows

        def __len__(self) -> int:
            return math.ceil(len(data) / batch_size)

        def __getitem__(self, at: int) -> Any:
            if not 0 <= at < len(self):
                raise IndexError(f"batch {at} of {len(self)}")
            return batch(data, self._order[at * batch_size : (at + 1) * batch_size])

        def on_epoch_end(self) -> None:
            self._epoch += 1
            self._begin()

    return KerasData()


def tf_data(data: Data, batch_size: int | None) -> Any:
    """Samples or batches for TensorFlow; rows are read in batches either way."""
    tf = need("tensorflow", "tf()", "tensorflow")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is no number of rows")
    if not len(data):
        raise ValueError("no rows: TensorFlow needs their type and shape")
    like = batch(data, [0])

    def spec(array: Any) -> Any:
        array = np.asarray(array)
        text = array.dtype.kind in "OUS"
        return tf.TensorSpec((None, *array.shape[1:]), tf.string if text else tf.as_dtype(array.dtype))

    specs = mapped(like, spec)
    flat = tf.nest.flatten(specs)

    def read(rows: Any) -> list[Any]:
        found = tf.nest.flatten(batch(data, rows.numpy()))
        return [
            tf.constant([str(v) for v in part]) if want.dtype == tf.string else tf.constant(part)
            for part, want in zip(found, flat, strict=True)
        ]

    def load(rows: Any) -> Any:
        parts = tf.py_function(read, [rows], [want.dtype for want in flat])
        for part, want in zip(parts, flat, strict=True):
            part.set_shape(want.shape)
        return tf.nest.pack_sequence_as(specs, parts)

    batches = tf.data.Dataset.range(len(data)).batch(batch_size or 256).map(load)
    return (
        batches
        if batch_size is not None
        else batches.unbatch().apply(tf.data.experimental.assert_cardinality(len(data)))
    )
