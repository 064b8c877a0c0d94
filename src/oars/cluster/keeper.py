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
from pathlib import Path

# Where mpirun listens: "name;tcp://address,address:port:masks;tcp6://...". Of these ways only the first is kept.
ADDRESS = re.compile(r'(prte_hnp_uri "[^;"]+;tcp://([\d.,]+)):(\d+)([^;"]*)[^"]*"')


class Proxy:
    """Stands between one daemon and mpirun."""

    def __init__(self, host: str, port: int) -> None:
        self.mpirun = host, port
        self.listener = socket.create_server(("", 0))
        self.port: int = self.listener.getsockname()[1]
        self.connected = threading.Event()
        self.over = threading.Event()  # mpirun has ended
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            daemon, _ = self.listener.accept()
            mpirun = socket.create_connection(self.mpirun)
            for end in (daemon, mpirun):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connected.set()
            threading.Thread(target=_pump, args=(daemon, mpirun), daemon=True).start()
            threading.Thread(target=self._from_mpirun, args=(mpirun, daemon), daemon=True).start()

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
    script.write_text(f"exec 0</dev/null\n{command.replace(' --daemonize', '')}\n")
    path = shlex.quote(str(script)) if shell[0] != "srun" else str(script)
    parent = os.getppid()
    started = subprocess.Popen([*shell, host, "/bin/sh", path], stdin=subprocess.DEVNULL)
    status = _wait(started, proxy, parent)
    if proxy is None or not proxy.connected.is_set() or status == 0:
        return status
    if not proxy.over.is_set():  # the daemon, or its host, is gone
        print(f"oars: the MPI daemon of {host} is gone ({status})", file=sys.stderr, flush=True)
        (folder / f"gone-{host}").touch()
        while os.getppid() == parent and not proxy.over.wait(0.5):
            pass
    return 0


def _wait(started: subprocess.Popen, proxy: Proxy | None, parent: int) -> int:
    """Until the daemon has ended; when mpirun has, it follows soon, or is made to."""
    patience = 10.0
    while patience > 0:
        try:
            return started.wait(0.5)
        except subprocess.TimeoutExpired:
            if os.getppid() != parent or (proxy is not None and proxy.over.is_set()):
                patience -= 0.5
    started.terminate()
    return started.wait()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)  # threads may still wait for the dead
