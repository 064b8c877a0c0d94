"""``Data``: rows of a reader as samples. A map-style PyTorch data set that is also a sequence of NumPy rows.

It holds a reader, the numbers of its rows (a range, or an array after a split), and how columns become a sample. All of
it is picklable, nothing is open before a row is read, and a view (a slice, a part) shares the reader.

A sample is what its columns are: one column is its row; several columns of single numbers are one vector; anything else
is a dict by name. With a label it is a pair. ``__getitems__`` reads a batch in one go: PyTorch's loader calls it with a
batch's indices, and under ``oars run`` with those of this rank's rows.
"""

from __future__ import annotations

import copy
import math
import operator
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oars.data import split as split_
from oars.data.bad import Bad, counted
from oars.data.errors import DataError
from oars.data.frameworks import keras_data, stacked, tf_data, torch_data
from oars.data.passes import Epoch
from oars.data.reader import Block, Reader
from oars.data.transforms import decode

if TYPE_CHECKING:
    from torch.utils.data import Dataset as _Dataset
else:
    try:
        from torch.utils.data import Dataset as _Dataset
    except ImportError:  # feeds Keras or tf.data, then
        _Dataset = object

_PIECE = 8 << 20  # bytes read at a time when all rows are wanted


class Columns:
    """Some columns, and what they make of a block of rows."""

    def __init__(self, reader: Reader, names: list[str], dtype: np.dtype | None, classes: Sequence[Any] | None) -> None:
        self.names = names
        self._dtype = dtype
        self._classes = None if classes is None else np.array(classes, object)
        fields = [reader.fields[name] for name in names]
        self.encoded = [f.encoded for f in fields]
        number = [f.dtype.kind in "biuf" and f.shape == () for f in fields]
        self.form = "one" if len(names) == 1 else "vector" if names and all(number) else "dict"
        types = [self._type(f.dtype) for f in fields]
        shapes = [f.shape for f in fields]
        self.dtype: Any = types[0] if self.form == "one" else dict(zip(names, types, strict=True))
        self.shape: Any = shapes[0] if self.form == "one" else dict(zip(names, shapes, strict=True))
        if self.form == "vector":
            self.dtype, self.shape = np.result_type(*types), (len(names),)

    def _type(self, dtype: np.dtype) -> np.dtype:
        if self._classes is not None:
            return np.dtype(np.int64)
        return self._dtype if self._dtype is not None and dtype.kind in "biuf" else dtype

    def of(self, block: Block) -> Any:
        """An array with one entry a row, or a dict of them."""
        if self.form == "vector":
            out = np.empty((len(block[self.names[0]]), len(self.names)), self.dtype)
            for at, name in enumerate(self.names):
                out[:, at] = block[name]
            return out
        if self.form == "one":
            return self._cast(block[self.names[0]])
        return {name: self._cast(block[name]) for name in self.names}

    def _cast(self, values: np.ndarray) -> np.ndarray:
        if self._classes is not None:
            return np.searchsorted(self._classes, values).astype(np.int64)
        if self._dtype is not None:
            values = values.astype(self._type(values.dtype), copy=False)
        return values if values.flags.writeable else values.copy()


