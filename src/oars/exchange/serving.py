"""``--sync server``, the servers' side: who hears gradients makes steps of them, and answers with weights.

A server holds *parts*: for each optimizer of the script, a share of its tensors (stepped by ``ps_shard.py``).
A worker pushes the gradients of its own rows, and is answered with weights when it may go on:

- With a bound ``s`` above 0, as soon as every other worker has made all but the last ``s`` of its steps. A step of the
  optimizer is made whenever gradients of a whole batch's rows have come, whoever sent them: so there are as many steps
  as one process makes, and momenta, schedules and learning rates keep their meaning.
- With ``s = 0`` when the step is made, which is made of every worker's gradients but those of the ``backup`` slowest.
  When only these have not come to where the others wait, what they push makes no steps of its own: it is left out.

Who waits elsewhere (evaluates, saves) is *away*: nobody waits for it. Workers come back all together, in a new *epoch*.

Each part has a *buddy*: another server, which receives every push and every step, in the same order, and so has the
same weights and momenta to the bit. A worker is answered when the buddy knows of its push: if the server dies then,
nothing is lost. A worker whose server dies pushes once more, to the buddy, who knows what it has heard already.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from oars.exchange.mail import NOTHING, Ear, Gone, Mail, Message, Sent, head

SET, PUSH, GET, AWAY, ASK, COPY, TURN, DROP, ANSWER, FAILED = range(1, 11)  # kinds of messages
_LOOK = 0.2  # seconds between looks at whether all is over


class Holder(Protocol):
    """The tensors of a part."""

    def read(self, body: np.ndarray) -> Any:
        """The gradients that a push brought."""

    def configure(self, settings: bytes) -> None:
        """The optimizer's settings (learning rates and the like) are these from now on."""

    def step(self, gradients: list[tuple[float, Any]]) -> None:
        """Make a step of the mean of these, each by its share."""

    def weights(self) -> np.ndarray:
        """The weights, as bytes that stay as they are."""

    def everything(self) -> np.ndarray:
        """The weights and the optimizer's state."""


class Held:
    """A worker that waits for its answer."""

    def __init__(self, worker: int, clock: int, stale: int, began: float) -> None:
        self.worker, self.clock, self.stale, self.began = worker, clock, stale, began
        self.served = 0.0
        self.relay: Sent | None = None  # on its way to the buddy


class Part:
    """See above; decides when a step is made, and who may go on."""

    def __init__(self, key: tuple[int, int], holder: Holder, bound: int, backup: int, buddy: int, epoch: int) -> None:
        self.key, self.holder, self.bound, self.backup, self.buddy = key, holder, bound, backup, buddy
        self.epoch, self.version = epoch, 0
        self.asked = buddy >= 0  # not a copy; a copy is asked when its server has died
        self.clock = 0  # steps made in this epoch; by them the workers' pushes are counted where the bound is 0
        self.clocks: dict[int, int] = {}  # worker -> its pushes in this epoch
        self.held: list[Held] = []
        self._pushed: list[tuple[int, float, Any]] = []  # since the last step: worker, share, gradients
        self._rows = 0.0  # batches whose gradients have come and are in no step
        self._configured = (0, 0)

    def begin(self, epoch: int) -> None:
        """Workers have met, and count anew."""
        if epoch > self.epoch:
            self.epoch, self.clocks, self.clock = epoch, {}, 0

    def push(self, worker: int, said: Any, body: np.ndarray) -> int:
        """Take a worker's gradients, once: how much older their weights are than ours, in steps; -1: left out."""
        clock, cut = int(said["clock"]), len(body) - int(said["settings"])
        if clock <= self.clocks.get(worker, 0):  # heard from a server that has died since
            return 0
        self.clocks[worker] = clock
        if cut < len(body) and (self.epoch, clock) >= self._configured:
            self.holder.configure(body[cut:].tobytes())
            self._configured = (self.epoch, clock)
        if self.bound == 0 and clock <= self.clock:
            return -1
        self._pushed.append((worker, float(said["share"]), self.holder.read(body[:cut])))
        self._rows += float(said["share"])
        return self.version - int(said["version"])

    def due(self, present: set[int]) -> bool:
        """Whether a step is to be made."""
        if not self._pushed:
            return False
        if self.bound:
            return self._rows > 1 - 1e-6
        ready = sum(self.clocks.get(worker, 0) > self.clock for worker in present)
        return ready >= max(1, len(present) - self.backup)

    def turn(self) -> None:
        """Make a step of what was pushed."""
        if self._pushed:
            self.holder.step([pushed[1:] for pushed in sorted(self._pushed, key=lambda pushed: pushed[0])])
            self._pushed, self._rows = [], max(0.0, self._rows - 1) if self.bound else 0.0
            self.version, self.clock = self.version + 1, self.clock + 1

    def drop(self) -> None:
        """What was pushed since the last step is left out, and nobody waits for it."""
        self._pushed, self._rows = [], 0.0
        for held in self.held:
            held.stale = -1

    def unfinished(self) -> bool:
        """Whether something was pushed that is in no step."""
        return bool(self._pushed)

    def may_go_on(self, held: Held, present: set[int]) -> bool:
        """Whether a worker has waited enough."""
        if held.worker not in present or held.stale < 0:
            return True
        if not self.bound:
            return held.clock <= self.clock
        return all(self.clocks.get(worker, 0) >= held.clock - self.bound for worker in present)


