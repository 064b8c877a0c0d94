"""Starts an MPI daemon on another host, and keeps mpirun alive when that host dies or cannot be reached any more.

mpirun calls it as its ssh: ``keeper.py hold|pass LEASE REMOTE SHELL -- HOST COMMAND``. ``COMMAND`` starts the daemon
(prted) of ``HOST`` and tells it where mpirun listens. PRRTE 3 ends the whole job when a daemon's connection to mpirun
closes, and no option prevents it. So the daemon connects to its host's lookout instead (``lookout.py``), that to this
process, which runs beside mpirun and hands the bytes on. With ``hold``, when the host is gone it goes on holding
mpirun's end. mpirun never learns of it; the ranks that are left find out from MPI's own connections within
milliseconds. mpirun then waits for the dead for ever, so the supervisor ends it when the living are done. With ``pass``
mpirun is notified, and ends the run.

A host of which nothing is heard for a lease is dark: a mark in the run folder says so to the supervisor, which decides
which side goes on.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE))  # it is run by its path, so that nothing in the user's folder can get in its way
from oars import runfolder  # noqa: E402
from oars.hosts.lookout import ADDRESS, Beat, end, pump  # noqa: E402

SPEAKS_WITHIN = 30.0  # seconds, from a connection to the secret
ENDS_WITHIN = 2.0  # seconds between the ends of mpirun and of its daemons, in good order
LOOKOUT = "import sys; sys.path.insert(0, sys.argv[2]); from oars.hosts.lookout import main; main()"


class Proxy:
    """Stands between one host's lookout and mpirun."""

    def __init__(self, host: str, port: int, lease: float, hold: bool) -> None:
        self.mpirun, self.lease, self.hold = (host, port), lease, hold
        self.secret = secrets.token_hex(16)
        self.listener = socket.create_server(("", 0))
        self.port: int = self.listener.getsockname()[1]
        self.beat: Beat | None = None
        self.hostname = ""  # as the host calls itself
        self.connected = threading.Event()
        self.gone = threading.Event()  # the daemon has ended, or its host has
        self.over = threading.Event()  # mpirun has
        self.ends: list[socket.socket] = []  # mpirun's
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            threading.Thread(target=self._greet, args=(self.listener.accept()[0],), daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        """Only the lookout knows the secret; who says nothing is not listened to for long."""
        link.settimeout(SPEAKS_WITHIN)
        try:
            line = b""
            while not line.endswith(b"\n") and len(line) < 1000:
                byte = link.recv(1)
                if not byte:
                    return
                line += byte
            data = json.loads(line)
            if not secrets.compare_digest(data["secret"], self.secret):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError):  # a stranger who knocked
            link.close()
            return
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if data["what"] == "lease":
            self.hostname, self.beat = data["host"], Beat(link, self.lease)
        else:
            self._join(link)

    def _join(self, daemon: socket.socket) -> None:
        """Hand on what the daemon says."""
        try:
            mpirun = socket.create_connection(self.mpirun)
        except OSError:  # mpirun has ended
            return
        mpirun.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ends.append(mpirun)
        self.connected.set()
        threading.Thread(target=self._from_mpirun, args=(mpirun, daemon), daemon=True).start()
        pump(daemon, mpirun)
        self.lose()

    def _from_mpirun(self, mpirun: socket.socket, daemon: socket.socket) -> None:
        pump(mpirun, daemon)
        self.over.set()
        end(daemon)  # so that the daemon ends too, with its ranks

    def dark(self) -> bool:
        """Whether nothing has been heard for a lease."""
        return self.beat is not None and self.beat.silent > self.lease

    def lose(self) -> None:
        """The host is gone."""
        self.gone.set()
        for mpirun in self.ends if not self.hold else ():
            end(mpirun)


class Keeper:
    """Stays as long as mpirun and the daemon do."""

    def __init__(self, host: str, folder: Path, proxy: Proxy | None, shell: subprocess.Popen) -> None:
        self.host, self.folder, self.proxy, self.shell = host, folder, proxy, shell
        self.parent = os.getppid()

    def wait(self) -> int:
        """Until mpirun has ended; sooner only if the daemon has never come, or has gone in good order."""
        reported = False
        while not self._mpirun_ended():
            time.sleep(0.1)
            status = self.shell.poll()
            if status is not None and (self.proxy is None or not self.proxy.connected.is_set()):
                return status
            if self._ended_well():
                return 0
            if self.proxy is not None and self.proxy.dark() and not reported:
                reported = True
                print(f"oars: no sign of life from {self.host}", file=sys.stderr, flush=True)
                (self.folder / runfolder.dark(self.proxy.hostname)).touch()
                self.proxy.lose()
            gone = status is not None or (self.proxy is not None and self.proxy.gone.is_set())
            if gone and not reported and not self._mpirun_ended(ENDS_WITHIN) and not self._ended_well():
                reported = True
                print(f"oars: the MPI daemon of {self.host} is gone", file=sys.stderr, flush=True)
                (self.folder / runfolder.gone(self.host)).touch()
        try:
            self.shell.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self.shell.terminate()
        return 0

    def _ended_well(self) -> bool:
        """Whether the daemon's exit code was 0. The remote shell's says nothing: srun's is 0 for a node that failed."""
        try:
            return (self.folder / runfolder.ended(self.host)).read_text().strip() == "0"
        except OSError:
            return False

    def _mpirun_ended(self, within: float = 0.0) -> bool:
        over = self.proxy is not None and self.proxy.over.wait(within)
        return over or os.getppid() != self.parent


def watched(command: str, proxy: Proxy, addresses: list[str], folder: Path, host: str) -> str:
    """The command that starts a host's lookout, and that the daemon; what it must know goes by a file."""
    path = folder / runfolder.start_json(host)
    path.touch(0o600)
    path.write_text(json.dumps({
        "command": command, "folder": str(folder), "secret": proxy.secret, "addresses": addresses,
        "port": proxy.port, "lease": proxy.lease, "hold": proxy.hold, "from": socket.gethostname()}))
    return shlex.join([sys.executable, "-I", "-c", LOOKOUT, str(path), str(SOURCE)])


def main() -> int:
    at = sys.argv.index("--")
    hold, lease, shell = sys.argv[1] == "hold", float(sys.argv[2]), sys.argv[3:at]
    host, command = sys.argv[at + 1], " ".join(sys.argv[at + 2:]).replace(" --daemonize", "")
    folder = Path(os.environ["OARS_RUN_FOLDER"])
    proxy = None
    found = ADDRESS.search(command)
    if found is None:
        print(f"oars: {host} is started without a keeper: mpirun does not say where it listens", file=sys.stderr)
    else:
        proxy = Proxy(found[2].split(",")[0], int(found[3]), lease, hold)
        command = watched(command, proxy, found[2].split(","), folder, host)
    # By a file, for remote shells differ in what they do to quotes; and in the foreground, so that its end is seen.
    script = folder / runfolder.start_script(host)
    ended = folder / runfolder.ended(host)
    ended.unlink(missing_ok=True)
    script.write_text(f"exec 0</dev/null\n{command}\ncode=$?\necho $code >{shlex.quote(str(ended))}\nexit $code\n")
    path = shlex.quote(str(script)) if shell[0] != "srun" else str(script)
    started = subprocess.Popen([*shell, host, "/bin/sh", path], stdin=subprocess.DEVNULL)
    return Keeper(host, folder, proxy, started).wait()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)  # threads may still wait for the dead
