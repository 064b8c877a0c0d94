"""The supervisor: starts the ranks, shows the voice, watches for the end, and leaves no process behind.

It never talks to ranks but through the run folder: ``pid-<r>`` says that a rank is there, ``exit-<r>.json`` how its
script ended, ``error-<r>.json`` with what traceback, ``interrupted-<r>`` that it took a Ctrl-C. Ranks live in a
session of their own, so that the terminal's Ctrl-C reaches only this process, which decides.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.adapt.files import library
from oars.cluster import launchers
from oars.hosts.hub import HUB, Hub
from oars.hosts.kill_all import kill_all
from oars.hosts.lookout import write_addresses
from oars.hosts.partition import Sides
from oars.hosts.reach import Reach, lost_host, missing_hosts, not_started
from oars.plan import Plan, error_file
from oars.rank import crash
from oars.rank.stdin import VARIABLE as STDIN_VARIABLE
from oars.rank.stdin import StdinServer
from oars.runfolder import CutOff, UsageError
from oars.supervisor import launch, stage, stall
from oars.supervisor.closing import clear_marks
from oars.supervisor.screen import Screen
from oars.supervisor.snapshot_requests import Asking, take_lock

POLL = 0.02  # seconds between looks at the voice's output while it prints: ranks may need every core we would use
LOOK = 0.1  # and while it is silent; also between looks at all else
SILENT = 0.5
OTHERS_MAY_FAIL_TOO = 1.0  # after the first failure: ranks that fail alike get to say so, the voice above all
ALL_GONE = 4.0  # after the first failure
TAKES_CTRL_C = 3.0  # by then every rank has raised KeyboardInterrupt, or is killed
SAVES_AFTER_CTRL_C = 30.0  # from the first rank's end to the last's: the voice may be writing what the user wants kept
TERM_TO_KILL = 2.0
ALL_LEFT = 1.0  # after the last rank's end: mpirun may wait for those of a dead host, or for some that never joined
STARTS = 3  # how often ranks are started when some die before the script has begun


class Supervisor:
    """One run, from the first process to the last."""

    def __init__(self, folder: Path, plan: Plan, show: bool = True, quiet: bool = False,
                 lock: int | None = None) -> None:
        self.folder, self.plan, self.ranks = folder, plan, plan.ranks
        self.screen = Screen(folder, show, quiet, plan.one_stream, resumed=bool(plan.resume))
        self.reach = Reach(folder)
        self.stall = stall.Watch(folder, plan, self.screen, self.reach)
        self.sides = Sides(folder, plan, self.screen.say, self.reach)
        self.snapshots = Asking(folder, plan, self.screen)
        self.signals: list[int] = []
        self.stopped_by: int | None = None
        self.first_failure: float | None = None
        self.seen: set[str] = set()
        self.begun = False  # a rank has come to the script's first line, so all know each other
        self.stdin: StdinServer | None = None
        self.process: subprocess.Popen | None = None
        self.place = tempfile.mkdtemp(prefix="oars-")  # sockets; only this user can enter it
        self.started_at = 0.0
        self.missing = ""  # hosts, and how they were missed
        self.left: float | None = None  # when all ranks were seen to have left
        self.cut_off = False  # this run folder may be another's by now
        self.lock = take_lock(folder) if lock is None else lock

    def run(self) -> int:
        """Run to the end and return the exit code; errors have been shown, the closing line has not."""
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = {number: signal.signal(number, lambda got, frame: self.signals.append(got)) for number in caught}
        try:
            for _ in range(STARTS):
                self._start()
                if not self._watch():
                    break
            self.screen.update(to_the_end=True)
            self.screen.erase()
            if full(self.folder):
                self.screen.say(f"the disk is full: what ranks printed and measured may be cut short in {self.folder}")
            return self._verdict()
        except BrokenPipeError:  # nobody reads our output any more: as `python train.py | head` ends
            self._kill_all()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
        except BaseException as error:
            self.cut_off = isinstance(error, CutOff)
            if self.cut_off:  # at once: the others wait no longer than they must
                kill_all(self.folder.resolve())
            self._kill_all()
            raise
        finally:
            if self.stdin is not None:
                self.stdin.close()
            shutil.rmtree(self.place, ignore_errors=True)
            stage.clear(self.plan)
            if not self.cut_off:
                stage.wait_for_others(self.folder)
                self.stall.close()
                clear_marks(self.folder)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self.lock)

    def _start(self) -> None:
        env = launch.rank_environment(self.folder, self.plan)
        python, preload = (stage.staged(self.plan, path) for path in (sys.executable, library.PATH))
        preloading, program = library.before_rank(self.plan, preload), launchers.rank_command(python)
        stage.environment(self.plan, env)
        if self.ranks == 1:
            err_name = error_file(0, self.plan)
            with open(self.folder / runfolder.log(0), "ab") as out, open(self.folder / err_name, "ab") as err:
                self.process = _popen([*preloading, *program], stdout=out, stderr=err, env=env)
            return
        self.stall.start()
        if self.stdin is None:
            self.stdin = StdinServer(self.place)
        env[STDIN_VARIABLE] = self.stdin.path
        if self.plan.hosts:
            write_addresses(self.folder)
            if self.reach.hub is None:
                self.reach.hub = Hub(self.place)
            env[HUB] = self.reach.hub.path
        command = [*launch.start_command(self.plan, env, self.place), *launch.handing_on(self.plan, preloading)]
        self.started_at = time.monotonic()
        with open(self.folder / runfolder.MPIRUN_LOG, "ab") as log:
            self.process = _popen([*command, *program], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                  env=env)

    def _watch(self) -> bool:
        """Until the ranks are gone: show the voice, look for failures, obey signals. Should they be started again?"""
        assert self.process is not None
        interrupted_at: float | None = None
        looked_at = spoke_at = 0.0
        look_every = min(LOOK, self.stall.every / 8)
        wake: list[Any] = [self.stdin.socket] if self.stdin is not None else []
        end = _pidfd(self.process.pid)
        if end is not None:
            wake.append(end)
        while self.process.poll() is None:
            ready, _, _ = select.select(wake, [], [], POLL if time.monotonic() - spoke_at < SILENT else look_every)
            if self.stdin is not None and self.stdin.socket in ready:
                self.stdin.serve()
            now = time.monotonic()
            if self.screen.update():
                spoke_at = now
            if now - looked_at < look_every and not self.signals:
                continue
            looked_at = now
            self._look()
            self.sides.look(now, self.seen)
            while self.signals:
                number = self.signals.pop(0)
                if runfolder.handles(int(number)) in self.seen and self._pass_on(number):
                    continue
                if number == signal.SIGUSR1:
                    if not self.snapshots.ask(stop=False):
                        self.screen.say("no snapshot yet: the script has made no optimizer step")
                    continue
                if number == signal.SIGTERM and self.snapshots.leaving is None and self.snapshots.ask(stop=True):
                    self.stopped_by = number
                    continue
                if number != signal.SIGINT or interrupted_at is not None or not self._all(runfolder.pid):
                    self.stopped_by = self.stopped_by or number
                    return self._kill_all()
                interrupted_at, self.stopped_by = now, number
                self._interrupt()
            if self.snapshots.answered(now, self.seen):
                return self._kill_all()
            if interrupted_at and now - interrupted_at > TAKES_CTRL_C and not self._all(runfolder.interrupted):
                return self._kill_all()
            if self._failed_for(now) or self.stall.look(now, self.seen):
                return self._kill_all()
            if self._died_at_start():
                return self._start_over()
            if self._never_came(now):
                return self._kill_all()
            if self._all_left(now):
                self._kill_all()
                break
        if end is not None:
            os.close(end)
        self._look()
        return self._died_at_start() and not self.stopped_by and not _errors(self.folder, self.seen) \
            and self._start_over()

    def _died_at_start(self) -> bool:
        """Whether a rank died before all ranks knew each other; the others may then wait for it for ever."""
        self.begun = self.begun or any(name.startswith(runfolder.pid("")) for name in self.seen)
        if self.ranks == 1 or not self.plan.survives or self.begun:
            return False
        if all(_alive(self.folder / name) for name in self.seen if name.startswith(runfolder.born(""))) and not any(
                name.startswith(runfolder.dead("")) for name in self.seen):
            return False
        seen = os.listdir(self.folder)  # looked at after the death
        self.begun = any(name.startswith(runfolder.pid("")) for name in seen)
        return not self.begun

    def _never_came(self, now: float) -> bool:
        """Whether a host is missing, and the ranks of the others would wait for it for ever."""
        if self.plan.hosts and not self.begun:
            self.missing = missing_hosts(self.plan.hosts, self.seen, now - self.started_at)
        return bool(self.missing)

    def _all_left(self, now: float) -> bool:
        """Whether all living ranks have left, but mpirun waits: for those of a dead host, for some who never joined."""
        if self.ranks == 1 or not self._all(runfolder.left):
            return False
        self.left = self.left or now
        return now - self.left > ALL_LEFT

    def _start_over(self) -> bool:
        """Nothing of the script has run: begin again."""
        self._kill_all()
        for name in os.listdir(self.folder):
            if re.match(r"(born|pid|dead)-\d+$|(orders|answer|gone|dark|at|ended)-|rank-\d+\.(log|err)$", name) \
                    and not (self.plan.resume and name.startswith("rank")):  # a resumed run's files go on
                os.unlink(self.folder / name)
        self.screen.begin()
        self.screen.say("a rank died while the ranks were starting: they are started again")
        return True

    def _look(self) -> None:
        """What ranks have left in the run folder; if the voice is lost, follow the next."""
        self.seen = set(os.listdir(self.folder))
        if self.screen.voice not in (living := self._living()) and living:
            self.screen.follow(living[0])

    def _all(self, mark: Callable[[int], str]) -> bool:
        return all(mark(rank) in self.seen for rank in self._living())

    def _living(self) -> list[int]:
        """The ranks that nobody has called lost, those that have joined too."""
        joined = sorted(int(name[7:]) for name in self.seen if name.startswith(runfolder.joined("")))
        return [rank for rank in (*range(self.ranks), *joined) if runfolder.lost(rank) not in self.seen]

    def _failed_for(self, now: float) -> bool:
        """Whether a rank has failed long enough ago that the others must go."""
        if self.ranks == 1:
            return False
        raised = any(name.startswith("error-") for name in self.seen)
        if self.first_failure is None:
            if raised or any(_exits(self.folder, self.seen).values()):
                self.first_failure = now
            return False
        grace = OTHERS_MAY_FAIL_TOO if raised and not self._all(runfolder.exit_file) else ALL_GONE
        if self._all(runfolder.interrupted) and not raised:
            grace = SAVES_AFTER_CTRL_C
        return now - self.first_failure > grace

    def _pass_on(self, number: int) -> bool:
        """To the voice, where the script has a handler: it decides. All ranks get it from there (see signals.py)."""
        if number == signal.SIGTERM:
            self.snapshots.ask(stop=False)
        try:
            host, pid = json.loads((self.folder / runfolder.born(self._living()[0])).read_text())
            self.reach.kill(host, pid, number)
        except (OSError, ValueError, IndexError):
            return False
        return True

    def _interrupt(self) -> None:
        for rank in self._living():
            try:
                host, pid = json.loads((self.folder / runfolder.born(rank)).read_text())
                self.reach.kill(host, pid, signal.SIGINT)
            except (OSError, ValueError):
                pass

    def _kill_all(self) -> bool:
        """No process of this run is left when this returns (False: nor is one to be started)."""
        process = self.process
        if process is not None and process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + TERM_TO_KILL
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL)
            if process.poll() is None:
                process.kill()
                process.wait()
        kill_all(self.folder.resolve())
        return False

    def _verdict(self) -> int:
        """The exit code, having said why."""
        assert self.process is not None
        seen = self.seen = set(os.listdir(self.folder))
        exits, errors = _exits(self.folder, seen), _errors(self.folder, seen)
        living = self._living()
        for error in errors.values():
            if "usage" in error:
                raise UsageError(error["usage"])
        if self.stopped_by == signal.SIGTERM or self.stall.aborted:
            self.snapshots.say_kept()
        if self.stall.aborted:
            return stall.ABORTED
        codes = {rank: code for rank, code in exits.items() if rank in living}
        orderly = len(codes) == len(living) > 0 and (self.process.returncode in (0, exits.get(0)) or bool(self.left))
        if not orderly:
            kill_all(self.folder.resolve())
        if self.stopped_by and (not orderly or self.stopped_by != signal.SIGINT):
            return 128 + self.stopped_by
        if errors:
            self._show_error(errors)
            return exits.get(min(errors), 1) or 1
        if orderly and not any(codes.values()):
            return 0
        if orderly and codes[living[0]]:
            return codes[living[0]]
        return self._explain(codes, seen)

    def _show_error(self, errors: dict[int, dict[str, Any]]) -> None:
        """A traceback, once: the voice's own is on the screen already."""
        rank = min(errors)
        if rank != 0 or not self.screen.show:
            self.screen.say(f"rank {rank} of {self.ranks} failed:" if self.ranks > 1 else "the script failed:")
            self.screen.write(2, errors[rank]["text"].encode())
        elif self.ranks > 1:
            self.screen.say(f"rank 0 of {self.ranks} failed")

    def _explain(self, exits: dict[int, int], seen: set[str]) -> int:
        """A rank died without a word, or with a code of its own: which, and how."""
        assert self.process is not None
        code = self.process.returncode
        of = f" of {self.ranks}" if self.ranks > 1 else ""
        failures = [(code, rank) for rank, code in exits.items() if code]
        if failures:
            code, rank = failures[0]
            self.screen.say(f"rank {rank}{of} exited with code {code}")
            return code
        log = _read(self.folder / runfolder.MPIRUN_LOG)
        killed = re.search(r"process rank (\d+)\b.*?on\s+signal\s+(\d+)", log, re.S)
        lost = lost_host(log)
        if self.plan.launcher == "srun" and (death := launchers.srun_says(log)):
            self.screen.say(f"srun says: {death[0]}")
            self.snapshots.say_kept()
            return death[1] or code or 1
        if lost:
            self.screen.say(f"{lost} was lost, with all ranks on it")
            self.snapshots.say_kept()
            return stall.ABORTED
        if self.plan.hosts and (why := not_started(log)):
            raise UsageError(f"{why}; all hosts must reach each other, and see {self.folder.resolve()}")
        if self.ranks == 1 and code < 0:
            rank, number = 0, -code
        elif killed:
            rank, number = int(killed[1]), int(killed[2])
        elif crashed := _crashed(self.folder, seen):
            rank, number = crashed
        elif self.missing:
            self.screen.say(f"{self.missing}, see {self.folder}/mpirun.log")
            return stall.ABORTED
        elif self.ranks > 1 and not any(name.startswith(runfolder.pid("")) for name in seen):
            self.screen.say("the ranks did not start; the last lines of mpirun and of rank 0:")
            last = (log + _read(self.folder / error_file(0, self.plan))).splitlines()[-20:]
            self.screen.write(2, "".join(line + "\n" for line in last).encode())
            return code or 1
        else:
            if runfolder.GROWING in seen:
                self.screen.say("a rank died while new ranks joined, and MPI hung on the others: continue with "
                                f"oars resume {self.folder.name}")
                return code or 1
            missing = [rank for rank in range(self.ranks) if rank not in exits]
            rank = missing[0] if missing else 0
            self.screen.say(f"rank {rank}{of} ended without a message (exit code {code}), see {self.folder}/mpirun.log")
            return code or 1
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        self.screen.say(f"rank {rank}{of} was killed by {name}")
        self.snapshots.say_kept()
        return 128 + number


