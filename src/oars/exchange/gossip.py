"""``--sync gossip``: after each step a rank sends its weights to one other, and hears from one other; nobody waits.

Who talks to whom is *dissemination*: in round r, of ranks in some order, each sends 2^(r mod log N) places on, for any
number of ranks. After log N rounds everybody has heard, through others, of everybody. With ``rotate`` the order is
drawn anew every log N rounds, the same on all ranks. A rank begins its next round when it has heard what it was to hear
in this one; until then it just trains on. So a step costs one message, however many ranks there are.

What is sent is a private copy, and what is done with what was heard keeps the mean of all ranks' weights: a rank adds
half of the difference between what it heard and what *it had sent* in that round. Every copy is heard by exactly one,
so these differences add up to nothing, whenever they arrive: the mean moves by the mean of the ranks' own steps, as far
as it would under allreduce.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from oars.engine.world import World

_ROUNDS = 1 << 20


class Gossip:
    """One rank's talk about one set of weights. ``number`` tells sets apart, on all ranks alike."""

    def __init__(self, world: World, number: int, rotate: bool, seed: int) -> None:
        self.world, self.number, self._rotate, self._seed = world, number, rotate, seed
        self.round = 0  # rounds begun
        self.heard_from = -1  # whom, the last time, by its number at the start
        self._comm: Any = None
        self._under_way: list[Any] = []
        self._dropped: list[Any] = []  # MPI may still look at them
        self.sent, self._heard = np.empty(0, np.uint8), np.empty(0, np.uint8)

    def idle(self) -> bool:
        """Whether nothing is on its way; ranks that are others than before begin with round 0."""
        if self._comm is not self.world.comm:
            self.drop()
            self._comm, self.round = self.world.comm, 0
        return not self._under_way

    def room(self, nbytes: int) -> np.ndarray:
        """Where to put what is to be said next. (Fresh memory for every message would cost more than its copying.)"""
        if len(self.sent) != nbytes:
            self.sent, self._heard = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        return self.sent

    def begin(self) -> None:
        """Send what is in the ``room``, which stays as it is, to this round's partner, and listen to the other."""
        to, source = self.partners(self.round)
        # What was dropped on one side only still lies about: no tag comes again in the life of a run.
        tag = (self.number * _ROUNDS + self.round % _ROUNDS) % self._comm.Get_attr(self.world._mpi.TAG_UB)
        self.heard_from = self.world.members[source]
        self.round += 1
        self.world.sent += self.sent.nbytes
        try:
            self._under_way = [self._comm.Irecv(self._heard, source, tag)]
            self._under_way.append(self._comm.Isend(self.sent, to, tag))
        except self.world._mpi.Exception as error:
            self._died(error)

    def heard(self, wait: bool = False) -> np.ndarray | None:
        """What was heard in this round, once, until the next begins; None while it is on its way, or never comes."""
        if not self._under_way:
            return None
        try:
            while not self.world._mpi.Request.Testall(self._under_way):
                if not wait:
                    return None
                os.sched_yield()
                time.sleep(2e-5)
        except self.world._mpi.Exception as error:
            self._died(error)
            return None
        self._under_way = []
        return self._heard

    def partners(self, round_: int) -> tuple[int, int]:
        """To whom this rank sends in a round, and from whom it hears."""
        size = self.world.size
        hops = max(1, (size - 1).bit_length())
        order = list(range(size))
        if self._rotate:
            draw = np.random.Generator(np.random.PCG64([self._seed, self.world.era, round_ // hops]))
            order = draw.permutation(size).tolist()
        here, far = order.index(self.world.rank), 1 << round_ % hops
        return order[(here + far) % size], order[(here - far) % size]

    def _died(self, error: Any) -> None:
        """A partner has: all will notice, and meet."""
        mpi = self.world._mpi
        if error.Get_error_class() not in (mpi.ERR_PROC_FAILED, mpi.ERR_REVOKED, mpi.ERR_PROC_FAILED_PENDING,
                                           mpi.ERR_IN_STATUS):
            raise error
        self.drop()

    def drop(self) -> None:
        """Forget what is on its way."""
        if self._under_way:
            self._dropped.append((self._under_way, self.sent, self._heard))
            self._under_way, self.sent, self._heard = [], np.empty(0, np.uint8), np.empty(0, np.uint8)
