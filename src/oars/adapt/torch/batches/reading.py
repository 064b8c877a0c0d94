"""What is known of a loader, and of each pass over its batches; the script's own objects carry nothing of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from torch.utils.data import DataLoader

from oars.adapt.torch.context import ctx

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter


class Key:
    """Stands for a loader. Iterators hold this and not the loader, which would make a circle of a loader and its
    persistent workers: what is left to the garbage collector's circles waits 5 s for each worker."""

    def __init__(self, loader: DataLoader) -> None:
        self.drop_last = loader.drop_last
        self.wrote = False  # whether own samples wrote files when they were read
        self.late = False  # whether reading them printed, or was remembered, behind the first batch
        self._batches = 0

    def looks(self) -> bool:
        """Whether another batch is looked at whole: a collate_fn may change its ways. The 1st, 2nd, 4th, 8th …"""
        self._batches += 1
        return self._batches & (self._batches - 1) == 0


class Reading:
    """One pass over a loader's batches; of an iterator, which carries nothing of ours."""

    def __init__(self, loader: Key, aside: bool) -> None:
        self.loader, self.aside = loader, aside  # aside: read beside the training
        self.queue: deque[Any] = deque()  # the cuts of batches on their way
        self.turned = 0  # by how much workers are turned, see workers.py
        self.place = (ctx.iterations, 0)  # which pass this is, and how many batches it has given


_keys: WeakKeyDictionary[DataLoader, Key] = WeakKeyDictionary()
_readings: WeakKeyDictionary[Any, Reading] = WeakKeyDictionary()
_aside_for_good: WeakSet[DataLoader] = WeakSet()


def key_of(loader: DataLoader) -> Key:
    """What stands for a loader."""
    if loader not in _keys:
        _keys[loader] = Key(loader)
    return _keys[loader]


def keep_aside(loader: DataLoader) -> None:
    """This loader is read whole by every rank, beside the training."""
    _aside_for_good.add(loader)


def share_key(loader: DataLoader, key: Key) -> None:
    """What is known of another loader holds for this one."""
    _keys[loader] = key


def begin(iterator: _BaseDataLoaderIter, loader: DataLoader, aside: bool) -> None:
    """An iterator over a loader's batches is made."""
    _readings[iterator] = Reading(key_of(loader), aside)


def is_aside(loader: DataLoader) -> bool:
    """Whether it is always read beside the training."""
    return loader in _aside_for_good


def reading(iterator: _BaseDataLoaderIter) -> Reading:
    """How far an iterator is."""
    return _readings[iterator]
