"""The whole of some rows, as it was gathered: the script may hold views or arrays of it, and write into them."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from oars.adapt.torch.context import Offsets, ctx, mine
from oars.adapt.torch.rows import collectives


class Mirror:
    """The whole of some rows, gathered before. The script may hold views of it and change them in place."""

    def __init__(self, full: torch.Tensor, local: torch.Tensor, dim: int, offsets: Offsets) -> None:
        self.full, self.local, self.dim, self.offsets = full, local, dim, offsets
        self.versions = full._version, local._version
        self.lent: Any = None  # weak reference to the NumPy array of the whole that the script has, and its values

    def fresh(self) -> bool:
        """Whether the whole still is that of the rows."""
        return self.versions == (self.full._version, self.local._version)

    def take_over(self) -> None:
        """Take over what the script changed in views of the whole (``for row in x: row.clamp_(0, 1)``)."""
        if self.full._version != self.versions[0]:
            with torch.no_grad():
                self.local.copy_(mine(self.full, self.offsets, self.dim))
            self.versions = self.full._version, self.local._version

    def take_over_lent(self) -> None:
        """The same of the whole's array, of which no version tells. All ranks find the same."""
        array, before = self.lent
        same = bool(((self.full == before) | ((self.full != self.full) & (before != before))).all())
        if not same and self.local._version == self.versions[1]:
            with torch.no_grad():
                self.local.copy_(mine(self.full, self.offsets, self.dim))
            self.versions = self.full._version, self.local._version
        self.lent = None if array() is None else self.lent if same else (array, self.full.clone())


recent: deque[Mirror] = deque(maxlen=8)  # of rows that may be gone already, views of other rows (``x.view(-1)[3:5]``)


def lend(x: Any, array: Any) -> Any:
    """The script gets an array of the whole of rows, and may write into it."""
    if x.mirror is not None:
        x.mirror.lent = weakref.ref(array), x.mirror.full.clone()
    return array


def give_back(x: Any) -> None:
    """Rows were changed in place: so are the views and arrays of their whole that the script has."""
    for mirror in (getattr(x, "mirror", None), *recent):
        if mirror is None or mirror.local._version == mirror.versions[1] or len(mirror.offsets) != ctx.size + 1:
            continue
        if ctx.in_step and not ctx.separate:
            with torch.no_grad():
                mirror.full.copy_(collectives.Gather.apply(mirror.local, mirror.offsets, mirror.dim))
            mirror.versions = mirror.full._version, mirror.local._version
            if mirror.lent is not None:
                mirror.lent = mirror.lent[0], mirror.full.clone()
