"""What a rank does when hosts cannot be reached any more: it closes its own connections to them.

A cut link closes no connection, so MPI goes on waiting. What it does notice is the end of a connection, and then the
ranks behind it are dead to it (ULFM), as if their host had died. So this rank shuts its end down, from a thread of its
own that otherwise waits for word from this host's hub (``oars.hosts.hub``) and costs nothing. MPI may try again,
so it looks twice a second from then on.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from time import sleep  # as it is now: scripts are given another clock later

EVERY = 0.5  # seconds


def watch(hub: str) -> None:
    """Listen to this host's hub from now on."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(hub)
    except OSError:  # it went with its host's end of the run
        return
    threading.Thread(target=_listen, args=(end,), name="oars-links", daemon=True).start()


def _listen(end: socket.socket) -> None:
    cut: set[str] = set()
    heard = b""
    while data := end.recv(65536):
        *lines, heard = (heard + data).split(b"\n")
        for line in lines:
            if not cut:
                threading.Thread(target=_keep_shut, args=(cut,), name="oars-cut", daemon=True).start()
            cut.update(json.loads(line)["cut"])


def _keep_shut(cut: set[str]) -> None:
    while True:
        shut(set(cut))
        sleep(EVERY)


def shut(addresses: set[str]) -> int:
    """Shut this process's TCP connections to these addresses down, also those on their way; how many there were."""
    found = 0
    inodes = _connections(addresses)
    for name in os.listdir("/proc/self/fd") if inodes else ():
        if _inode(name) not in inodes:
            continue
        try:
            with socket.socket(fileno=os.dup(int(name))) as ours:
                if _inode(str(ours.fileno())) in inodes:  # and not another by now
                    found += 1
                    ours.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            pass
    return found


def _inode(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]")
    except OSError:
        return ""


def _connections(addresses: set[str]) -> set[str]:
    """The kernel's numbers of this host's sockets that lead there."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{table}") as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if _address(fields[2].partition(":")[0]) in addresses:
                found.add(fields[9])
    return found - {"0"}


def _address(text: str) -> str:
    """``0100007F`` is 127.0.0.1: words of four bytes, each in the machine's order."""
    words = [int(text[at:at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(packed) == 4:
        return socket.inet_ntoa(packed)
    if packed.startswith(b"\0" * 10 + b"\xff\xff"):  # version 4 in version 6's clothes
        return socket.inet_ntoa(packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed)
