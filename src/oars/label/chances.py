"""Intervals of shares: what 200 images say of a million."""

from __future__ import annotations

import math


def wilson(hits: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share that was seen ``hits`` times in ``total`` (Wilson)."""
    if total == 0:
        return 0.0, 1.0
    share, spread = hits / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def upper(errors: int, total: int, level: float = 0.95) -> float:
    """The largest share of errors with which so few would still be seen once in 20 times (Clopper and Pearson)."""
    if total == 0 or errors >= total:
        return 1.0
    low, high = errors / total, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        terms = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
                 + (k * math.log(middle) if k else 0.0) + (total - k) * math.log1p(-middle) for k in range(errors + 1)]
        low, high = (middle, high) if sum(map(math.exp, terms)) > 1 - level else (low, middle)
    return high