def _crashed(folder: Path, seen: set[str]) -> tuple[int, int] | None:
    """The first rank that died of a signal of its own making, and which, as Python wrote it down."""
    mark = runfolder.fatal("")
    for rank in sorted(int(name[len(mark):]) for name in seen if name.startswith(mark)):
        number = crash.signal_of(folder, rank)
        if number is not None and runfolder.exit_file(rank) not in seen:
            return rank, number
    return None


def full(folder: Path) -> bool:
    """Whether there is no room for another line."""
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize < 65536


def _alive(pid_file: Path) -> bool:
    """Whether the process that wrote its number here is there; one on another host is taken to be."""
    try:
        host, pid = json.loads(pid_file.read_text())
        return host != socket.gethostname() or _state(pid) not in ("Z", "X", "")
    except (OSError, ValueError):
        return True  # being written


def _state(pid: int) -> str:
    """The kernel's letter for a process's state, an empty string if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def _popen(command: list[str], **how: Any) -> subprocess.Popen:
    """A child in a session of its own, that ends when this process is killed."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_parent(), **how)


def _die_with_parent() -> Any:
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        return lambda: prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
    except (ImportError, OSError, AttributeError):
        return None


def _pidfd(pid: int) -> int | None:
    """A descriptor that wakes ``select`` when the process ends, where the system has such."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _exits(folder: Path, seen: set[str]) -> dict[int, int]:
    return {rank: int(found["code"]) for rank, found in _written(folder, seen, "exit").items()}


def _errors(folder: Path, seen: set[str]) -> dict[int, dict[str, Any]]:
    return _written(folder, seen, "error")


def _written(folder: Path, seen: set[str], kind: str) -> dict[int, dict[str, Any]]:
    """What ranks wrote down about their end, by rank."""
    found = {}
    for name in seen:
        match = re.fullmatch(kind + r"-(\d+)\.json", name)
        if match:
            found[int(match[1])] = json.loads((folder / name).read_text())
    return dict(sorted(found.items()))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
