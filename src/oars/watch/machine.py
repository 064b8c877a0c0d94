"""Machine descriptions: TOML files that say what ``oars predict`` has to know of a machine.

Some are shipped (``machines/*.toml``, with the sources of their figures); ``oars doctor --net`` writes one for the
machine it runs on. A file has three parts. The top: how many ``nodes``, ``ranks_per_node``, how far ranks' speeds lie
apart (``spread``), how far the figures may be off (``error``). ``[network]``: seconds of a message between two nodes,
by its size. ``[node]`` and ``[[reduce]]``: what ranks of one node do to each other, by how many of them are busy.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oars.watch.runs import WatchError

SHIPPED = Path(__file__).parent / "machines"
FAR = 1e9  # bytes: where a straight line's second point lies


@dataclass(frozen=True)
class Line:
    """Seconds by bytes, or by rows: straight between the points, and on beyond the last as the last two lead."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        if size > self.sizes[-1] and len(self.sizes) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            return self.seconds[-1] + max(0.0, slope) * (size - self.sizes[-1])
        return float(np.interp(size, self.sizes, self.seconds))

    def times(self, factor: float) -> Line:
        """The same, slower by a factor."""
        return Line(self.sizes, tuple(factor * s for s in self.seconds))


@dataclass(frozen=True)
class Machine:
    """One machine. What depends on the number of ranks that are busy on a node is asked for by that number."""

    name: str
    nodes: int
    ranks_per_node: int
    hop: Line  # a message between two nodes
    servers: float  # bytes a second that a parameter server handles, in and out together
    busy: tuple[int, ...]  # ranks on a node: the places of the four curves below
    speed: tuple[float, ...]  # of a rank's computing, 1 where it is alone
    memory: tuple[float, ...]  # of its passes over memory: the optimizer's step
    spread: tuple[float, ...]  # standard deviation of the ranks' speeds
    meeting: tuple[float, ...]  # seconds of a small collective on the node
    pair: Line | None  # a message between two ranks of a node, where that was measured
    reduces: tuple[tuple[int, Line], ...]  # ranks, and seconds to average a buffer that each of them has
    error: float  # standard deviation of what these figures are off by, relative

    def at(self, name: str, ranks: int) -> float:
        """A curve's value with so many ranks on a node; between its points it follows the logarithm."""
        return float(np.interp(math.log2(ranks), np.log2(self.busy), getattr(self, name)))

    def reduce(self, ranks: int, nbytes: float) -> float:
        """Seconds in which so many ranks of one node average a buffer of so many bytes."""
        if ranks == 1:
            return 0.0
        places = [math.log2(n) for n, _ in self.reduces]
        return float(np.interp(math.log2(ranks), places, [line(nbytes) for _, line in self.reduces]))

    def near(self, nbytes: float) -> float:
        """Seconds of a message between two ranks of a node."""
        return self.pair(nbytes) if self.pair is not None else self.reduce(2, nbytes) if self.reduces else 0.0

    def split(self, ranks: int) -> tuple[int, int]:
        """On how many nodes so many ranks are, and how many a full one has."""
        each = min(ranks, self.ranks_per_node)
        return -(-ranks // each), each

    def varied(self, rng: np.random.Generator) -> Machine:
        """A machine as this one may really be: each figure off by a factor of its own."""
        def off() -> float:
            return math.exp(self.error * rng.standard_normal())

        near, far, slower = off(), off(), off()
        return replace(
            self, hop=self.hop.times(far), servers=self.servers / off(),
            speed=tuple(1 / (1 + (1 / s - 1) * slower) for s in self.speed),
            memory=tuple(1 / (1 + (1 / s - 1) * slower) for s in self.memory),
            meeting=tuple(near * s for s in self.meeting), pair=self.pair.times(near) if self.pair else None,
            reduces=tuple((n, line.times(near)) for n, line in self.reduces))


def shipped() -> list[str]:
    """The names of the machines that come with oars."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def find(text: str) -> Machine:
    """The machine that is meant: one that is shipped, or a file's."""
    path = SHIPPED / f"{text}.toml"
    if os.sep in text or not path.is_file():
        path = Path(text)
        if not path.is_file():
            raise WatchError(f"no such machine: {text} is neither a file nor one of {', '.join(shipped())}; "
                             "oars doctor --net writes a file for the machine it runs on")
    return read(path)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, or one line that says why not."""
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WatchError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise WatchError(f"{path} is no TOML file: {error}") from None


def read(path: Path) -> Machine:
    """A machine description; WatchError where it says too little, or what cannot be."""
    table = read_toml(path)
    look = Fields(path, table)
    network, node = look.part("network"), look.part("node")
    hop = network.line() if network.table else Line((0.0,), (0.0,))
    busy = tuple(int(n) for n in node.row("ranks", [1.0]))
    if list(busy) != sorted(set(busy)) or busy[0] < 1:
        raise WatchError(f"{path}: ranks of [node] must grow, from 1 on: {list(busy)}")
    nodes = int(look.number("nodes", 1, least=1))
    if nodes > 1 and not network.table:
        raise WatchError(f"{path}: {nodes} nodes, but no [network]: give its latency and bandwidth")
    reduces = tuple((int(part.number("ranks", least=2)), part.line()) for part in look.parts("reduce"))
    each = int(look.number("ranks_per_node", 1, least=1))
    if each > 1 and not reduces:
        raise WatchError(f"{path}: {each} ranks on a node, but no [[reduce]]: give its ranks, latency and bandwidth")
    pair = look.part("pair")
    plain = look.number("spread", 0.0)
    slope = hop(FAR) - hop(0)
    ones = [1.0] * len(busy)
    return Machine(
        name=str(table.get("name", path.stem)), nodes=nodes, ranks_per_node=each, hop=hop,
        servers=network.number("server_bandwidth", 2 * FAR / slope if slope > 0 else FAR, least=1.0),
        busy=busy, speed=node.row("speed", ones, len(busy), 0.01), memory=node.row("memory", ones, len(busy), 0.01),
        spread=node.row("spread", [plain] * len(busy), len(busy)), meeting=node.row("meeting", [0.0] * len(busy),
                                                                                     len(busy)),
        pair=pair.line() if pair.table else None, reduces=tuple(sorted(reduces, key=lambda one: one[0])),
        error=look.number("error", 0.1))


class Fields:
    """A table of a TOML file, read with one line for what is wrong in it."""

    def __init__(self, path: Path, table: dict[str, Any], where: str = "") -> None:
        self.path, self.table, self._where = path, table, where

    def part(self, name: str) -> Fields:
        """A table within; an empty one where there is none."""
        inner = self.table.get(name, {})
        if not isinstance(inner, dict):
            raise WatchError(f"{self.path}: {name} must be a table: [{name}]")
        return Fields(self.path, inner, f" of [{name}]")

    def parts(self, name: str) -> list[Fields]:
        """An array of tables within."""
        inner = self.table.get(name, [])
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise WatchError(f"{self.path}: {name} must be tables: [[{name}]]")
        return [Fields(self.path, one, f" of [[{name}]]") for one in inner]

    def number(self, name: str, default: float | None = None, least: float = 0.0) -> float:
        """A number of ``least`` or more; without a default it must be there."""
        value = self.table.get(name, default)
        if value is None:
            raise WatchError(f"{self.path}: {name}{self._where} is missing")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < math.inf:
            raise WatchError(f"{self.path}: {name}{self._where} is {value!r}: a number is needed, {least:g} or more")
        return float(value)

    def row(self, name: str, default: list[float], count: int | None = None, least: float = 0.0) -> tuple[float, ...]:
        """A list of numbers, as many as ``count`` says."""
        value = self.table.get(name, default)
        if not isinstance(value, list) or not value or count not in (None, len(value)):
            raise WatchError(f"{self.path}: {name}{self._where} must be a list of "
                             f"{'numbers' if count is None else f'{count} numbers, one for each of its ranks'}")
        each = [Fields(self.path, {name: one}, self._where).number(name, least=least) for one in value]
        return tuple(each)

    def line(self) -> Line:
        """``latency`` and ``bandwidth``, or, as measured, ``bytes`` and ``seconds``."""
        if "bytes" in self.table:
            sizes = self.row("bytes", [])
            if list(sizes) != sorted(set(sizes)):
                raise WatchError(f"{self.path}: bytes{self._where} must grow: {list(sizes)}")
            return Line(sizes, self.row("seconds", [], len(sizes)))
        latency = self.number("latency")
        return Line((0.0, FAR), (latency, latency + FAR / self.number("bandwidth", least=1.0)))
