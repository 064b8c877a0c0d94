"""Where a rank is: its Python stacks and what the kernel says of it, with its help or without.

A rank answers ``SIGNAL`` by writing the stack of every thread to ``stack-<r>.txt`` (faulthandler: in C, so a rank that
holds the GIL, or waits for it, answers too). One that is stopped or stuck in the kernel does not; then py-spy reads its
memory, which takes the right to trace it: root has it; other users have it for their own processes, except where
``kernel.yama.ptrace_scope`` is 1 (Ubuntu), so ranks allow it to the supervisor's children, or 2 or 3, or in a container
without CAP_SYS_PTRACE under an old kernel. Without py-spy there is still ``/proc``.

Why that signal: SIGUSR1 and SIGUSR2 are the script's and the scheduler's, and every other named one means something
already. Real-time signals are sent by nobody; glibc takes the first two, tools like the ends of the range, so one from
the middle. Unhandled it would kill, so it is only sent to a process whose kernel entry says that it is caught.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from oars import runfolder

SIGNAL = signal.SIGRTMIN + 13 if hasattr(signal, "SIGRTMIN") else None
ANSWERS_WITHIN = 2.0
WRITTEN_WITHIN = 0.2  # an answer that has not grown for so long is whole
PY_SPY_WITHIN = 10.0
LIBRARIES = (str(Path(__file__).resolve().parents[1]) + os.sep,  # oars/
             *(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib")))


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        short = self.file
        for folder in (os.getcwd() + os.sep, *LIBRARIES):
            short = short.removeprefix(folder)
        return f"{short}:{self.line} in {self.name}" + (f": {code[:80]}" if code else "")


class Look(NamedTuple):
    """One process, as it was found."""

    state: str  # the kernel's letter (R, S, D, T, t, Z), or "" if there is no such process
    channel: str  # what it waits for in the kernel, if that is known
    busy: float  # how much of a core it and its children used while being looked at
    how: str  # how its stacks were taken
    stacks: str


class Spent(NamedTuple):
    """What a process and its children have used up so far: signs of life."""

    cpu: float  # seconds
    io: int  # bytes


def answer(folder: Path, rank: int, supervisor: int) -> None:
    """In a rank: from now on it says where it is when asked, and the supervisor's children may look for themselves."""
    if SIGNAL is None:
        return
    file = os.open(folder / runfolder.stack(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    faulthandler.register(SIGNAL, file, all_threads=True)
    try:
        import ctypes

        ctypes.CDLL(None).prctl(0x59616D61, supervisor, 0, 0, 0)  # PR_SET_PTRACER; where there is no Yama it fails
    except (ImportError, OSError, AttributeError):
        pass


def look(folder: Path, pids: dict[int, int]) -> dict[int, Look]:
    """Look at these ranks' processes (rank to pid, on this host); takes half a second, and longer if some are stuck."""
    began, before = time.monotonic(), spent(pids.values())
    starts = {rank: _size(folder, rank) for rank in pids}
    asked = {rank for rank, pid in pids.items() if state(pid) not in ("T", "t", "Z", "") and _ask(pid)}
    stacks = _answers(folder, {rank: starts[rank] for rank in asked})
    found = {}
    for rank, pid in pids.items():
        text, how = stacks.get(rank, ""), "by itself"
        if not text:
            text, how = _spied(pid)
        found[rank] = (state(pid), _kernel(pid, "wchan"), how, text)
    time.sleep(max(0.0, began + 0.5 - time.monotonic()))  # CPU time is counted in hundredths of a second
    after, took = spent(pids.values()), time.monotonic() - began
    return {rank: Look(letter, "" if channel == "0" else channel, (after[pid].cpu - before[pid].cpu) / took, how, text)
            for (rank, pid), (letter, channel, how, text) in zip(pids.items(), found.values(), strict=True)}


def script_frames(stacks: str) -> list[Frame]:
    """The main thread's frames in the user's code, the most recent first; of all frames where none is the user's."""
    frames = _main_thread(stacks)
    own = [frame for frame in frames if not frame.file.startswith((*LIBRARIES, "<"))
           and "site-packages" not in frame.file and "dist-packages" not in frame.file]
    return own or frames


def innermost(stacks: str) -> Frame | None:
    """Where the main thread is, in any code but ours: what we have put around a function is not where it waits."""
    frames = _main_thread(stacks)
    return next((frame for frame in frames if not frame.file.startswith(LIBRARIES[0])), frames[0] if frames else None)


def _main_thread(stacks: str) -> list[Frame]:
    threads = re.split(r"^(?=Current thread |Thread )", stacks, flags=re.M)
    ours = [text for text in threads if re.search(r'oars/rank/\w+\.py", line \d+ in (run_script|main)$', text, re.M)]
    return [Frame(file, int(line), name) for file, line, name in
            re.findall(r'^  File "(.*)", line (\d+) in (.*)$', (ours or threads)[-1], re.M)]


def state(pid: int) -> str:
    """The kernel's letter for a process, or nothing."""
    found = re.search(r"^State:\s+(\w)", _kernel(pid, "status"), re.M)
    return found[1] if found else ""


def spent(pids: Iterable[int]) -> dict[int, Spent]:
    """CPU time and bytes of each of these processes and its descendants."""
    table: dict[int, tuple[int, float]] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        fields = _kernel(int(name), "stat").rpartition(")")[2].split() if name.isdigit() else []
        if fields:
            table[int(name)] = int(fields[1]), sum(map(int, fields[11:15])) / tick
    found = {}
    for pid in pids:
        family = [pid]
        for member in family:
            family += [child for child, (parent, _) in table.items() if parent == member]
        io = sum(int(number) for member in family
                 for number in re.findall(r"^(?:[rw]char|read_bytes|write_bytes): (\d+)", _kernel(member, "io"), re.M))
        found[pid] = Spent(sum(table[member][1] for member in family if member in table), io)
    return found


def _ask(pid: int) -> bool:
    """Send the signal, if it is safe."""
    caught = re.search(r"^SigCgt:\s+(\w+)", _kernel(pid, "status"), re.M)
    if SIGNAL is None or caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1:
        return False
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return False
    return True


def _answers(folder: Path, starts: dict[int, int]) -> dict[int, str]:
    """What the ranks asked have written since; those that are silent are left out."""
    deadline = time.monotonic() + ANSWERS_WITHIN
    sizes, quiet_since = dict(starts), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = {rank: _size(folder, rank) for rank in starts}
        if now != sizes:
            sizes, quiet_since = now, time.monotonic()
        elif time.monotonic() - quiet_since > WRITTEN_WITHIN and all(now[rank] > starts[rank] for rank in starts):
            break
    texts = {}
    for rank, start in starts.items():
        with open(folder / runfolder.stack(rank), "rb") as file:
            file.seek(start)
            texts[rank] = file.read().decode(errors="replace")
    return {rank: text for rank, text in texts.items() if text}


def _spied(pid: int) -> tuple[str, str]:
    """A process's stacks without its help, in faulthandler's form, and who took them."""
    py_spy = shutil.which(Path(sys.executable).with_name("py-spy")) or shutil.which("py-spy")
    why = "py-spy is not installed"
    if py_spy:
        try:
            done = subprocess.run([py_spy, "dump", "--pid", str(pid), "--nonblocking", "--json"], capture_output=True,
                                  text=True, timeout=PY_SPY_WITHIN)
            threads = json.loads(done.stdout) if done.returncode == 0 else []
            why = done.stderr.strip().partition("\n")[0]
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            threads, why = [], str(error)
        if threads:
            return "\n".join(
                f'Thread "{thread["thread_name"]}" (most recent call first):\n' +
                "".join(f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}\n'
                        for frame in thread["frames"]) for thread in threads), "by py-spy"
    rest = "".join(f"{name}: {_kernel(pid, name).strip()}\n" for name in ("wchan", "syscall", "stack"))
    return rest, f"by nobody: it did not answer, and {why}"


def _size(folder: Path, rank: int) -> int:
    try:
        return os.stat(folder / runfolder.stack(rank)).st_size
    except OSError:
        return 0


def _kernel(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}") as file:
            return file.read()
    except OSError:
        return ""
