"""What a rank does when others die: takes over as the voice if it is its turn, and leaves together with the living."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from oars import runfolder
from oars.adapt import files
from oars.adapt.python import trackers
from oars.engine import Astray
from oars.plan import Plan
from oars.rank.record import Record
from oars.rank.stdin import take_stdin

if TYPE_CHECKING:
    from oars.engine.world import World


class Survivor:
    """One rank's part in outliving others."""

    def __init__(self, folder: Path, plan: Plan, world: World, record: Record, stdin: str) -> None:
        self.folder, self.plan, self.world, self.record, self.stdin = folder, plan, world, record, stdin
        self._servers = list(world.servers)  # as they were at the start
        world.on_loss.append(self.lost)
        if world.era:
            self._tell(sorted(self._dead(world.members)), "start", world.members)

    def lost(self, gone: list[int], phase: str) -> None:
        """Ranks ``gone`` died; called on every survivor, in the middle of the script's work."""
        if self.world.waits_to_join:  # of ranks that were to join others together, so these will not
            os.kill(os.getpid(), signal.SIGKILL)
        if self.world.rank == 0:
            self.take_over()
        self._tell(gone, phase, self.world.members)

    def take_over(self) -> None:
        """This is the first rank now: its files and its output are the run's."""
        if self.record.voice:
            return
        if self.plan.stop_after is None and not self.record.played:  # then no rank's files are real
            files.promote()
        self.record.become_voice()
        if names := trackers.of_a_new_voice():
            self.record.notice(f"the rank that logged to a tracker's server has died; from now on {names}")
        try:
            take_stdin(self.stdin)
        except OSError:  # nobody serves it any more: the run is ending
            pass

    def leave(self) -> None:
        """The script has ended here. Wait until it has everywhere, so that nobody takes this rank's end for a death."""
        self.record.close()
        self.world.board.enter("end")
        reported: set[int] = set()
        while True:
            with contextlib.suppress(Exception, Astray):  # it is theirs: here the script has ended
                self.world.answer()
            fallen = self.world.fallen()  # those who left in good order too
            dead = {m for m in fallen if not self._ended(m)}
            living = [m for m in self.world.members if m not in dead]
            self._look_at_servers()
            summary = (self.folder / runfolder.SUMMARY).exists()  # the voice's last word
            first = next(m for m in self.world.members if m not in fallen)
            if not summary and first == self.world.origin and not self.record.voice:
                self.take_over()
                self.record.close()
            if new := sorted(dead - reported):
                reported |= dead
                self._tell(new, "end", living)
                self.record.close()
            if all(map(self._ended, living)) and summary:
                return
            time.sleep(0.002)

    def _look_at_servers(self) -> None:
        """Report one that has died unnoticed."""
        if self.world.servers:
            star = self.world.star
            failed = star.Get_failed()
            ranks = failed.Translate_ranks(list(range(failed.size)), star.Get_group())
            dead = [rank for rank in self.world.servers if rank in ranks and not self._ended(rank)]
            if dead:
                self.world.servers = [rank for rank in self.world.servers if rank not in dead]
                self._tell(dead, "end", self.world.members)
                self.record.close()

    def _ended(self, rank: int) -> bool:
        return (self.folder / runfolder.exit_file(rank)).exists()

    def _dead(self, living: list[int]) -> set[int]:
        known = {*self.world.node_of, *self.world.servers, *self._servers}
        return set(range(max(known) + 1)) - set(living) - set(self.world.servers)

    def _tell(self, gone: list[int], phase: str, living: list[int]) -> None:
        self.record.lost(gone, [self.world.hosts.get(r, "?") for r in gone], phase,
                         len(living) + len(self.world.servers))
        if self.record.voice:
            for rank in self._dead(living):  # all: whoever had to say it before may be dead too
                os.close(os.open(self.folder / runfolder.lost(rank), os.O_WRONLY | os.O_CREAT, 0o666))
