"""A C library looks at a file for the first time in a child process.

HDF5 may crash, hang or ask for absurd memory on a damaged file. So the child opens it and tells what is inside, as
JSON; if it dies, that is one line about the file, not the end of the run. The parent never has the file open at that
point, so nothing of the library's is shared with processes that are forked later.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

from oars.data.bad import one_line
from oars.data.errors import DataError

_SECONDS = 120.0
_MEMORY = 4 << 30


def ask(path: str, look: Callable[[str], Any], seconds: float = _SECONDS) -> Any:
    """``look(path)``, done in a child process; its result must be JSON. Errors it raises are reported in one line."""
    get, put = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks beside threads. This child runs h5py alone, and one that hangs is ended.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _answer(path, look, put)
    os.close(put)
    try:
        answer = _listen(get, time.monotonic() + seconds)
    finally:
        os.close(get)
        status = _end(child)
    if answer is None:
        raise DataError(f"{path}: damaged: looking at it took more than {seconds:.0f} s")
    if not answer.endswith(b"\n"):
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        raise DataError(f"{path}: damaged: it crashes the library that reads it ({how})")
    found = json.loads(answer)
    if "error" in found:
        raise DataError(found["error"])
    return found["found"]


def _end(child: int) -> int:
    """The child has said what it had to say, or never will."""
    try:
        os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1]
    except (ChildProcessError, ProcessLookupError):  # the script lets the system forget its children
        return 0


def _listen(get: int, until: float) -> bytes | None:
    parts = []
    poll = select.poll()
    poll.register(get, select.POLLIN | select.POLLHUP)
    while True:
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return None
        part = os.read(get, 1 << 20)
        parts.append(part)
        if not part or part.endswith(b"\n"):
            return b"".join(parts)


def _answer(path: str, look: Callable[[str], Any], put: int) -> None:
    """In the child: look, tell, and go, without any of the parent's clean-up."""
    try:
        faulthandler.disable()  # a crash here is one line about the file: no traceback, no mark that the rank crashed
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)  # a library's own last words
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            details: dict[str, Any] = {"found": look(path)}
        except DataError as error:
            details = {"error": str(error)}
        except Exception as error:
            details = {"error": f"{path}: damaged ({one_line(error)})"}
        data = json.dumps(details).encode() + b"\n"
        while data:
            data = data[os.write(put, data) :]
    finally:
        os._exit(0)
