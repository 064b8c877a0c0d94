"""Of a batch that ranks train on apart from each other: what a rank takes for the whole, and how much of it is its."""

from __future__ import annotations

import time

import torch

from oars.adapt.torch.context import ctx, offsets_of, own
from oars.adapt.torch.rows import Rows

_LONG_ENOUGH = 0.5  # seconds, to judge by
_UNEVEN = 1.5  # times as fast


class Estimate:
    """What a sum or a mean over ranks would be if all rows were like own ones."""

    whole, own = 1, 1  # rows of the batch that is trained on, and of it this rank's

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        """In place of wire's."""
        if x.is_floating_point() or x.is_complex():
            return x.detach() * (self.whole / self.own)
        if x.dtype is torch.bool:
            return x.detach().clone()
        return (x.detach().double() * self.whole / self.own).round().to(x.dtype)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """In place of wire's."""
        return x.detach().clone()

    def share(self) -> float:
        """Of the batch that is trained on, the share that this rank computes; one that all have is shared alike."""
        return self.own / self.whole if self.whole > 1 else 1 / ctx.size

    def see(self, leaves: list) -> None:
        """The arguments of a model that is trained."""
        tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
        for x in sorted(tensors, key=lambda x: not isinstance(x, Rows))[:1]:
            offsets = x.offsets if isinstance(x, Rows) else offsets_of(len(x))
            self.whole, self.own = (offsets[-1], own(offsets)[1]) if offsets[-1] >= ctx.size else (1, 1)


class Pace:
    """How fast this rank is: rows a second, of the time in which it waited for nobody."""

    def __init__(self) -> None:
        self.rows, self._busy, self._since = 0, 0.0, time.perf_counter()
        self._stretch = self._cost = 0.0  # seconds of the last time on its own, and of the last average

    def go(self) -> None:
        """The rank is on its own from now on."""
        self._since = time.perf_counter()

    def idle(self, seconds: float) -> None:
        """For so long it waited for others."""
        self._since += seconds

    def told(self, rows: int) -> int:
        """It has learnt from ``rows`` more, and comes to a meeting: thousandths of a row a second, 0 if too early."""
        now = time.perf_counter()
        self._stretch = now - self._since
        self._busy += self._stretch
        self._since = now
        self.rows += rows
        return int(1000 * self.rows / self._busy) if self._busy > _LONG_ENOUGH else 0

    def averages(self) -> None:
        """All ranks are there: an average begins."""
        self._cost = -time.perf_counter()

    def averaged(self) -> None:
        """It is over."""
        self._cost += time.perf_counter()

    def worth(self, steps: int) -> int:
        """Rounds of how many steps keep averages below a twentieth of the time; the last round had ``steps``."""
        if not (self._cost and self._stretch):
            return steps
        return min(1000, max(1, round(20 * steps * self._cost / self._stretch)))

    def share(self, paces: list[int]) -> None:
        """Cut batches by how fast ranks are where one is much slower than another."""
        if not all(paces):
            return
        shares = tuple(paces) if max(paces) > _UNEVEN * min(paces) else ()
        if shares or ctx.shares:
            ctx.shares = shares
            offsets_of.cache_clear()
        self.rows, self._busy = 0, 0.0
