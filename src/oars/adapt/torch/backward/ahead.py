"""Between hosts: gradients that leave while backward goes on.

The ranks learn in which order leaves get their gradients, where it is the same on all of them, and cut the leaves into
buckets by it. In the backwards that follow a bucket leaves when all its leaves have their gradients (``Early``).

A backward may be another one than was learnt: other leaves, another order, a leaf that got a second gradient, or one
that was changed after it had left. A rank that finds such a thing lets nothing more leave, and says so where all agree
on the exchange. Then all throw away what has left, and exchange everything at the end. A rank that found nothing lets
the rest of its buckets leave before that, so that the last ones travel together with the agreement.

Where script code sees gradients in backward (hooks), where the exchange is put off, and where nobody can tell what a
gradient becomes (``create_graph``), nothing leaves early. On one host nothing does: the cores are busy, and the limit
is the memory bus.
"""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING, Any

import torch

from oars.adapt.python.clock import perf_counter
from oars.adapt.torch.context import ctx
from oars.exchange.early import Early, least_bytes

if TYPE_CHECKING:
    import numpy as np

    from oars.adapt.torch.backward.flat_buffers import Packing
    from oars.exchange.allreduce import Exchange

_PATIENCE = 3  # exchanges, one after the other, that were not as learnt: then it is learnt anew
_REST = 256  # exchanges, at most, before that


class Ahead:
    """What the ranks have learnt of their backwards, and what of the one under way has left."""

    def __init__(self, exchange: Exchange) -> None:
        self._early = Early(exchange)
        self.armed = self._open = False  # whether buckets may leave; whether a backward has begun in which they might
        self.forget()

    def forget(self) -> None:
        """Ranks have joined, which have not seen what the others have: all learn anew."""
        self._packing: Packing | None = None  # the leaves whose order is known
        self._buckets: list[list[int]] = []  # of their places in the packing
        self._bucket_of: dict[int, int] = {}  # by the leaves' ids
        self._missed = 0  # exchanges that were not as learnt, since the last one that was
        self._rest, self._pause = 0, 1  # exchanges until it may be learnt anew; how many it is the next time
        self._begin()

    def _begin(self) -> None:
        self._fits = True  # so far
        self._left = [len(bucket) for bucket in self._buckets]  # leaves that have not got their gradients
        self._seen: set[int] = set()
        self._given: list[tuple[Any, torch.Tensor, int]] = []  # leaf, gradient, and which version of it has left

    # -- in backward

    def arm(self) -> None:
        """A backward begins, and all that the leaves hold when it is over will be exchanged."""
        packing = self._packing
        if packing is not None and not packing.dead and self._may(packing):
            self._expect(packing)
            self._begin()
            self.armed, self._open, self._thread = True, True, threading.get_ident()

    def _may(self, packing: Packing) -> bool:
        exchange = self._early.exchange
        return exchange.overlaps and exchange.holds(packing.nbytes)

    def _expect(self, packing: Packing) -> None:
        self._early.expect([packing.layout.spans_of(bucket) for bucket in self._buckets])

    def arrived(self, leaf: torch.Tensor) -> None:
        """A leaf has got its gradient."""
        bucket = self._bucket_of.get(id(leaf))
        if bucket is None or id(leaf) in self._seen or threading.get_ident() != self._thread:
            self.armed = self._fits = False
            return
        began = perf_counter()
        self._seen.add(id(leaf))
        self._left[bucket] -= 1
        while self.armed and self._early.laid < len(self._left) and not self._left[self._early.laid]:
            self._lay()
        if not ctx.spoilt:
            self._early.push()
        ctx.world.seconds += perf_counter() - began

    def _lay(self) -> None:
        """Lay in the next bucket."""
        packing, some = self._packing, self._buckets[self._early.laid]
        assert packing is not None
        leaves = [packing.leaf(i) for i in some]
        if any(leaf is None or not _plain(leaf.grad) or leaf.grad.shape != self._shapes[i]
               for i, leaf in zip(some, leaves, strict=True)):
            self.armed = self._fits = False
            return
        grads = [leaf.grad for leaf in leaves]
        self._given += [(leaf, grad, grad._version) for leaf, grad in zip(leaves, grads, strict=True)]
        with torch.no_grad():
            packing.lay_in(self._early.exchange, [torch.view_as_real(g) if g.is_complex() else g for g in grads], some)
        self._early.lay()

    # -- at the exchange

    def close(self, packing: Packing) -> int:
        """These leaves are exchanged now: what to tell the others. 0: nothing is known of their order. Above: all has
        left, and counts, so many buckets. Below: not all, or it does not; one more than have left."""
        known, begun, self.armed, self._open = self._packing, self._open, False, False
        if known is None or not self._may(known):
            return 0
        if not begun:
            self._expect(known)
            self._begin()
        self._fits &= not known.dead and packing.digest == known.digest and all(
            leaf.grad is grad and grad._version == version for leaf, grad, version in self._given)
        ctx.world.ahead += sum(grad.nbytes for _, grad, _ in self._given) if self._fits else 0
        while self._fits and self._early.laid < len(self._buckets):
            self._lay()
        self._early.push()
        self._given.clear()
        return len(self._buckets) if self._fits else -1 - self._early.laid

    def order(self, packing: Packing, serials: list[int]) -> int:
        """A hash of the order in which leaves got their gradients, if it is to be learnt; else 0."""
        if not self._early.exchange.overlaps or self._rest > 0 or packing.odd():
            return 0
        if not all(map(_plain, packing.gradients())):
            return 0
        return 1 << 32 | zlib.crc32(repr(serials).encode())

    def conclude(self, reports: np.ndarray) -> int:
        """Every rank has reported. 1: the means are in the result. -1: what had left is thrown away, and so is what
        was in inboxes. 0: nothing has been done."""
        self._begin()
        if (reports > 0).all():
            self._early.finish()
            self._missed, self._pause = 0, 1
            return 1
        if not reports.any():
            self._rest -= 1
            return 0
        self._missed += 1
        if self._missed >= _PATIENCE:
            self._packing, self._buckets, self._bucket_of, self._missed = None, [], {}, 0
            self._rest, self._pause = self._pause - 1, min(2 * self._pause, _REST)
        most = int(max(max(reports.max(), 0), (-1 - reports).max()))
        if most:
            self._early.waste(most)
        return -1 if most else 0

    def learn(self, packing: Packing, serials: list[int]) -> None:
        """On all ranks these leaves got their gradients in this order."""
        places = {serial: i for i, serial in enumerate(packing.serials)}
        least = least_bytes(packing.nbytes)
        self._packing, self._buckets, size = packing, [[]], 0
        for serial in serials:
            if size >= least:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(places[serial])
            size += packing.layout.size_of(places[serial])
        self._bucket_of = {id(packing.leaf(i)): b for b, bucket in enumerate(self._buckets) for i in bucket}
        self._shapes = {i: packing.leaf(i).shape for i in places.values()}
        self._begin()

    def forsake(self) -> None:
        """All ranks have met a loss or an error: what has left is of no use."""
        self.armed = self._open = False
        self._early.forsake()
        self._begin()


def _plain(grad: torch.Tensor | None) -> bool:
    """Whether a gradient is one that lies in a flat buffer, and comes there without anybody waiting."""
    return grad is not None and grad.layout is torch.strided and not grad.requires_grad and grad.device.type == "cpu"