class Data(_Dataset):
    """The rows of a file; made by ``oars.data.open``."""

    def __init__(
        self,
        reader: Reader,
        columns: Columns,
        label: Columns | None,
        classes: list[Any] | None,
        rows: range | np.ndarray,
        bad: Sequence[Bad],
    ) -> None:
        self._reader, self._columns, self._label, self._rows = reader, columns, label, rows
        self._steps: tuple[Any, ...] = ()
        self._seed = 0
        self._epoch: Epoch | None = None
        self.classes, self.bad = classes, list(bad)
        self._at_once = _rows_at_once(reader, self.columns)

    # -- what it is ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def columns(self) -> list[str]:
        """The names of the columns, the label's last."""
        return self._columns.names + (self._label.names if self._label else [])

    @property
    def reader(self) -> Reader:
        """The files as rows by number, for what needs more than samples: names of rows, undecoded images."""
        return self._reader

    @property
    def shape(self) -> Any:
        """Rows and the shape of one (None: they differ); a dict where samples are."""
        shape = self._columns.shape
        if isinstance(shape, dict):
            return {name: None if s is None else (len(self), *s) for name, s in shape.items()}
        return None if shape is None or self._steps else (len(self), *shape)

    @property
    def dtype(self) -> Any:
        """The type of a sample's numbers; a dict where samples are."""
        return self._columns.dtype

    def __repr__(self) -> str:
        label = f", label {', '.join(self._label.names)}" if self._label else ""
        many = f" of {len(self.classes)} classes" if self.classes else ""
        return (
            f"<{os.path.basename(self._reader.path)}: {len(self)} rows, {', '.join(self._columns.names)}{label}{many}>"
        )

    def summary(self) -> str:
        """One line: rows, columns, and what was left out."""
        return f"{self!r:.200}"[1:-1] + ("; " + counted(self.bad) if self.bad else "")

    # -- samples ---------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._view(self._rows[key])
        if isinstance(key, (list, np.ndarray)):
            return self._view(np.asarray(self._rows)[self._checked(np.asarray(key))])
        row = operator.index(key)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}: {self._reader.path}")
        return self.__getitems__([row])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples, read together."""
        rows = (
            np.asarray(self._rows, np.int64)[indices]
            if not isinstance(self._rows, range)
            else (self._rows.start + self._rows.step * self._checked(np.asarray(indices, np.int64)))
        )
        return self._samples(self._reader.take(rows, self.columns), rows)

    def __iter__(self) -> Iterator[Any]:
        size = max(1, min(1024, self._at_once))
        for start in range(0, len(self), size):
            yield from self.__getitems__(range(start, min(start + size, len(self))))

    def _checked(self, key: np.ndarray) -> np.ndarray:
        if key.dtype == bool:
            if len(key) != len(self):
                raise IndexError(f"a mask of {len(key)} for {len(self)} rows")
            return np.flatnonzero(key)
        if key.size and not (-len(self) <= key.min() and key.max() < len(self)):
            raise IndexError(
                f"row {key.max() if key.max() >= len(self) else key.min()} of {len(self)}: {self._reader.path}"
            )
        return np.where(key < 0, key + len(self), key).astype(np.int64)

    def _samples(self, block: Block, rows: np.ndarray) -> list[Any]:
        x = self._columns.of(block)
        if isinstance(x, dict):
            xs: list[Any] = [dict(zip(x, values, strict=True)) for values in zip(*x.values(), strict=True)]
        else:
            xs = list(x)
        if any(self._columns.encoded) or self._steps:
            xs = [self._changed(sample, int(row)) for sample, row in zip(xs, rows, strict=True)]
        if self._label is None:
            return xs
        y = self._label.of(block)
        ys = (
            list(y)
            if not isinstance(y, dict)
            else [dict(zip(y, v, strict=True)) for v in zip(*y.values(), strict=True)]
        )
        return list(zip(xs, ys, strict=True))

    def _changed(self, sample: Any, row: int) -> Any:
        """A sample with its images decoded and the transforms done."""
        if isinstance(sample, dict):  # transforms are for the one image of several columns
            encoded = [name for name, is_ in zip(self._columns.names, self._columns.encoded, strict=True) if is_]
            return {**sample, **{name: self._changed(sample[name], row) for name in encoded}}
        file, number = self._reader.place(row)
        what = f"{file}, row {number}" if number >= 0 else file
        rng = np.random.default_rng((self._seed, self._epoch.now, row)) if self._epoch else None
        try:
            if isinstance(sample, (bytes, memoryview)) and not (
                self._steps and getattr(self._steps[0], "takes_encoded", False)
            ):
                sample = decode(sample)
            for step in self._steps:
                ours = type(step).__module__ == decode.__module__ or getattr(step, "random", False)
                sample = step(sample, rng) if ours else step(sample)
        except DataError as error:
            raise DataError(f"{what}: {error}") from None
        return sample

    # -- views -----------------------------------------------------------------------------------------------------

    def _view(self, rows: range | np.ndarray) -> Data:
        view = object.__new__(type(self))  # a batch may be a view: copy.copy takes ten times as long
        view.__dict__.update(self.__dict__, _rows=rows)
        return view

    def transform(self, *steps: Any, seed: int = 0) -> Data:
        """The same rows, each changed by ``steps`` (see ``oars.data.transforms``); replaces earlier transforms.

        A step with an attribute ``random`` that is true is called with a random generator as well, which depends on the
        seed, the epoch and the row alone.
        """
        view = copy.copy(self)
        view._steps, view._seed = steps, seed
        view._epoch = Epoch() if any(getattr(step, "random", False) for step in steps) else None
        return view

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch it is. Without this, every pass of a loader over the data is the next."""
        if self._epoch:
            self._epoch.set(epoch)

    def split(self, *shares: float, by: str = "random", column: Any = None, seed: int = 0) -> list[Data]:
        """Parts with these shares of the rows, e.g. ``train, valid, test = data.split(0.8, 0.1, 0.1)``.

        ``by``: ``random`` (seeded), ``order`` (as they lie), ``stratified`` (each part has the same mixture of
        ``column``, by default the label), ``group`` (rows with the same value in ``column`` stay together). ``column``
        may also be an array with a value for each row.
        """
        if by not in split_.WAYS:
            raise ValueError(f"by={by!r} is not one of {', '.join(split_.WAYS)}")
        values = None
        if by in ("stratified", "group"):
            if column is None and (self._label is None or by == "group"):
                raise ValueError(f"by={by!r} needs column=, a column's name or a value for each row")
            values = self.values(column) if column is None or isinstance(column, str) else np.asarray(column)
            if len(values) != len(self):
                raise ValueError(f"column= has {len(values)} values for {len(self)} rows")
        rows = np.asarray(self._rows, np.int64)
        return [self._view(rows[part]) for part in split_.parts(len(self), shares, by, values, seed)]

    # -- all rows --------------------------------------------------------------------------------------------------

    def values(self, column: str | None = None) -> np.ndarray:
        """One column (by default the label) of all rows."""
        if column is None:
            if self._label is None:
                raise ValueError("no column is the label; name one")
            return self._all(self._label)[0]
        if column not in self._reader.fields:
            raise ValueError(f"no column {column!r}; there is {', '.join(self._reader.fields)}")
        return self._all(Columns(self._reader, [column], None, None))[0]

    def numpy(self) -> Any:
        """All rows as arrays: one, or a dict by name; with a label a pair."""
        if any(self._columns.encoded) or self._steps:
            samples = list(self)
            if self._label is None:
                return stacked(samples)
            return stacked([x for x, _ in samples]), stacked([y for _, y in samples])
        found = self._all(self._columns, *([self._label] if self._label else []))
        return found if self._label else found[0]

    def _all(self, *groups: Columns) -> tuple[Any, ...]:
        """All rows of some columns, read together, piece by piece."""
        names = [name for group in groups for name in group.names]
        size = self._at_once
        whole: list[Any] = []
        for start in range(0, max(1, len(self)), size):
            part = self._rows[start : start + size]
            if isinstance(part, range) and part.step == 1:
                block = self._reader.span(part.start, part.stop, names)
            else:
                block = self._reader.take(np.asarray(part, np.int64), names)
            made = [group.of(block) for group in groups]
            if len(part) == len(self):
                return tuple(made)
            whole = whole or [_room(len(self), one) for one in made]
            for room, one in zip(whole, made, strict=True):
                for name in one if isinstance(one, dict) else [...]:
                    target = room[name] if isinstance(one, dict) else room
                    target[start : start + size] = one[name]
        return tuple(whole)

    # -- for frameworks --------------------------------------------------------------------------------------------

    def torch(self) -> Any:
        """A ``torch.utils.data.Dataset`` of tensors."""
        return torch_data(self)

    def keras(self, batch_size: int = 32, shuffle: bool = False, seed: int = 0) -> Any:
        """A ``keras.utils.PyDataset`` of batches, for ``model.fit``."""
        return keras_data(self, batch_size, shuffle, seed)

    def tf(self, batch_size: int | None = None) -> Any:
        """A ``tf.data.Dataset`` of samples, or of batches."""
        return tf_data(self, batch_size)


def _rows_at_once(reader: Reader, names: Sequence[str]) -> int:
    """How many rows make a piece."""
    size = 1
    for name in names:
        field = reader.fields[name]
        size += 1 << 17 if field.shape is None else field.dtype.itemsize * math.prod(field.shape)
    return max(1, _PIECE // size)


def _room(rows: int, like: Any) -> Any:
    if isinstance(like, dict):
        return {name: _room(rows, values) for name, values in like.items()}
    return np.empty((rows, *like.shape[1:]), like.dtype)