class Server:
    """One server, until all workers are through."""

    def __init__(self, mail: Mail, workers: list[int], servers: list[int], bound: int, backup: int,
                 hold: Callable[[bytes], Holder]) -> None:
        self.mail, self.bound, self.backup, self._hold = mail, bound, backup, hold
        self.ears = {rank: Ear(mail, rank) for rank in (*workers, *servers) if rank != mail.comm.rank}
        self.workers = set(workers)  # the living
        self.parts: dict[tuple[int, int], Part] = {}
        self.epoch = 0
        self.away: set[int] = set()
        self.learnt: dict[int, int] = {}  # worker -> how many of its batches have come
        self.pushes, self.steps, self.left_out, self.busy = 0, 0, 0, 0.0

    def run(self, over: Callable[[], bool]) -> None:
        """Serve until it is ``over``."""
        looked, idle = time.monotonic(), 0
        while True:
            began = time.perf_counter()
            worked = False
            for source in list(self.ears):
                worked |= self._listen(source)
            worked |= self._answer()
            now = time.monotonic()
            if now - looked > _LOOK:
                looked = now
                if over():
                    self.mail.flush()
                    return
            if worked:
                idle = 0
                self.busy += time.perf_counter() - began
                continue
            idle += 1
            os.sched_yield()
            time.sleep(2e-5 if idle < 2000 else 5e-4)

    def _listen(self, source: int) -> bool:
        try:
            message = self.ears[source].hear()
        except Gone:
            self._lost(source)
            return True
        if message is not None:
            self._take(source, message)
        return message is not None

    def _take(self, source: int, message: Message) -> None:
        said, body = message
        kind, key = int(said["kind"]), (int(said["number"]), int(said["shard"]))
        if kind == SET:
            self._set(source, key, said, body)
        elif kind == PUSH:
            self._begin(int(said["epoch"]))
            self.away.discard(source)
            self.parts[key].asked = True
            self._push(source, self.parts[key], said, body)
        elif kind == GET:
            part = self.parts[key]
            part.asked = True
            if part.unfinished():
                self._turn(part)
            self._send(source, head(ANSWER, number=key[0], shard=key[1], version=part.version),
                       part.holder.everything())
        elif kind == AWAY and int(said["epoch"]) >= self.epoch:
            self._begin(int(said["epoch"]))
            self.away.add(source)
            self._turn_where_due()
        elif kind == ASK:
            counts = np.array(sorted(self.learnt.items()), np.int64).reshape(-1)
            self._send(source, head(ANSWER, number=key[0], shard=key[1]), counts.view(np.uint8))
        elif kind == COPY:
            self.parts[key].begin(int(said["epoch"]))
            self.parts[key].push(int(said["who"]), said, body)
        elif kind == TURN:
            self.parts[key].turn()
        elif kind == DROP:
            self.parts[key].drop()

    def _set(self, source: int, key: tuple[int, int], said: Any, body: np.ndarray) -> None:
        """A part to hold from now on."""
        self._begin(int(said["epoch"]))
        try:
            holder = self._hold(body.tobytes())
        except Exception as error:  # whatever a script's optimizer needs, and is not here
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._send(source, head(FAILED, number=key[0], shard=key[1]), np.frombuffer(text.encode(), np.uint8))
            return
        self.parts[key] = Part(key, holder, self.bound, self.backup, int(said["who"]), self.epoch)
        self._send(source, head(ANSWER, number=key[0], shard=key[1]))

    def _begin(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.away = epoch, set()

    def _push(self, source: int, part: Part, said: Any, body: np.ndarray) -> None:
        began = time.perf_counter()
        self.pushes += 1
        part.begin(self.epoch)
        surplus = self._surplus()
        held = Held(source, int(said["clock"]), -1 if surplus else part.push(source, said, body), began)
        self.left_out += held.stale < 0
        self.learnt[source] = max(self.learnt.get(source, 0), int(said["learnt"]))
        if part.buddy >= 0 and not surplus:
            copy = said.copy().reshape(1)
            copy["kind"], copy["who"] = COPY, source
            held.relay = self._send(part.buddy, copy, body)
        part.held.append(held)
        if part.due(self._present()):
            self._turn(part)
        held.served = time.perf_counter() - began

    def _turn(self, part: Part) -> None:
        part.turn()
        self.steps += 1
        if part.buddy >= 0:
            self._send(part.buddy, head(TURN, number=part.key[0], shard=part.key[1]))

    def _turn_where_due(self) -> None:
        for part in self.parts.values():
            if part.asked and part.unfinished() and self._surplus():
                part.drop()
                if part.buddy >= 0:
                    self._send(part.buddy, head(DROP, number=part.key[0], shard=part.key[1]))
            elif part.asked and part.due(self._present()):
                self._turn(part)

    def _surplus(self) -> bool:
        """Whether only those workers have not gone elsewhere for whom no step waits."""
        present = self._present()
        return self.bound == 0 and 0 < len(present) <= self.backup and present != self.workers

    def _present(self) -> set[int]:
        return self.workers - self.away

    def _answer(self) -> bool:
        """Answer who may go on; whether there was anybody."""
        found = False
        present = self._present()
        for part in self.parts.values():
            for held in list(part.held):
                if part.may_go_on(held, present) and self._known(part, held):
                    part.held.remove(held)
                    found = True
                    waited = time.perf_counter() - held.began
                    self._send(held.worker, head(
                        ANSWER, number=part.key[0], shard=part.key[1], version=part.version, stale=held.stale,
                        clock=part.clock if not self.bound else held.clock, served=held.served,
                        held=waited - held.served), part.holder.weights())
        return found

    def _known(self, part: Part, held: Held) -> bool:
        """Whether the buddy knows of this push."""
        try:
            return held.relay is None or part.buddy < 0 or held.relay.through()
        except Gone:
            part.buddy = -1
            return True

    def _send(self, to: int, said: np.ndarray, body: np.ndarray = NOTHING) -> Sent | None:
        try:
            return self.mail.send(to, said, body)
        except Gone:
            self._lost(to)
            return None

    def _lost(self, rank: int) -> None:
        """A rank has died: nobody waits for it."""
        self.ears.pop(rank, None)
        self.workers.discard(rank)
        for part in self.parts.values():
            part.held = [held for held in part.held if held.worker != rank]
            part.buddy = -1 if part.buddy == rank else part.buddy
        self._turn_where_due()
