"""Parts of an exchange leave one by one, each as soon as it is there, while the rest is still being computed.

The parts, *buckets*, are agreed upon before. Whoever has laid a bucket into its inbox counts it, in memory that the
ranks of a host share. When all of them have, each begins to average its part of it with the other hosts. All that is
done in calls that do not wait: ``lay`` when there is something to lay in, ``push`` at any time.

In the end all ranks tell each other whether what left is what counts (the caller's: it knows why it might not be).
``finish`` waits for all buckets. If on some rank it is not, the buckets that have left anywhere are brought to their
end by all, for other ends wait for them, and thrown away: ``waste``. Nothing of this depends on who was faster.

What goes wrong on the way (a rank has died) is raised in ``finish`` or ``waste``, where all ranks meet.
"""

from __future__ import annotations

import os

import numpy as np

from oars.exchange.allreduce import Exchange, Span

_LEAST = 1 << 20  # bytes of a bucket
_BUCKETS = 1000  # of an exchange, at most
_MOST = 1 << 20  # buckets of an exchange; counts are of all exchanges


def least_bytes(nbytes: int) -> int:
    """How many bytes a bucket has at least, of an exchange of so many."""
    return max(_LEAST, nbytes // _BUCKETS)


class Early:
    """The buckets of one exchange after the other."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.laid = 0  # buckets of this exchange that are in the inbox
        self._buckets: list[list[Span]] = []
        self._begun = 0  # ... that are on their way
        self._number = 0  # of the exchange, the same on all ranks
        self._generation = -1
        self._error: Exception | None = None

    def expect(self, buckets: list[list[Span]]) -> None:
        """The next exchange has these buckets, on all ranks."""
        self._buckets = buckets
        if self._generation != self.exchange.generation:  # new memory, with nothing counted in it
            self._generation, self._number = self.exchange.generation, 0
            self.laid, self._begun, self._error = 0, 0, None

    def lay(self) -> None:
        """The next bucket is in the inbox."""
        self._count(self.laid + 1)

    def push(self) -> None:
        """Begin what all of this host have laid in, and move what is under way."""
        if self._error is None:
            try:
                self._push(len(self._buckets))
            except Exception as error:
                self._error = error

    def finish(self) -> None:
        """Wait for all buckets; every rank has laid in all of them."""
        self._conclude(len(self._buckets))
        spans = [span for bucket in self._buckets for span in bucket]
        self.exchange.world.exchanged += sum(count * np.dtype(dtype).itemsize for _, count, dtype in spans)

    def waste(self, most: int) -> None:
        """What has left is not what counts. ``most``: how many buckets the rank has laid in that has laid in most."""
        self._count(most)  # the rest of them as it is: its mean is not used
        self.exchange.world.together("lay", lambda: None)
        self._conclude(most)

    def forsake(self) -> None:
        """All ranks have met a loss or an error: nobody waits for what is under way any more."""
        self.exchange.forsake()
        self._generation, self._error = -1, None
        self.laid = self._begun = 0

    def _count(self, laid: int) -> None:
        self.laid = laid
        _in_order()
        self.exchange.laid[self.exchange.world.local_rank] = self._number * _MOST + laid

    def _conclude(self, until: int) -> None:
        def work() -> None:
            if self._error is not None:
                raise self._error
            self._push(until)
            self.exchange.wait()

        self.exchange.world.together("exchange", work)
        self.laid = self._begun = 0
        self._number += 1

    def _push(self, until: int) -> None:
        while self._begun < min(until, self.laid) and self._all_laid(self._begun):
            for span in self._buckets[self._begun]:
                self.exchange.begin(span)
            self._begun += 1
        if self.exchange.across is not None:
            self.exchange.across.poll()

    def _all_laid(self, bucket: int) -> bool:
        there = bool((self.exchange.laid > self._number * _MOST + bucket).all())
        _in_order()
        return there


def _in_order() -> None:
    """What is before this in the program is so for other processors, too, whatever theirs is: the system's scheduler,
    which is called here, is a barrier for memory."""
    os.sched_yield()
