"""Of a batch that ranks train on separately: what a rank takes for the whole, and how much of it is its."""

from __future__ import annotations

import time

import torch

from oars.adapt.torch.context import ctx, offsets_of, on_every_rank, own
from oars.adapt.torch.rows.tensor import Rows

_LONG_ENOUGH = 0.5  # seconds, to judge by
_UNEVEN = 1.5  # times as fast
_MOSTLY = 0.75  # of a batch's time, at most, is taken for what no row costs


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
            cut = offsets[-1] >= ctx.size and (isinstance(x, Rows) or not on_every_rank(len(x)))
            self.whole, self.own = (offsets[-1], own(offsets)[1]) if cut else (1, 1)


class Pace:
    """How long this rank is busy with a batch, waiting for nobody: so long with any, and so long with each of its rows.

    Only both together are measured, so the two can be separated once the rank has had batches of more rows, or fewer.
    Until then all is taken for the rows'. A wrong guess costs time, not balance: for as many rows as now, what
    is predicted is what was measured.
    """

    def __init__(self) -> None:
        self._batches, self._rows, self._busy = 0, 0, 0.0  # since shares were last judged
        self._since = time.perf_counter()
        self._points: list[tuple[float, float]] = []  # (rows of a batch, seconds): the last, and before it with others
        self._stretch = self._cost = 0.0  # seconds of the last time on its own, and of the last average

    def go(self) -> None:
        """The rank is on its own from now on."""
        self._since = time.perf_counter()

    def idle(self, seconds: float) -> None:
        """For so long it waited for others."""
        self._since += seconds

    def report(self, batches: int, rows: int) -> tuple[int, int, int]:
        """It has learnt from so many more, and comes to a meeting: nanoseconds a batch takes, and a row; and rows of a
        batch. All are 0 if it is too early to tell."""
        now = time.perf_counter()
        self._stretch = now - self._since
        self._busy += self._stretch
        self._since = now
        self._batches, self._rows = self._batches + batches, self._rows + rows
        if self._busy < _LONG_ENOUGH or not self._rows:
            return 0, 0, 0
        mean, seconds = point = self._point()
        fixed = 0.0
        for was, took in (at for at in self._points if _unlike(at, point)):
            if (each := (seconds - took) / (mean - was)) > 0:
                fixed = min(max(0.0, seconds - each * mean), _MOSTLY * seconds)
            break
        return int(1e9 * fixed), max(1, int(1e9 * (seconds - fixed) / mean)), max(1, round(mean))

    def _point(self) -> tuple[float, float]:
        return self._rows / self._batches, self._busy / self._batches

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

    def share(self, paces: list[list[int]]) -> None:
        """Cut batches by what all ranks have reported, where one is much slower than another."""
        if not all(each for _, each, _ in paces):
            return
        even = sum(rows for _, _, rows in paces) / len(paces)
        alike = [fixed + each * even for fixed, each, _ in paces]
        costs = tuple((fixed, each) for fixed, each, _ in paces) if max(alike) > _UNEVEN * min(alike) else ()
        if costs or ctx.costs:
            ctx.costs = costs
            offsets_of.cache_clear()
        point = self._point()
        self._points = [point, *(at for at in self._points if _unlike(at, point))][:2]
        self._batches, self._rows, self._busy = 0, 0, 0.0


def _unlike(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(one[0] - other[0]) > 0.1 * max(one[0], other[0])
