"""``--samples thin``: which samples of a batch are left out, unread, because the network knows them.

A sample whose last loss is below the mean of all is left out with probability one half; those of them that stay count
twice, so gradients are right on average. The first pass is whole, and so is the last eighth of the run. The choice is a
hash of the seed, the pass and the sample's number: the same on any number of ranks, until rounding carries a loss over
the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

WHOLE_AT_THE_END = 8  # the last of so many parts of a run is whole
FEWEST = 2  # samples of a batch that stay at least: statistics need two


@dataclass
class Batch:
    """One batch of a loader that is watched: the samples that stay, and what they count."""

    samples: np.ndarray
    of: int  # how many it had
    weights: np.ndarray | None  # None: all stay, and count once
    noted: bool = False


class Samples:
    """The last loss of each sample of one data set, and how often it was left out."""

    def __init__(self, count: int, seed: int) -> None:
        self.seed, self.passes = seed, 0
        self.losses = np.full(count, np.nan)
        self.left_out = np.zeros(count, np.int64)
        self.trained = False  # some pass was

    def known(self) -> bool:
        """Whether every sample has a loss."""
        return not np.isnan(self.losses).any()

    def note(self, samples: np.ndarray, losses: Any) -> None:
        """These samples had these losses."""
        self.losses[samples] = losses
        self.trained = True

    def away(self) -> np.ndarray:
        """Which samples are left out in this pass, and which count twice, as two rows of truth values."""
        low = self.losses < self.losses.mean()
        heads = _coins(self.seed, self.passes, len(self.losses))
        return np.stack([low & heads, low & ~heads])

    def thinned(self, samples: list[int], away: np.ndarray) -> Batch:
        """What stays of a batch."""
        every = np.asarray(samples, dtype=np.int64)
        stay = every[~away[0][every]]
        if len(stay) < FEWEST:
            return Batch(every, len(every), None)
        self.left_out[every[away[0][every]]] += 1
        return Batch(stay, len(every), 1.0 + away[1][stay])


def _coins(seed: int, number: int, count: int) -> np.ndarray:
    """A coin for each sample (splitmix64)."""
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03)
                                                          % 2**64)
        z = (z + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) & np.uint64(1)).astype(bool)
