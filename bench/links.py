"""Trains over slow networks: hosts on this machine, joined by links with a rate and a delay (docs/sync.md).

    python bench/links.py                              # what three links carry, then the trainings over the slowest
    python bench/links.py --links 1G --only local      # over another one, only those whose name has "local" in it
    python bench/links.py --hosts 4 --picture it.svg   # four hosts; and draw it

Hosts are network namespaces (tests/slurm/hosts.sh). A link is a program, in this file: each host's only network device
is a TAP, whose frames it lets out at the rate, up and down, holds for the delay, and drops where more than twice the
delay's worth, or 10 ms, are in the queue, as a router does. What it carries is measured with plain sockets before
anything is trained over it. Needs root and /dev/net/tun.
"""

import argparse
import ctypes
import fcntl
import heapq
import itertools
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOSTS = HERE.parent / "tests" / "slurm" / "hosts.sh"
# name: bits a second, seconds one way, the largest frame (few large ones, so that a small program keeps up)
LINKS = {"10G": (10e9, 0.0001, 60000), "1G": (1e9, 0.001, 9000), "100M": (100e6, 0.030, 9000)}
LOCAL, SERVER = ["--sync", "local"], ["--sync", "server"]
WAYS = {
    "allreduce": ([], ("fp32", "bf16", "int8", "topk:0.01", "powersgd:4")),
    "local, K = 8": (LOCAL, ("fp32", "int8", "topk:0.01")),
    "local, K = 40": ([*LOCAL, "--every", "40"], ("fp32", "int8", "topk:0.01", "powersgd:4")),
    "gossip": (["--sync", "gossip"], ("fp32", "int8")),
    "server": (SERVER, ("fp32", "int8")),
}
_TUNSETIFF, _TAP, _NO_INFO = 0x400454CA, 0x0002, 0x1000
_NEWNET = 0x40000000


# -- a link

def tap(pid: int) -> int:
    """A network device in another process's namespace; what is sent through it is read from this descriptor."""
    libc, home = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(there, _NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tap0", _TAP | _NO_INFO))
    finally:
        libc.setns(home, _NEWNET)
        os.close(home)
        os.close(there)
    return device


def carry(devices: list[int], rate: float, delay: float) -> None:
    """Be the network between these devices, until it is ended."""
    queue: list[tuple[float, int, int, bytes]] = []  # when, a number, for whom, what
    up, down = [0.0] * len(devices), [0.0] * len(devices)  # when each direction of a cable is free
    at: dict[bytes, int] = {}  # who has which address
    numbers, deepest = itertools.count(), max(2 * delay, 0.01)
    while True:
        wait = max(0.0, queue[0][0] - time.perf_counter()) if queue else None
        for device in select.select(devices, [], [], wait)[0]:
            source = devices.index(device)
            frame = os.read(device, 65600)
            now, takes = time.perf_counter(), 8 * len(frame) / rate
            at[frame[6:12]] = source
            if up[source] - now > deepest:
                continue
            up[source] = sent = max(now, up[source]) + takes
            others = [n for n in range(len(devices)) if n != source]
            for to in [at[frame[:6]]] if frame[:6] in at else others:
                if down[to] - sent <= deepest:
                    down[to] = max(sent, down[to] + takes)
                    heapq.heappush(queue, (down[to] + delay, next(numbers), to, frame))
        now = time.perf_counter()
        while queue and queue[0][0] <= now:
            _, _, to, frame = heapq.heappop(queue)
            try:
                os.write(devices[to], frame)
            except BlockingIOError:  # its host does not keep up
                pass


class Hosts:
    """So many hosts, joined by a link, while in this block."""

    def __init__(self, count: int, link: str) -> None:
        self.names, self.link = [f"host{n + 1}" for n in range(count)], link
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.env = {**os.environ, "PATH": f"{self.path}/bin:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "",
                    "PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1",
                    "PRTE_MCA_prte_tmpdir_base": str(self.path)}

    def __enter__(self) -> "Hosts":
        rate, delay, largest = LINKS[self.link]
        self._tool("start", *self.names)
        devices = [tap(int((self.path / f"{name}.pid").read_text())) for name in self.names]
        for number, name in enumerate(self.names, 1):
            self.on(name, "ip", "link", "delete", "eth0")
            self.on(name, "ip", "link", "set", "tap0", "mtu", str(largest), "up")
            self.on(name, "ip", "address", "add", f"10.77.0.{number}/24", "dev", "tap0")
        self.pid = os.fork()
        if not self.pid:
            try:
                carry(devices, rate, delay)
            finally:
                os._exit(1)
        for device in devices:
            os.close(device)
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._tool("stop")
        self.folder.cleanup()

    def _tool(self, *words: str) -> None:
        subprocess.run([HOSTS, words[0], self.path, *words[1:]], check=True, stdout=subprocess.DEVNULL)

    def on(self, host: str, *words: str) -> str:
        """What a command prints there."""
        done = subprocess.run([HOSTS, "on", self.path, host, *words], env=self.env, capture_output=True, text=True,
                              timeout=1200)
        if done.returncode:
            raise SystemExit(f"{host}: {' '.join(words)}\n{done.stdout[-500:]}{done.stderr[-2000:]}")
        return done.stdout

    def measured(self) -> tuple[float, float]:
        """Milliseconds there and back, megabits a second: between the first two, by plain sockets."""
        listening = subprocess.Popen([HOSTS, "on", self.path, self.names[1], sys.executable, __file__, "--answer"],
                                     stdout=subprocess.PIPE, text=True)
        try:
            assert listening.stdout is not None and listening.stdout.readline()
            told = self.on(self.names[0], sys.executable, __file__, "--ask", self.names[1])
        finally:
            listening.terminate()
            listening.wait()
        there_and_back, through = map(float, told.split())
        return there_and_back, through

    def train(self, options: list[str], words: list[str]) -> tuple[float, float, int, float]:
        """Seconds to the accuracy that was asked for, the accuracy, the epochs, and megabytes that the first sent."""
        # The server is on the last host, beside one who trains.
        ranks = [1] * (len(self.names) - 1) + [1 + ("server" in options)]
        where = ",".join(f"{name}:{count}" for name, count in zip(self.names, ranks, strict=True))
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "oars", "run", "--quiet", "--name", "it", "--stall", "0", "--hosts",
                       where, *options, str(HERE / "sync_train.py"), *words]
            out = self.on(self.names[0], "sh", "-c", f"cd {folder} && exec {' '.join(command)}")
            sent = re.search(r'"sent_bytes": (\d+)', Path(folder, "oars-runs/it/summary.json").read_text())
        lines = re.findall(r"^epoch (\d+) accuracy ([\d.]+) after ([\d.]+) s", out, re.M)
        assert sent is not None
        return float(lines[-1][2]), float(lines[-1][1]), int(lines[-1][0]), int(sent[1]) / 1e6


