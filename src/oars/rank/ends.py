"""How a rank ends, whichever way the script chooses, and how it is written down for the supervisor."""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import signal
import sys
from pathlib import Path
from time import monotonic, sleep  # as they are now: scripts are given another clock later
from typing import TYPE_CHECKING, Any, NoReturn

from oars import runfolder
from oars.adapt import files
from oars.adapt.replay.tape import Diverged, tape
from oars.engine import Astray
from oars.evolve import NothingToCut
from oars.rank import seams
from oars.rank.record import Record
from oars.rank.script import exit_code, missing_framework, print_error
from oars.rank.survive import Survivor

if TYPE_CHECKING:
    from types import FrameType

    from oars.engine.world import World

TOGETHER_WITHIN = 1.0  # seconds
true_exit = os._exit  # the script's is watched, see ``Ends.watch``


class Ends:
    """How a rank ends, written down for the supervisor, whichever way the script chooses."""

    def __init__(self, folder: Path, rank: int, record: Record, world: World | None, stderr: Path,
                 survivor: Survivor | None) -> None:
        self.folder, self.rank, self.record, self.world, self.survivor = folder, rank, record, world, survivor
        self.pid, self.stderr, self.interrupts = os.getpid(), stderr, 0
        self.joins = world is not None and world.waits_to_join  # a run that was there before it

    def watch(self) -> None:
        """From here on the script may end; tell the supervisor that this rank is there."""
        seams.watch_exit(self.hard_exit)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.interrupt)
        runfolder.reserve(self.folder / runfolder.exit_file(self.rank))
        self._put(runfolder.pid(self.rank), self.pid)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: an adapter that polls raises on all ranks at the same step; else it is raised here and now."""
        if os.getpid() != self.pid:
            raise KeyboardInterrupt
        first, self.interrupts = self.interrupts == 0, self.interrupts + 1
        if self.world is not None and self.record.polls and not self.record.interrupted:
            if not (first and self.record.taken):  # else the others' signals came before ours, and all have stopped
                self.record.interrupted = True
        else:
            self.record.raise_interrupt()

    def failed(self, error: BaseException) -> None:
        """Print the traceback as Python does, and hand it to the supervisor, which shows it if this is no voice."""
        if (tape.playing or isinstance(error, Diverged)) and os.getpid() == self.pid:
            self.diverged(str(error) if isinstance(error, Diverged) else f"it failed, {_last_line(error)}")
        if isinstance(error, NothingToCut) and os.getpid() == self.pid:
            self.refused(str(error))
        if (text := missing_framework(error)) and os.getpid() == self.pid:
            self._put(runfolder.error(self.rank), {"usage": text})
            return
        sys.stderr.flush()
        start = os.fstat(2).st_size
        if isinstance(error, Astray):
            print(error, file=sys.stderr)
        else:
            print_error(error)
        if os.getpid() != self.pid or isinstance(error, KeyboardInterrupt):
            return
        sys.stderr.flush()
        with open(self.stderr, "rb") as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
        self._put(runfolder.error(self.rank), {"text": text})

    def diverged(self, how: str) -> None:
        """A script that is resumed does not go the way it went: nothing has been touched, and this rank ends."""
        if self._waits_to_join():
            self._put(runfolder.stayed(self.rank), f"rank {self.rank} could not follow the script: {how}")
            true_exit(0)
        if self.joins:  # the others go on without it
            print(f"oars: rank {self.rank} joined, and cannot go on: {how}", file=sys.__stderr__, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        text = f"cannot resume {self.folder.name}: "
        text += f"the script does not go the way it went before the snapshot: {how}" if tape.playing else how
        self.refused(text)

    def refused(self, text: str) -> NoReturn:
        """Something that the user can put right ends the run: one line."""
        self._put(runfolder.error(self.rank), {"usage": text})
        true_exit(2)

    def met_the_others(self) -> int:
        """What an adapter has to do when the script has come to its good end; the exit code."""
        if os.getpid() != self.pid:
            return 0
        try:
            self.record.at_end()
        except SystemExit as end:
            return exit_code(end.code)
        except BaseException as error:
            self.failed(error)
            return 130 if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def script_ended(self, code: int) -> None:
        """The script's own code is done; its threads and atexit handlers follow."""
        if os.getpid() != self.pid:
            _leave_child(code)
        self._put(runfolder.exit_file(self.rank), {"code": code})

    def hard_exit(self, code: int) -> None:
        """os._exit: MPI calls it a crash if a rank leaves without a word, Python does not."""
        if os.getpid() == self.pid:
            if self._waits_to_join():
                true_exit(0)
            code = code or self.met_the_others()
            self.record.close()
            self._put(runfolder.exit_file(self.rank), {"code": code & 0xFF, "hard": True})
            files.close()
            if self.survivor is not None and code == 0:
                self.survivor.leave()
                self.left()
                true_exit(0)
            if self.world is not None and code == 0:
                from mpi4py import MPI

                MPI.Finalize()
            if self.world is not None:
                self._let_others_come(self.world)
        true_exit(code)

    def _waits_to_join(self) -> bool:
        return self.joins and self.world is not None and self.world.waits_to_join

    def _let_others_come(self, world: World) -> None:
        """mpirun ends all ranks when one leaves with a code: those that are about to do the same have a moment."""
        files_of_all = [self.folder / runfolder.exit_file(rank) for rank in world.members]
        until = monotonic() + TOGETHER_WITHIN
        while monotonic() < until and not all(path.exists() for path in files_of_all):
            sleep(0.01)

    def last(self) -> None:
        """After the script's atexit handlers."""
        if os.getpid() == self.pid:
            if self.survivor is None:
                self.record.close()
            else:  # without MPI's own end, which may wait for the dead
                _let_go()
                self.survivor.leave()
                self.left()
                true_exit(0)

    def left(self) -> None:
        """Nothing is left to do here, so that the supervisor may end an mpirun that waits for a dead host."""
        self._put(runfolder.left(self.rank), self.pid)

    def _put(self, name: str, value: object) -> None:
        runfolder.put(self.folder / name, json.dumps(value))


def _last_line(error: BaseException) -> str:
    import traceback

    lines = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}: " if lines else ""
    return where + "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")


def _leave_child(code: int) -> None:
    """A child that the script forked came to the script's end: end it as Python would, without touching MPI."""
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _let_go()
    true_exit(code)


def _let_go() -> None:
    """What the script holds at its end goes as at Python's: files that are open are written, ``__del__`` runs."""
    _flush([sys.stdout, sys.stderr])
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if gc.isenabled():
        gc.collect()
    names = sys.modules["__main__"].__dict__
    here = sys._getframe()
    frames = [frame for frame in sys._current_frames().values() if frame is not here]
    if not any(_runs(frame, names) for frame in frames):  # (Python stops threads before)
        for name in sorted(names, key=lambda name: not name.startswith("_")):
            if name != "__builtins__":
                names[name] = None
    gc.collect()
    _flush([each for each in gc.get_objects() if type(each) in _BUFFERED])  # what else holds some: cycles, modules
    _flush([sys.stdout, sys.stderr])


_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def _flush(streams: list[Any]) -> None:
    for stream in streams:
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # there is none, its disk is full, it is closed
            pass


def _runs(frame: FrameType | None, names: dict) -> bool:
    while frame is not None:
        if frame.f_globals is names:
            return True
        frame = frame.f_back
    return False
