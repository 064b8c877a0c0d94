"""The mean over hosts, in pieces that travel while other things are done.

A piece is small enough for MPI to send it without asking the other end first (61,440 bytes: Open MPI asks from 64 kB
on, over TCP). So whatever the sockets hold is on its way when a call returns, and nobody has to be in MPI for that. Two
hosts send each other all they have. Of more hosts, each sends every other one its part, which that one sums and sends
back: so each number crosses a host's link twice, however many hosts there are.

Numbers are summed in the order of hosts, wherever they lie and whatever travels with them. So the mean is the same to
the bit whether they travel early or late, in one message or in many.

Nothing is ever sent that the other ends do not expect: all start the same averages in the same order. MPI keeps the
order of messages between two ranks, so messages need no numbers.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from oars.engine.world import World

MOST = 16  # hosts; for more, messages to each would be too many, and MPI's own allreduce is used
_PIECE = 61440  # bytes
_AHEAD = 64  # pieces that a host may have sent and not yet heard of: small messages wait behind them
_PARTS, _MEANS = 1, 2  # tags


class _Piece:
    """Some numbers under way."""

    __slots__ = ("heard", "into", "mine", "requests")

    def __init__(self, mine: np.ndarray, into: np.ndarray) -> None:
        self.mine, self.into = mine, into
        self.heard: list[np.ndarray] = []  # the other hosts' of these numbers, or of our part of them; in their order
        self.requests: list[Any] = []


class Across:
    """What this rank averages with the ranks of the same place on the other hosts."""

    def __init__(self, world: World, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._world, self.comm = MPI, world, comm
        self.hosts, self._host = comm.size, comm.rank
        self._others = [host for host in range(self.hosts) if host != self._host]
        self._unsent: deque[_Piece] = deque()
        self._unsummed: deque[_Piece] = deque()
        self._unfinished: deque[_Piece] = deque()  # means of other hosts' parts are on their way
        self._sent: deque[tuple[Any, np.ndarray]] = deque()
        self._ahead = 0

    def start(self, mine: np.ndarray, into: np.ndarray) -> None:
        """Begin to average these numbers; ``mine`` has this host's sum, which stays as it is. See ``poll``."""
        step = _PIECE // mine.itemsize * (1 if self.hosts == 2 else self.hosts)
        for first in range(0, len(mine), step):
            piece = _Piece(mine[first : first + step], into[first : first + step])
            size = len(piece.mine) if self._whole(piece) else len(self._part(piece.mine, self._host))
            for other in self._others:
                heard = np.empty(size, mine.dtype)
                piece.heard.append(heard)
                piece.requests.append(self.comm.Irecv(heard, other, _PARTS))
            self._unsent.append(piece)
            self._unsummed.append(piece)
        self._send()

    def poll(self) -> bool:
        """Move what is under way, without waiting. Whether there is nothing any more."""
        while self._unsummed and self._mpi.Request.Testall(self._unsummed[0].requests):
            self._sum(self._unsummed.popleft())
            self._ahead -= 1
            self._send()
        while self._unfinished and self._mpi.Request.Testall(self._unfinished[0].requests):
            self._unfinished.popleft()
        while self._sent and self._sent[0][0].Test():
            self._sent.popleft()
        return not (self._unsummed or self._unfinished or self._sent)

    def allreduce(self, mine: np.ndarray, into: np.ndarray) -> None:
        """The same at once, by MPI's own: for more than ``MOST`` hosts."""
        np.copyto(into, mine)
        self._world.sent += into.nbytes
        self.comm.Allreduce(self._mpi.IN_PLACE, into)
        np.multiply(into, into.dtype.type(1) / into.dtype.type(self._world.size), out=into)

    def abandon(self) -> list:
        """All that MPI may still look at, though nobody waits for it any more."""
        left = [*self._unsummed, *self._unfinished, *self._sent]
        for known in (self._unsent, self._unsummed, self._unfinished, self._sent):
            known.clear()
        return left

    def _whole(self, piece: _Piece) -> bool:
        """Whether hosts send each other all of a piece, and each sums it: there are two of them, or it is so small that
        only the way there and back counts."""
        return self.hosts == 2 or piece.mine.nbytes * len(self._others) <= _PIECE

    def _part(self, numbers: np.ndarray, host: int) -> np.ndarray:
        """Those of a piece's numbers that a host sums."""
        count = len(numbers)
        return numbers[count * host // self.hosts : count * (host + 1) // self.hosts]

    def _send(self) -> None:
        while self._unsent and self._ahead < _AHEAD:
            piece = self._unsent.popleft()
            self._ahead += 1
            if self._whole(piece):
                self._world.sent += piece.mine.nbytes
                for other in self._others:
                    self._give(piece.mine, other, _PARTS)
                continue
            for other in self._others:
                part = self._part(piece.mine, other)
                self._world.sent += part.nbytes
                self._give(part, other, _PARTS)

    def _give(self, numbers: np.ndarray, to: int, tag: int) -> None:
        self._sent.append((self.comm.Isend(numbers, to, tag), numbers))

    def _sum(self, piece: _Piece) -> None:
        """All have been heard: make the mean."""
        whole = self._whole(piece)
        mine, out = (piece.mine, piece.into) if whole else (
            self._part(piece.mine, self._host), self._part(piece.into, self._host))
        every = [*piece.heard[: self._host], mine, *piece.heard[self._host :]]
        with np.errstate(all="ignore"):  # what the script has NumPy raise is for its own numbers
            np.add(every[0], every[1], out=out)
            for numbers in every[2:]:
                np.add(out, numbers, out=out)
            np.multiply(out, out.dtype.type(1) / out.dtype.type(self._world.size), out=out)
        piece.heard = []
        if whole:
            return
        self._world.sent += out.nbytes
        piece.requests = []
        for other in self._others:
            piece.requests.append(self.comm.Irecv(self._part(piece.into, other), other, _MEANS))
            self._give(out, other, _MEANS)
        self._unfinished.append(piece)
