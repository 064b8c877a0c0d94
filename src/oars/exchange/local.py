"""``--sync local``: K steps of one's own, then all meet and go on from the mean of their weights, each counted by the
rows it has learnt from.

Or from where an *outer* step leads: the mean change of the round is taken as a gradient, and Nesterov's momentum makes
a step of it (DiLoCo, Douillard et al. 2023). For that, and where weights travel coded, it is their change since the
round began that travels: all ranks began it alike.

A rank that dies has given nothing of the round it died in. The others' mean is that of the living, and the samples it
had learnt from are handed out once more (``adapt/torch/async_modes/lost_samples.py``).
"""

from __future__ import annotations

import numpy as np

from oars.exchange.allreduce import Exchange, Span, span_of
from oars.exchange.compressed import Shapes

_RATE, _MOMENTUM = np.float32(0.7), np.float32(0.9)  # DiLoCo's


class Round:
    """One set of weights from one average to the next; ``exact`` is for when there is nothing to take a change from."""

    def __init__(self, number: int, exchange: Exchange, exact: Exchange, outer: str) -> None:
        self.number = number  # the same on all ranks
        self.exchange, self._exact, self._outer = exchange, exact, outer
        self.steps = 0  # since the last average
        self._start: np.ndarray | None = None  # the weights at the round's beginning, laid out as the buffers are
        self._speed: np.ndarray | None = None

    @property
    def by_change(self) -> bool:
        """Whether it is the weights' change that is averaged."""
        return self._outer != "sgd" or self.exchange.lossy

    def through(self) -> Exchange:
        """The exchange that this round's average goes through: weights are to be laid into its inbox."""
        return self.exchange if self.by_change and self._start is not None else self._exact

    def begin(self, weights: np.ndarray) -> None:
        """A round begins with these weights (a buffer), the same on every rank."""
        if self.by_change:
            self._start = weights.copy()
        self.steps = 0

    def fit(self, nbytes: int) -> None:
        """Where there are other weights than before (a new group), a round has no beginning."""
        if self._start is not None and len(self._start) != nbytes:
            self._start = self._speed = None

    def lay_in(self, spans: list[Span], share: float) -> None:
        """This rank's weights are in the inbox: make them what is averaged. Others read it once all have agreed.

        ``share``: how much this rank's count in the mean; 1 on average.
        """
        inbox = self.through().inbox
        for span in spans:
            part = span_of(inbox, span)
            if self.by_change and self._start is not None:
                part -= span_of(self._start, span)
            if share != 1:
                part *= part.dtype.type(share)

    def close(self, nbytes: int, spans: list[Span], shapes: Shapes) -> np.ndarray:
        """The buffer of weights to go on from; all have laid in theirs, and agreed."""
        exchange = self.through()
        exchange.average(spans, shapes, self.number)
        if not self.by_change or self._start is None:
            self.begin(exchange.result[:nbytes])
            return exchange.result
        weights = self._start.copy()
        speed = np.zeros_like(weights) if self._speed is None else self._speed.copy()
        for span in spans:
            change = span_of(exchange.result, span)
            if self._outer == "nesterov":
                fast = span_of(speed, span)
                fast[:] = _MOMENTUM * fast + change
                change = _RATE * (change + _MOMENTUM * fast)
            span_of(weights, span)[:] += change
        self._speed = speed if self._outer == "nesterov" else None
        self.begin(weights)
        return weights
