"""How the tests start things: the environment, ``oars`` and ``python`` as commands, and a run that can be watched.

Every test takes these from here, so that all start ranks in the same way. ``environment`` is read when something is
started: what a test sets with ``monkeypatch.setenv`` holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS, EXAMPLES = ROOT / "tests", ROOT / "examples"
SOURCE = str(ROOT / "src")
ARMED = str(TESTS / "chaos" / "armed")  # its sitecustomize kills ranks at named points
OARS = [sys.executable, "-m", "oars"]
# One thread, as a rank on a small machine has; no GPU; and TensorFlow logs its process id unless it is silenced.
STEADY = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
          "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}


def environment(**more: str) -> dict[str, str]:
    """This process's, with the checkout on the path; armed if ``more`` has deaths or delays in it."""
    armed = [ARMED] if any(name.startswith("OARS_TEST_") for name in more) else []
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", SOURCE, ARMED)]
    path = os.pathsep.join([*armed, SOURCE, *given])
    return {**os.environ, **STEADY, "PYTHONPATH": path, **more}


def finished(folder: Path, *command: object, code: int | None = None, timeout: float = 120,
             **env: str) -> subprocess.CompletedProcess:
    """A command that has ended; with this exit code, if one is given."""
    done = subprocess.run([str(word) for word in command], cwd=folder, env=environment(**env), capture_output=True,
                          text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


def oars(folder: Path, *args: object, code: int | None = None, timeout: float = 120,
         **env: str) -> subprocess.CompletedProcess:
    """``oars`` with these arguments, which has ended."""
    return finished(folder, *OARS, *args, code=code, timeout=timeout, **env)


def said(folder: Path, *args: object, code: int = 0, timeout: float = 300, **env: str) -> str:
    """What ``oars`` prints on a screen of 100 columns; with another exit code than 0, on stderr."""
    done = oars(folder, *args, code=code, timeout=timeout, **{"COLUMNS": "100", **env})
    return done.stdout if code == 0 else done.stderr


def python(folder: Path, *args: object, timeout: float = 300, **env: str) -> list[str]:
    """The lines that plain Python prints."""
    return finished(folder, sys.executable, *args, code=0, timeout=timeout, **env).stdout.splitlines()


def start(folder: Path, *args: object, **env: str) -> subprocess.Popen[str]:
    """``oars`` with these arguments, in the background."""
    return subprocess.Popen([*OARS, *map(str, args)], cwd=folder, env=environment(**env), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


class Run:
    """``oars run --name it`` with these words (or another ``command``), in the background until its end is asked for.

    ``cwd`` is where it was started and ``folder`` its run folder. ``code``, ``out`` and ``lines`` wait for the end;
    ``err`` is what it has said so far.
    """

    def __init__(self, cwd: Path, *words: object, name: str = "it", command: list[str] | None = None,
                 limit: float = 280, stdin: int = subprocess.DEVNULL, deaths: object = None, **env: str) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self.cwd, self.folder, self.limit = cwd, cwd / "oars-runs" / name, limit
        self.command = [*(command or [*OARS, "run", "--name", name]), *map(str, words)]
        if deaths is not None:
            env["OARS_TEST_DEATHS"] = json.dumps(deaths)
        self._err = tempfile.TemporaryFile()
        self._out: str | None = None
        self._stopped = ""
        self.process = subprocess.Popen(self.command, cwd=cwd, env=environment(**env), text=True,
                                        errors="replace", stdin=stdin, stdout=subprocess.PIPE, stderr=self._err,
                                        start_new_session=True)

    def __str__(self) -> str:
        return "\n".join([" ".join(self.command), f"exit code {self.code}", *self.err.splitlines()[-25:]])

    def end(self, answer: str | None = None) -> int:
        """Wait until it ends, with this answer on its stdin; its exit code. What hangs is stopped."""
        if self._out is not None:
            return self.process.returncode
        try:
            self._out, _ = self.process.communicate(answer, timeout=self.limit)
        except subprocess.TimeoutExpired:
            self._stopped = f"\n(stopped after {self.limit} s)"
            self.process.terminate()  # the launcher ends its ranks
            try:
                self._out, _ = self.process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self._out, _ = self.process.communicate()
        return self.process.returncode

    @property
    def code(self) -> int:
        return self.end()

    @property
    def out(self) -> str:
        self.end()
        return self._out or ""

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def err(self) -> str:
        size = os.fstat(self._err.fileno()).st_size
        return os.pread(self._err.fileno(), size, 0).decode(errors="replace") + self._stopped

    def until(self, text: str) -> str:
        """Wait for these words on stderr."""
        deadline = time.time() + 20
        while text not in self.err:
            assert time.time() < deadline and self.process.poll() is None, self.err
            time.sleep(0.05)
        return self.err

    def events(self, kind: str) -> list[dict]:
        path = self.folder / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["event"] == kind]

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_step(self, more: int) -> None:
        """Until so many more steps are done."""
        step = self.steps() + more
        wait_for(lambda: self.steps() >= step, f"step {step}")

    def kill(self, rank: int) -> None:
        os.kill(json.loads((self.folder / f"born-{rank}").read_text())[1], signal.SIGKILL)

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def digests(self) -> dict[int, str]:
        """Of the weights of every rank that came to the end."""
        self.end()
        found = {path: path.stem.rpartition("-")[2] for path in self.folder.glob("weights-digest-*.txt")}
        return {int(rank): path.read_text() for path, rank in found.items()}

    def learnt(self) -> dict[int, int]:
        """How often each sample was learnt from, by a survivor's ledger."""
        times: dict[int, int] = {}
        survivor = next(iter(self.digests()))
        for line in (self.folder / f"ledger-{survivor}.jsonl").read_text().splitlines():
            for sample in json.loads(line)["samples"]:
                times[sample] = times.get(sample, 0) + 1
        return times


def wait_for(true: Callable[[], object], what: str, seconds: float = 300) -> None:
    deadline = time.time() + seconds
    while not true():
        assert time.time() < deadline, f"never: {what}"
        time.sleep(0.02)


def left_behind(folder: Path) -> list[str]:
    """Processes that were started for a run in this folder (of hosts that are this machine: for all of them)."""
    mark, found = f"OARS_RUN_FOLDER={folder}".encode(), []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            pass
    return found