# -- what a link carries, by plain sockets

def answer() -> None:
    """Send a byte back for each, then take what comes until there is no more, and say so."""
    with socket.create_server(("", 2300)) as listener:
        print("listening", flush=True)
        link, _ = listener.accept()
        with link:
            for _ in range(20):
                link.sendall(link.recv(1))
            while link.recv(1 << 20):
                pass
            link.sendall(b"!")


def ask(host: str) -> None:
    """The other end: prints milliseconds there and back, and megabits a second over eight seconds."""
    with socket.create_connection((host, 2300)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(20):
            began = time.perf_counter()
            link.sendall(b"?")
            link.recv(1)
            times.append(time.perf_counter() - began)
        block, sent, began = bytes(1 << 18), 0, time.perf_counter()
        while time.perf_counter() - began < 8:
            link.sendall(block)
            sent += len(block)
        link.shutdown(socket.SHUT_WR)
        link.recv(1)
        print(1000 * sorted(times)[len(times) // 2], 8e-6 * sent / (time.perf_counter() - began))


# -- the picture

def draw(rows: list[tuple[str, str, float]], title: str, path: str) -> None:
    """A bar for each way and wire, as long as its training took."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "oars"
    from matplotlib import pyplot as plt

    ways = list(dict.fromkeys(way for way, _, _ in rows))
    colours = dict(zip(ways, ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7"), strict=False))  # Okabe and Ito's
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.32 * len(rows)), layout="constrained")
    for place, (way, _, seconds) in enumerate(rows):
        axes.barh(place, seconds, color=colours[way])
        axes.text(seconds * 1.04, place, f"{seconds:.3g} s", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [f"{way}, {wire}" for way, wire, _ in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 1.6)
    axes.set_xlabel("time to the accuracy, s (logarithmic)")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--links", choices=LINKS, nargs="+", default=list(LINKS), help="the last is trained over")
    parser.add_argument("--only", default="", help="the ways whose names have this in them")
    parser.add_argument("--target", type=float, default=90.0, help="percent of the held-out digits to be right")
    parser.add_argument("--epochs", type=int, default=10, help="at most; of 40 steps")
    parser.add_argument("--picture", help="file to draw")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer or args.ask:
        return answer() if args.answer else ask(args.ask)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts are taken down
    for name in args.links:
        rate, delay, _ = LINKS[name]
        with Hosts(args.hosts, name) as hosts:
            there_and_back, through = hosts.measured()
        print(f"{rate / 1e6:.0f} Mb/s and {1000 * delay:g} ms asked for: {through:.0f} Mb/s and "
              f"{there_and_back:.2f} ms there and back measured", flush=True)
    print(f"\n{args.hosts} hosts, {rate / 1e6:.0f} Mb/s, {1000 * delay:g} ms: to {args.target:g} %, s; epochs of 40 "
          "steps; accuracy; MB sent by the first", flush=True)
    words = ["--batch", "32", "--images", "1280", "--held-out", "500", "--epochs", str(args.epochs), "--target",
             str(args.target)]
    rows = []
    for way, (options, wires) in WAYS.items():
        for wire in wires:
            if args.only in f"{way}, {wire}":
                with Hosts(args.hosts, args.links[-1]) as hosts:
                    seconds, accuracy, epochs, sent = hosts.train([*options, "--wire", wire], words)
                missed = "" if accuracy >= args.target else "  not reached"
                print(f"{way:<16}{wire:<12}{seconds:>8.1f}{epochs:>4}{accuracy:>8.2f}{sent:>10.2f}{missed}", flush=True)
                rows += [] if missed else [(way, wire, seconds)]
    if args.picture:
        draw(rows, f"Digits CNN (13 MB) to {args.target:g} %, {args.hosts} hosts, {rate / 1e6:.0f} Mb/s, "
                   f"{1000 * delay:g} ms one way", args.picture)


if __name__ == "__main__":
    main()
