"""Which epoch it is, for random transforms: every pass of a PyTorch loader over the data is the next.

The number lies in memory that loader workers share, persistent ones included. All ranks of a run begin the same passes
in the same order, so it is the same on all of them. One function is patched for this, ``DataLoader.__iter__``, when the
first random transform is made; it counts and changes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from oars.data import seams

_patched = False


class Epoch:
    """A counter that workers share."""

    def __init__(self) -> None:
        self._set_by_script = False  # by the script itself
        try:
            import torch
        except ImportError:
            import numpy as np

            self._number: Any = np.zeros(1, np.int64)
        else:
            self._number = torch.zeros(1, dtype=torch.int64).share_memory_()
            _patch(torch.utils.data.DataLoader)
            self._number[0] = -1  # the first pass makes it 0

    @property
    def now(self) -> int:
        """The number of the epoch, from 0 on."""
        return max(0, int(self._number[0]))

    def set(self, epoch: int) -> None:
        """The script says which epoch it is."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch}: they count from 0")
        self._set_by_script = True
        self._number[0] = epoch

    def begins(self) -> None:
        """A loader begins a pass."""
        if not self._set_by_script:
            self._number[0] += 1


def _patch(loader: Any) -> None:
    global _patched
    if not _patched:
        _patched = True
        seams.count_passes(loader, _counting)


def _counting(plain: Any) -> Any:
    @functools.wraps(plain)
    def begin(self: Any) -> Any:
        for epoch in _epochs(self.dataset):
            epoch.begins()
        return plain(self)

    return begin


def _epochs(dataset: Any) -> list[Epoch]:
    """Those of the data below subsets and concatenations."""
    found, look = [], [dataset]
    for _ in range(1000):
        if not look:
            break
        one = look.pop()
        epoch = getattr(one, "_epoch", None)
        if isinstance(epoch, Epoch) and epoch not in found:
            found.append(epoch)
        look += [getattr(one, "dataset", None)] if getattr(one, "dataset", None) is not None else []
        look += list(getattr(one, "datasets", None) or []) if isinstance(getattr(one, "datasets", None), list) else []
    return found
