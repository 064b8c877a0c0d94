"""A host's hub: its ranks hear there which addresses cannot be reached any more.

The supervisor has one for its own host, each lookout one for its own. Ranks connect to it, and wait.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from typing import Any

HUB = "OARS_HUB"  # names its socket to the ranks of this host


class Hub:
    """Tells the ranks of this host, who connect to it, which addresses are cut off; anybody here may tell it."""

    def __init__(self, place: str) -> None:
        self.path = os.path.join(place, "hub")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(1024)
        self.ends: dict[socket.socket, bytes] = {}  # and what each has said so far
        self.lines: list[bytes] = []
        self.over = threading.Event()  # the deputy says that the run has ended
        self.lock = threading.Lock()
        threading.Thread(target=self._serve, name="oars-hub", daemon=True).start()

    def tell(self, line: dict[str, Any]) -> None:
        """Tell all ranks, those that come later too."""
        with self.lock:
            self.lines.append(json.dumps(line).encode() + b"\n")
            for end in list(self.ends):
                self._send(end, self.lines[-1])

    def _send(self, end: socket.socket, data: bytes) -> None:
        try:
            end.sendall(data)
        except OSError:
            pass

    def _serve(self) -> None:
        chooser = selectors.DefaultSelector()
        chooser.register(self.listener, selectors.EVENT_READ)
        while True:
            for key, _ in chooser.select():
                if key.fileobj is self.listener:
                    end = self.listener.accept()[0]
                    chooser.register(end, selectors.EVENT_READ)
                    with self.lock:
                        self.ends[end] = b""
                        for line in self.lines:
                            self._send(end, line)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj, chooser)

    def _hear(self, end: socket.socket, chooser: selectors.BaseSelector) -> None:
        try:
            data = end.recv(65536)
        except OSError:
            data = b""
        if not data:
            chooser.unregister(end)
            with self.lock:
                del self.ends[end]
            end.close()
            return
        *lines, self.ends[end] = (self.ends[end] + data).split(b"\n")
        for line in lines:
            content = json.loads(line)
            self.tell(content) if "cut" in content else self.over.set()


def say(hub: str, **line: Any) -> None:
    """Say something to a hub of this host."""
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(hub)
        end.sendall(json.dumps(line).encode() + b"\n")
