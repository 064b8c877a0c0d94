"""``--sync server``, the workers' side: who holds what, and requests that outlive the server they were sent to.

Tensors are dealt to servers by size; those larger than a server's share are cut. What one server holds of one optimizer
is a *shard*; its *chain* names the servers that have it: the one who is asked, then its buddy (``serving.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from oars.exchange.mail import Ear, Gone, Mail, Message
from oars.exchange.serving import FAILED


class Piece(NamedTuple):
    """Of the tensor with this number, the elements from ``start`` to ``stop``."""

    tensor: int
    start: int
    stop: int


class Unserved(Exception):
    """Nobody is left who has a shard, or a server cannot hold it."""


def place(sizes: list[int], servers: int, how: str, cut: bool) -> list[list[Piece]]:
    """For each server its pieces of tensors of these ``sizes``; not ``cut``: all on one, for optimizers that look at
    whole tensors, or at all of them."""
    if not cut:
        return [[Piece(i, 0, size) for i, size in enumerate(sizes)], *([] for _ in range(servers - 1))]
    dealt: list[list[Piece]] = [[] for _ in range(servers)]
    total = sum(sizes)
    if how == "round-robin":
        most = max(1, -(-total // servers))
        pieces = [Piece(i, at, min(at + most, size))
                  for i, size in enumerate(sizes) for at in range(0, size or 1, most)]
        for n, piece in enumerate(pieces):
            dealt[n % servers].append(piece)
        return dealt
    ends = [total * (server + 1) // servers for server in range(servers)]
    server = laid = 0  # all in a row, the largest first; cut where one server's share ends and the next one's begins
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = 0
        while True:
            while server + 1 < servers and laid == ends[server]:
                server += 1
            stop = min(sizes[i], at + ends[server] - laid)
            dealt[server].append(Piece(i, at, stop))
            laid, at = laid + stop - at, stop
            if at == sizes[i]:
                break
    return [sorted(pieces) for pieces in dealt]


class Shard:
    """What one server holds of one optimizer, as a worker sees it."""

    def __init__(self, key: tuple[int, int], pieces: list[Piece], chain: list[int]) -> None:
        self.key, self.pieces, self.chain = key, pieces, chain
        self.clock = 0  # pushes in this epoch
        self.version = 0  # of the weights that this worker has


class Desk:
    """A worker's requests, each open until it is answered. One for each shard at a time."""

    def __init__(self, mail: Mail, servers: list[int], lost: Callable[[int], None]) -> None:
        self.mail, self._lost = mail, lost
        self.ears = {server: Ear(mail, server) for server in servers}  # the living
        self._open: dict[tuple[int, int], tuple[Shard, np.ndarray, np.ndarray]] = {}
        self._answers: dict[tuple[int, int], Message] = {}
        self._stranded = False  # nobody is left who has what was asked for

    def ask(self, shard: Shard, said: np.ndarray, body: np.ndarray) -> None:
        """Send a request to who has this shard; nobody may change ``body`` any more."""
        said["number"], said["shard"] = shard.key
        self._open[shard.key] = shard, said, body
        self._send(shard.key)

    def tell(self, said: np.ndarray) -> None:
        """Something for all servers, that none answers."""
        for server in list(self.ears):
            try:
                self.mail.send(server, said.copy())
            except Gone:
                self._gone(server)

    def answers(self, patient: bool) -> dict[tuple[int, int], Message]:
        """Wait for the answers to all requests; Unserved if one can never come."""
        tries = 0
        while self._open:
            if self._stranded:
                raise Unserved("")
            for server in list(self.ears):
                try:
                    while (message := self.ears[server].hear()) is not None:
                        self._take(message)
                except Gone:
                    self._gone(server)
            tries += 1
            if self._open and (patient or tries > 100):
                os.sched_yield()
                time.sleep(2e-5)
        found, self._answers = self._answers, {}
        return found

    def forget(self) -> None:
        """Nobody waits any more for what was asked."""
        self._open, self._answers, self._stranded = {}, {}, False

    def _take(self, message: Message) -> None:
        said = message.head
        key = int(said["number"]), int(said["shard"])
        if said["kind"] == FAILED:
            raise Unserved(message.body.tobytes().decode())
        if self._open.pop(key, None) is not None:
            self._answers[key] = message

    def _send(self, key: tuple[int, int]) -> None:
        shard, said, body = self._open[key]
        shard.chain = [server for server in shard.chain if server in self.ears]
        if not shard.chain:
            self._stranded = True
            return
        try:
            self.mail.send(shard.chain[0], said.copy(), body)
        except Gone:
            self._gone(shard.chain[0])  # which sends this one too

    def _gone(self, server: int) -> None:
        """A server has died: what it was asked, its buddy is asked."""
        if self.ears.pop(server, None) is None:
            return
        self._lost(server)
        for key, (shard, _, _) in list(self._open.items()):
            if shard.chain[:1] == [server]:
                self._send(key)


def merge(counts: list[np.ndarray]) -> dict[int, int]:
    """What servers have counted of each worker: what all of them know of."""
    dicts: list[dict[int, int]] = [{int(w): int(n) for w, n in c.view(np.int64).reshape(-1, 2)} for c in counts]
    return {worker: min(d.get(worker, 0) for d in dicts) for worker in set().union(*dicts)} if dicts else {}
