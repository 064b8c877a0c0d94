"""What the tests of ``oars label`` share: small sources, and a real server on one of them."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from pathlib import Path

import h5py
import numpy as np
from running import start

RUNNING: list[subprocess.Popen[str]] = []  # what a failed test leaves is ended after it
ROWS, SIDE = 150, 32
CLASSES = ("dark", "bright")


def truth(row: int) -> str:
    return CLASSES[int(row % 3 == 0)]


def images(rows: int = ROWS, seed: int = 0) -> np.ndarray:
    """Every third is brighter in the middle ring."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE] - (SIDE - 1) / 2
    ring = np.exp(-((np.hypot(y, x) - 9) / 2) ** 2)
    return np.stack([rng.poisson(20 + (60 if row % 3 == 0 else 0) * ring) for row in range(rows)]).astype(np.uint16)


def source(folder: Path, seed: int = 0) -> Path:
    path = folder / "run.h5"
    with h5py.File(path, "w") as file:
        file["images"] = images(seed=seed)
    return path


class Server:
    """``oars label`` as a process of its own; the same folder and port can be served again."""

    def __init__(self, folder: Path, *words: object, port: int | None = None, **env: str) -> None:
        self.folder = folder
        self.port = port or free_port()
        env = {"DISPLAY": "", "WAYLAND_DISPLAY": "", **env}
        self.process = start(folder, "label", *words, "--port", self.port, **env)
        assert self.process.stdout is not None and self.process.stderr is not None
        RUNNING.append(self.process)
        line = ""
        while not line.startswith("label at"):
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
        self.address = line.split()[2]
        self.token = self.address.partition("#")[2]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode

    def raw(self, request: bytes, wait: float = 20) -> bytes:
        """What comes back for these bytes, until the server hangs up or is silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as connection:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(request)
            parts: list[bytes] = []
            try:
                while part := connection.recv(65536):
                    parts.append(part)
            except TimeoutError:
                parts.append(b"(still open)")
            except ConnectionResetError:
                pass  # hung up on what it did not want to read
            return b"".join(parts)


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def status(answer: bytes) -> int:
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def error(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
