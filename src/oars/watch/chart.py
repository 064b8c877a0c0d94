"""A chart, before it is drawn: what ``terminal``, ``svg`` and ``picture`` make visible, each in its own way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

# Okabe and Ito's colours, which colour-blind people can tell apart; lines that share one differ in their dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("", "7 3", "2 3")
POINTS = 600  # of a line are drawn at most
NOISY = 200  # points from which on a line is drawn faint, and its running mean over it


@dataclass
class Series:
    """One line. Values that are not finite are left out, and where they begin the line is marked as diverged."""

    name: str
    x: list[float]
    y: list[float]
    points: bool = False  # with a mark at each value
    reference: bool = False  # a thin grey line to compare with
    low: list[float] = field(default_factory=list)  # a band around the line, where one is known
    high: list[float] = field(default_factory=list)

    def finite(self) -> tuple[list[float], list[float]]:
        """The values that can be drawn."""
        pairs = [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def diverged_at(self) -> tuple[float, float] | None:
        """Where a line that had been finite ends for good: the last finite point before it."""
        if not self.y or math.isfinite(self.y[-1]):
            return None
        xs, ys = self.finite()
        return (xs[-1], ys[-1]) if xs else None


@dataclass
class Chart:
    """Axes, lines, and events along the x axis."""

    title: str
    x: str
    y: str
    series: list[Series]
    log_x: bool = False
    log_y: bool = False
    events: list[tuple[float, str]] = field(default_factory=list)
    zero: bool = False  # the y axis begins at 0

    def drawable(self) -> bool:
        """Whether there is anything to see."""
        return any(series.finite()[0] for series in self.series)

    def x_ticks(self, most: int) -> list[float]:
        """The x axis's ticks; there is no half step and no half rank."""
        low, high = self.span()[:2]
        return [t for t in ticks(low, high, self.log_x, most) if t == round(t) or self.x not in ("step", "ranks")]

    def span(self) -> tuple[float, float, float, float]:
        """The smallest and largest x and y, in the axes' own measure, with room where all are the same."""
        xs, ys = [], []
        for series in self.series:
            band = list(zip(series.x * 2, series.low + series.high, strict=True)) if series.low else []
            for x, y in [*zip(*series.finite(), strict=True), *band]:
                if (x > 0 or not self.log_x) and (y > 0 or not self.log_y):
                    xs.append(x)
                    ys.append(y)
        if self.zero and not self.log_y:
            ys.append(0.0)
        if not xs:
            xs, ys = [1.0], [1.0]
        return *_room(min(xs), max(xs), self.log_x), *_room(min(ys), max(ys), self.log_y)


def _room(low: float, high: float, log: bool) -> tuple[float, float]:
    if low == high:
        return (low / 2, high * 2) if log else (low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1))
    return low, high


def place(value: float, low: float, high: float, log: bool) -> float:
    """Where a value lies between two others: 0 to 1."""
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def spans_decades(values: Iterable[float]) -> bool:
    """Whether these are better shown on a logarithmic axis."""
    finite = [v for v in values if math.isfinite(v)]
    above = [v for v in finite if v > 0]  # a few zeros may be left out there
    return len(above) > 0.9 * len(finite) and min(finite) >= 0 and max(above) / min(above) > 100


def ticks(low: float, high: float, log: bool, most: int = 6) -> list[float]:
    """Round numbers between two values; on a logarithmic axis powers of ten, or 1, 2, 5 where there are few."""
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        if last - first < 2:
            fine = [m * 10.0**p for p in range(first - 1, last + 1) for m in (1, 2, 5)]
            return [t for t in fine if low * 0.999 <= t <= high * 1.001]
        return [10.0**p for p in range(first, last + 1, -(-(last - first + 1) // most))]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A number as short as possible."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 1e3 else f"{value:.4g}"
    text = f"{value:.2e}"
    mantissa, _, power = text.partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"


def thinned(xs: list[float], ys: list[float], most: int = POINTS) -> tuple[list[float], list[float]]:
    """At most so many points, the smallest and largest of every stretch kept, so that no spike is lost."""
    if len(xs) <= most:
        return xs, ys
    keep = {0, len(xs) - 1}
    parts = most // 2
    for part in range(parts):
        begin, end = len(xs) * part // parts, len(xs) * (part + 1) // parts
        keep.add(min(range(begin, end), key=ys.__getitem__))
        keep.add(max(range(begin, end), key=ys.__getitem__))
    order = sorted(keep)
    return [xs[i] for i in order], [ys[i] for i in order]


def smoothed(ys: list[float], log: bool) -> list[float]:
    """The mean over a fiftieth of the line around each point (of logarithms on such an axis): it does not lag."""
    if log:
        ys = [math.log(y) if y > 0 else -math.inf for y in ys]
        if -math.inf in ys:  # zeros have no place there
            return [math.exp(y) for y in ys]
    sums = [0.0, *itertools.accumulate(ys)]
    half = len(ys) // 100
    out = []
    for i in range(len(ys)):
        reach = min(half, i, len(ys) - 1 - i)
        out.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return [math.exp(y) for y in out] if log else out
