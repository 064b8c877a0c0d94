"""Starts an MPI daemon on another host, and keeps mpirun alive when that host dies.

mpirun calls it as its ssh: ``keeper.py hold|pass REMOTE SHELL -- HOST COMMAND``. ``COMMAND`` starts the daemon (prted)
of ``HOST`` and tells it where mpirun listens. PRRTE 3 ends the whole job when a daemon's connection to mpirun closes,
and no option prevents it. So with ``hold`` the daemon is told to connect to this process instead, which runs beside
mpirun and hands the bytes on. When the host is gone, it goes on holding mpirun's end. mpirun never learns of it; the
ranks that are left find out from MPI's own connections within milliseconds. mpirun then waits for the dead for ever, so
the supervisor ends it when the living are done.

It needs nothing but Python, and is run by its path: nothing in the user's folder can get in its way.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ENDS_WITHIN = 2.0  # seconds between the ends of mpirun and of its daemons, in good order
# Where mpirun listens: "name;tcp://address,address:port:masks;tcp6://...". Of these ways only the first is kept.
ADDRESS = re.compile(r'(prte_hnp_uri "[^;"]+;tcp://([\d.,]+)):(\d+)([^;"]*)[^"]*"')


class Proxy:
    """Stands between one daemon and mpirun."""

    def __init__(self, host: str, port: int) -> None:
        self.mpirun = host, port
        self.listener = socket.create_server(("", 0))
        self.port: int = self.listener.getsockname()[1]
        self.connected = threading.Event()
        self.gone = threading.Event()  # the daemon has ended, or its host has
        self.over = threading.Event()  # mpirun has
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            threading.Thread(target=self._join, args=(self.listener.accept()[0],), daemon=True).start()

    def _join(self, daemon: socket.socket) -> None:
        """Hand on what the daemon says; a stranger who knocks and says nothing is none."""
        try:
            if not daemon.recv(1, socket.MSG_PEEK):
                return
            mpirun = socket.create_connection(self.mpirun)
        except OSError:  # mpirun has ended
            return
        for end in (daemon, mpirun):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connected.set()
        threading.Thread(target=self._from_mpirun, args=(mpirun, daemon), daemon=True).start()
        _pump(daemon, mpirun)
        self.gone.set()

    def _from_mpirun(self, mpirun: socket.socket, daemon: socket.socket) -> None:
        _pump(mpirun, daemon)
        self.over.set()
        try:
            daemon.shutdown(socket.SHUT_RDWR)  # so that the daemon ends too, with its ranks
        except OSError:
            pass


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Bytes from one to the other until the source ends; its end is not passed on, and what the sink refuses goes."""
    while True:
        try:
            data = source.recv(1 << 16)
        except OSError:
            return
        if not data:
            return
        try:
            sink.sendall(data)
        except OSError:
            pass


class Keeper:
    """Stays as long as mpirun and the daemon do."""

    def __init__(self, host: str, folder: Path, proxy: Proxy | None, shell: subprocess.Popen) -> None:
        self.host, self.folder, self.proxy, self.shell = host, folder, proxy, shell
        self.parent = os.getppid()

    def wait(self) -> int:
        """Until mpirun has ended; sooner only if the daemon has never come, or has gone in good order."""
        told = False
        while not self._mpirun_ended():
            time.sleep(0.1)
            status = self.shell.poll()
            if status is not None and (self.proxy is None or not self.proxy.connected.is_set()):
                return status
            if self._ended_well():
                return 0
            gone = status is not None or (self.proxy is not None and self.proxy.gone.is_set())
            if gone and not told and not self._mpirun_ended(ENDS_WITHIN) and not self._ended_well():
                told = True
                print(f"oars: the MPI daemon of {self.host} is gone", file=sys.stderr, flush=True)
                (self.folder / f"gone-{self.host}").touch()
        try:
            self.shell.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self.shell.terminate()
        return 0

    def _ended_well(self) -> bool:
        """Whether the daemon's exit code was 0. The remote shell's says nothing: srun's is 0 for a node that failed."""
        try:
            return (self.folder / f"ended-{self.host}").read_text().strip() == "0"
        except OSError:
            return False

    def _mpirun_ended(self, within: float = 0.0) -> bool:
        over = self.proxy is not None and self.proxy.over.wait(within)
        return over or os.getppid() != self.parent


def main() -> int:
    at = sys.argv.index("--")
    hold, shell, host, command = sys.argv[1] == "hold", sys.argv[2:at], sys.argv[at + 1], " ".join(sys.argv[at + 2:])
    proxy = None
    found = ADDRESS.search(command)
    if hold and found is None:
        print(f"oars: {host} is started without a keeper: mpirun does not say where it listens", file=sys.stderr)
    elif hold and found is not None:
        proxy = Proxy(found[2].split(",")[0], int(found[3]))
        command = command[: found.start()] + f'{found[1]}:{proxy.port}{found[4]}"' + command[found.end():]
    # By a file, for remote shells differ in what they do to quotes; and in the foreground, so that its end is seen.
    folder = Path(os.environ["OARS_RUN_FOLDER"])
    script = folder / f"start-{host}.sh"
    ended = folder / f"ended-{host}"
    ended.unlink(missing_ok=True)
    script.write_text(f"exec 0</dev/null\n{command.replace(' --daemonize', '')}\n"
                      f"code=$?\necho $code >{shlex.quote(str(ended))}\nexit $code\n")
    path = shlex.quote(str(script)) if shell[0] != "srun" else str(script)
    started = subprocess.Popen([*shell, host, "/bin/sh", path], stdin=subprocess.DEVNULL)
    return Keeper(host, folder, proxy, started).wait()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)  # threads may still wait for the dead
