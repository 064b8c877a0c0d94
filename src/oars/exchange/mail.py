"""Messages from one rank to another, in the order they were sent; nobody waits, and who listens hears of deaths.

A message is a head of fixed size and, if the head says so, a body. Collectives know nothing of these lines: they have
a communicator of their own, which is never revoked, so that a death is the matter of those who talk to the dead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

HEAD = np.dtype([("kind", "<i4"), ("number", "<i4"), ("shard", "<i4"), ("who", "<i4"), ("epoch", "<i8"),
                 ("clock", "<i8"), ("learnt", "<i8"), ("version", "<i8"), ("share", "<f8"), ("stale", "<i8"),
                 ("held", "<f8"), ("served", "<f8"), ("settings", "<i8"), ("nbytes", "<i8")])
NOTHING = np.empty(0, np.uint8)
_HEAD, _BODY = 1, 2  # tags


class Gone(Exception):
    """The rank at the other end has died."""


class Message(NamedTuple):
    """One that was heard."""

    head: Any  # a HEAD
    body: np.ndarray


def head(kind: int, **fields: Any) -> np.ndarray:
    """A HEAD of which the other fields are 0."""
    made = np.zeros(1, HEAD)
    made["kind"] = kind
    for name, value in fields.items():
        made[name] = value
    return made


class Sent:
    """A message on its way, and its buffers, which MPI reads until it is through."""

    def __init__(self, mail: Mail, requests: list[Any], buffers: tuple) -> None:
        self._mail, self._requests, self._buffers = mail, requests, buffers

    def through(self) -> bool:
        """Whether the other end has it; Gone if it never will."""
        self._requests = [request for request in self._requests if not self._mail.test(request)]
        return not self._requests


class Mail:
    """This rank's end of all lines."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.comm, self._mpi = comm, MPI
        self.bytes = 0  # sent so far
        self._under_way: list[Sent] = []

    def send(self, to: int, head: np.ndarray, body: np.ndarray = NOTHING) -> Sent:
        """Begin to send; nobody may change ``body`` any more. Gone if that rank is known to be dead."""
        head["nbytes"] = body.nbytes
        requests = []
        try:
            requests.append(self.comm.Issend(head.view(np.uint8), to, _HEAD))
            if body.nbytes:
                requests.append(self.comm.Issend(body, to, _BODY))
        except self._mpi.Exception as error:
            raise self._death(error) from None
        self.bytes += head.nbytes + body.nbytes
        sent = Sent(self, requests, (head, body))
        self._under_way = [other for other in self._under_way if not self._over(other)] + [sent]
        return sent

    def flush(self) -> None:
        """Wait until all that was sent is through, or never will be."""
        while self._under_way:
            self._under_way = [sent for sent in self._under_way if not self._over(sent)]

    def receive(self, into: np.ndarray, source: int, tag: int) -> Any:
        """A request; None where the other end is known to be dead."""
        try:
            return self.comm.Irecv(into, source, tag)
        except self._mpi.Exception as error:
            if isinstance(death := self._death(error), Gone):
                return None
            raise death from None

    def test(self, request: Any) -> bool:
        """Whether it is complete; Gone if it never will be."""
        if request is None:
            raise Gone
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            raise self._death(error) from None

    def _over(self, sent: Sent) -> bool:
        try:
            return sent.through()
        except Gone:
            return True

    def _death(self, error: Any) -> Exception:
        mpi = self._mpi
        dead = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED, mpi.ERR_IN_STATUS)
        return Gone() if error.Get_error_class() in dead else error


class Ear:
    """What one other rank says, message by message."""

    def __init__(self, mail: Mail, source: int) -> None:
        self._mail, self.source = mail, source
        self._listen()

    def _listen(self) -> None:
        self._head: Any = np.zeros(1, HEAD)
        self._body: np.ndarray | None = None
        self._request = self._mail.receive(self._head.view(np.uint8), self.source, _HEAD)

    def hear(self) -> Message | None:
        """The next message if it is there; Gone if none will come."""
        if not self._mail.test(self._request):
            return None
        if self._body is None:
            self._body = np.empty(int(self._head["nbytes"][0]), np.uint8)
            if self._body.nbytes:
                self._request = self._mail.receive(self._body, self.source, _BODY)
                if not self._mail.test(self._request):
                    return None
        message = Message(self._head[0], self._body)
        self._listen()
        return message
