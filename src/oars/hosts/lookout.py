"""A host's lookout: it stands between this host's MPI daemon and mpirun's, and watches the link between the two.

A cut link closes no connection, so MPI would wait for ever. The lookout and the keeper beside mpirun (``keeper.py``)
send each other a byte several times per *lease* (24 s, less with a short ``--stall``). Who hears nothing for a lease is
cut off. Then one side stops and the other goes on, and each finds out alone which it is: the one with more of the
living ranks, of two equal ones the one with the voice (``goes_on``). Who stops does so at once, by killing its ranks;
who goes on waits for a quarter of a lease more, so the other has stopped by then, and claims the run folder
(``claim``): where both sides still see it, only one can. A host that cannot see the folder stops.

This host goes on alone only if it has the most ranks by itself, for it cannot tell who else is cut off from the
command. It is then without mpirun: the daemon is kept, as its connection ends here, and the deputy closes the run.

Ranks hear through the hub (``hub.py``) whom they cannot reach any more; ``oars.hosts.links`` is what they do.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.hosts.hub import HUB, Hub
from oars.hosts.kill_all import kill_all
from oars.plan import Plan

LEASE = 24.0  # seconds of silence; who goes on does so after 30
BEATS = 6  # in a lease
WAITS = 0.25  # of a lease, by which who goes on waits longer than who stops
# Where mpirun listens: "name;tcp://address,address:port:masks;tcp6://...". Of these ways only the first is kept.
ADDRESS = re.compile(r'(prte_hnp_uri "[^;"]+;tcp://)([\d.,]+):(\d+)([^;"]*)[^"]*"')


def lease(plan: Plan) -> float:
    """How long a host may be silent: less than a stall, so that a cut link is not taken for one."""
    return min(LEASE, 0.6 * (plan.stall or LEASE / 0.6))


def goes_on(here: Iterable[int], living: Iterable[int]) -> bool:
    """Whether the side with the ranks ``here`` goes on, of all that are living: the larger, else the voice's."""
    ours, every = set(here), set(living)
    return 2 * len(ours) > len(every) or (2 * len(ours) == len(every) and min(every, default=-1) in ours)


def living_at(folder: Path) -> dict[int, str]:
    """Every rank that nobody has called lost, and its host."""
    names = set(os.listdir(folder))
    return {int(name[5:]): json.loads((folder / name).read_text())[0]
            for name in names if re.fullmatch(r"born-\d+", name) and runfolder.lost(name[5:]) not in names}


def claim(folder: Path, living: int, host: str) -> bool:
    """Whether the side that ``host`` speaks for may write the run folder on, when ``living`` ranks have been parted."""
    path = folder / runfolder.side(living)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return path.read_text() == host
    os.write(fd, host.encode())
    os.fsync(fd)
    os.close(fd)
    return True


def own_addresses() -> list[str]:
    """Under which addresses other hosts may know this one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asked, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found.append(socket.inet_ntoa(reply[20:24]))
            except OSError:  # it has none
                pass
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in lines]
    return [address for address in found if not address.startswith("127.") and address != "::1"]


def write_addresses(folder: Path) -> None:
    """Tell the others where this host is."""
    (folder / runfolder.at(socket.gethostname())).write_text(json.dumps(own_addresses()))


def addresses_of(folder: Path, hosts: Iterable[str], others: Iterable[str]) -> list[str]:
    """Where ``hosts`` are, without addresses that some of the ``others`` have too (each host's own bridges)."""
    def listed_by(host: str) -> set[str]:
        try:
            return set(json.loads((folder / runfolder.at(host)).read_text()))
        except (OSError, ValueError):
            return set()

    theirs: set[str] = set().union(*map(listed_by, hosts))
    return sorted(theirs.difference(*map(listed_by, others)))


class Beat:
    """The bytes that go to and fro between keeper and lookout; ``silent``: for how long none has come.

    Time in which this process did not run (a suspended job) does not count.
    """

    def __init__(self, link: socket.socket, lease: float) -> None:
        self.link, self.lease, self.silent = link, lease, 0.0
        self.closed = False
        for work in (self._send, self._hear, self._count):
            threading.Thread(target=work, daemon=True).start()

    def _send(self) -> None:
        while not self.closed:
            try:
                self.link.send(b".", socket.MSG_DONTWAIT)
            except OSError:  # what it holds is not taken any more, or it has ended
                pass
            time.sleep(self.lease / BEATS)

    def _hear(self) -> None:
        try:
            while self.link.recv(4096):
                self.silent = 0.0
        except OSError:
            pass
        self.closed = True

    def _count(self) -> None:
        before = time.monotonic()
        while not self.closed:
            time.sleep(self.lease / 60)
            now = time.monotonic()
            self.silent += min(now - before, self.lease / 20)
            before = now


def pump(source: socket.socket, sink: socket.socket) -> None:
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


def end(link: socket.socket) -> None:
    """Close a connection that others may be reading."""
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class Lookout:
    """One host's. ``orders`` is what the keeper wrote for it."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.orders, self.folder, self.lease = orders, Path(orders["folder"]), orders["lease"]
        self.host = socket.gethostname()
        self.alone = False  # nothing from mpirun counts any more
        self.place = tempfile.mkdtemp(prefix="oars-")
        self.hub = Hub(self.place)
        link = self._reach_keeper("lease")
        self.beat = Beat(link, self.lease)
        # PRRTE reaches only what is in a network of one of its interfaces: not 127.0.0.1.
        self.listener = socket.create_server((link.getsockname()[0], 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def _reach_keeper(self, what: str) -> socket.socket:
        """A connection to the keeper, whose host has an address for each of its networks; not all lead there."""
        trouble: OSError | None = None
        for address in self.orders["addresses"]:
            try:
                link = socket.create_connection((address, self.orders["port"]), timeout=10)
            except OSError as error:
                trouble = error
                continue
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = {"secret": self.orders["secret"], "what": what, "host": self.host}
            link.sendall(json.dumps(hello).encode() + b"\n")
            return link
        raise SystemExit(f"oars: {self.host} cannot reach the command's host at {self.orders['addresses']}: {trouble}")

    def _serve(self) -> None:
        """Only this host's daemon is handed on to the keeper, not who knocks from another host."""
        while True:
            daemon, caller = self.listener.accept()
            if caller[0].startswith("127.") or caller[0] in own_addresses():
                threading.Thread(target=self._join, args=(daemon,), daemon=True).start()
            else:
                daemon.close()

    def _join(self, daemon: socket.socket) -> None:
        """Between the daemon and mpirun, by way of the keeper."""
        daemon.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keeper = self._reach_keeper("data")

        def back() -> None:
            while data := receive(keeper):
                if self.alone:
                    return
                daemon.sendall(data)
            if not self.alone:  # mpirun has ended, so the daemon shall, with its ranks
                end(daemon)

        threading.Thread(target=back, daemon=True).start()
        pump(daemon, keeper)
        end(keeper)

    def run(self) -> int:
        """Run the daemon to its end, or to this host's."""
        write_addresses(self.folder)
        address, port = self.listener.getsockname()
        command = ADDRESS.sub(lambda found: f'{found[1]}{address}:{port}{found[4].partition(",")[0]}"',
                              self.orders["command"])
        daemon = subprocess.Popen(["/bin/sh", "-c", command], env={**os.environ, HUB: self.hub.path},
                                  start_new_session=True)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda got, frame: os.killpg(daemon.pid, signal.SIGTERM))
        while daemon.poll() is None and not self.hub.over.is_set():
            time.sleep(0.1)
            if self.beat.silent > self.lease and not self.alone:
                self.alone = True
                if not self._goes_on():
                    print(f"oars: {self.host} is cut off and stops", file=sys.stderr, flush=True)
                    break
        if daemon.poll() is None:
            kill_all(self.folder)
            os.killpg(daemon.pid, signal.SIGKILL)
        shutil.rmtree(self.place, ignore_errors=True)
        return daemon.wait()

    def _goes_on(self) -> bool:
        """Nothing is heard of mpirun's host: whether the ranks of this one go on by themselves; if so, they have."""
        found: list[bool] = []
        weighing = threading.Thread(target=lambda: found.append(self._weigh()), daemon=True)
        weighing.start()
        weighing.join(WAITS * self.lease)  # a folder that cannot be read has gone with the link
        if not found or not found[0]:
            return False
        time.sleep(WAITS * self.lease)
        living = living_at(self.folder)
        others = {host for host in living.values() if host != self.host} | {self.orders["from"]}
        if not claim(self.folder, len(living), self.host):
            return False
        self.hub.tell({"cut": addresses_of(self.folder, others, [self.host])})
        return True

    def _weigh(self) -> bool:
        living = living_at(self.folder)
        here = [rank for rank, host in living.items() if host == self.host]
        return bool(self.orders["hold"]) and bool(here) and goes_on(here, living)


def receive(link: socket.socket) -> bytes:
    """What comes next; nothing at the end, whichever it was."""
    try:
        return link.recv(1 << 16)
    except OSError:
        return b""


def main() -> None:
    path = Path(sys.argv[1])
    data = json.loads(path.read_text())
    path.unlink()  # it has a secret
    code = Lookout(data).run()
    os._exit(code if code >= 0 else 128 - code)
