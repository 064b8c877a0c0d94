"""One step of data-parallel training on N ranks, simulated; and the closed formulas to check that by.

Events are times at which something is ready: a rank's part of a bucket of gradients, a node's, a message at the end of
a link. Each happens when the last of what it needs has happened, plus its own duration: a bucket is reduced on a node
when its slowest rank has it and the bucket before is through; a link takes one message after the other. All ranks'
events of one kind are computed together, in NumPy, so that 10⁵ ranks take no longer than a second.

A ring needs no loop over its 2(N-1) rounds. In each round a rank sends when it has what its left neighbour sent the
round before; so after p rounds of c seconds a rank has p·c plus the latest start among the p ranks before it. From
N-1 rounds on that is everybody's latest start. (A test goes through all rounds, message by message.)

Every rank has its own speed, drawn once (stragglers; evenly, so that none is slower than all that were seen), and every
step its own factor, drawn from those that were measured (jitter). Synchronous ways wait for the slowest; gossip waits
for one partner; asynchronous servers for nobody but the queue before them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from oars.exchange.across import MOST
from oars.exchange.early import least_bytes
from oars.watch.machine import Machine
from oars.watch.runs import WatchError
from oars.watch.workload import Workload

KINDS = {"allreduce": 0, "ring": 0, "tree": 0, "server": 1, "gossip": 0, "local": 8}  # and their usual counts
ROUNDS = 12  # steps simulated where ranks do not all wait for each other; the first half settles
WIDE = math.sqrt(3)  # standard deviations from the middle of an even distribution to its ends
DRAWS = 400_000  # factors drawn for one simulation of a synchronous step, at most


@dataclass(frozen=True)
class Sync:
    """How ranks exchange: ``allreduce`` (on nodes first, then a ring between them), a flat ``ring`` or ``tree``,
    ``server:K`` (K of them, asynchronous), ``gossip`` (with one random partner), ``local:H`` (every H steps)."""

    kind: str = "allreduce"
    count: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}" if self.count else self.kind


def parse_sync(text: str) -> Sync:
    """``server:4`` and the like."""
    kind, _, count = text.partition(":")
    if kind not in KINDS or (count and (not KINDS[kind] or not count.isdecimal() or int(count) < 1)):
        raise WatchError(f"--sync {text}: choose from allreduce, ring, tree, server:K, gossip, local:H")
    return Sync(kind, int(count) if count else KINDS[kind])


@dataclass(frozen=True)
class Step:
    """What a simulation gives, in seconds a step."""

    seconds: float
    computing: float  # of which a rank computes, on the mean


class _Case:
    """A workload on so many ranks of a machine."""

    def __init__(self, load: Workload, machine: Machine, ranks: int, weak: bool) -> None:
        self.load, self.machine, self.ranks = load, machine, ranks
        self.nodes, self.each = machine.split(ranks)
        rows = load.rows if weak else math.ceil(load.batch / ranks)  # all wait for who has one row more
        self.work = load.work(rows) / machine.at("speed", self.each)
        self.update = load.update_seconds / machine.at("memory", self.each)
        self.latency = machine.hop(0)
        # Between few hosts, messages are direct, wait for none before them, and leave while backward goes on.
        direct = 1 < self.nodes <= MOST
        self.delay = 2 * self.latency if direct else 0.0
        self.buckets = load.buckets or max(1, int(load.nbytes) // least_bytes(int(load.nbytes)) if direct else 1)

    def ready(self, bucket: int) -> float:
        """When a rank that is neither slow nor quick has this bucket's gradients (from 1 on)."""
        share = self.load.forward + (1 - self.load.forward) * bucket / self.buckets
        return self.update + self.work * share

    def meetings(self) -> float:
        """The small collectives, but for the two that a node's exchange has already."""
        if self.ranks == 1:
            return 0.0
        one = self.machine.at("meeting", self.each) + 2 * math.ceil(math.log2(self.nodes)) * self.latency
        return max(0.0, self.load.meetings - (2 if self.each > 1 else 0)) * one

    def across(self, nbytes: float) -> float:
        """An exchange between nodes."""
        return self.link(nbytes) + self.delay

    def link(self, nbytes: float) -> float:
        """How long it keeps a link busy: a ring; of few nodes that talk to each other directly, what the bytes take."""
        latency = self.latency if self.delay else 0.0
        return 2 * (self.nodes - 1) * (self.machine.hop(nbytes / self.nodes) - latency)

    def hop(self, nbytes: float) -> float:
        """A flat ring's round: the slowest link sets the pace."""
        near = self.machine.near(nbytes) if self.each > 1 else 0.0
        return max(near, self.machine.hop(nbytes)) if self.nodes > 1 else near

    def levels(self, nbytes: float) -> list[float]:
        """What a message costs on each level of a tree: within nodes first, then between them."""
        far = self.machine.hop(nbytes)
        near = self.machine.near(nbytes) if self.each > 1 else far
        return [near if 2**level < self.each else far for level in range(math.ceil(math.log2(self.ranks)))]

    def partner(self, nbytes: float) -> tuple[float, float]:
        """A swap with a partner on the same node, and with one elsewhere: a node's ranks share its link."""
        near = self.machine.near(nbytes) if self.each > 1 else 0.0
        return near, self.machine.hop(nbytes * self.each)

    def served(self, servers: int) -> tuple[float, float]:
        """How long a server is busy with a rank, and the link of that rank's node: gradients in, weights out."""
        link = self.machine.hop(self.load.nbytes * self.each) - self.latency
        return 2 * self.load.nbytes / servers / self.machine.servers, 2 * link

    def factors(self, steps: int, rng: np.random.Generator) -> np.ndarray:
        """How much slower than the mean each rank is in each step."""
        spread = self.machine.at("spread", self.each) if self.ranks > 1 else 0.0
        jitter, shape = self.load.jitter, (steps, self.ranks)
        drawn = jitter[rng.integers(len(jitter), size=shape)] if len(jitter) > 1 else np.ones(shape)
        return drawn * np.maximum(0.3, 1 + spread * rng.uniform(-WIDE, WIDE, self.ranks)) if spread else drawn


def simulate(load: Workload, machine: Machine, ranks: int, sync: Sync, weak: bool, rng: np.random.Generator) -> Step:
    """The time of a step."""
    case = _Case(load, machine, ranks, weak)
    quiet = len(load.jitter) == 1 and not machine.at("spread", case.each)
    if ranks == 1 and sync.kind != "server":
        return Step(case.work + case.update, case.work + case.update)
    if sync.kind == "gossip":
        seconds, factors = _gossip(case, rng)
    elif sync.kind == "server":
        seconds, factors = _server(case, sync.count, rng)
    elif sync.kind == "local":
        seconds, factors = _local(case, sync.count, 1 if quiet else _steps(ranks * sync.count), rng)
    else:
        factors = case.factors(1 if quiet else _steps(ranks), rng)
        exchange = {"ring": _ring, "tree": _tree}.get(sync.kind, _hierarchical)
        seconds = float(np.mean(exchange(case, factors))) + case.meetings()
    return Step(seconds, float(np.mean(factors)) * (case.work + case.update))


def _steps(draws_each: int) -> int:
    return max(2, min(100, DRAWS // draws_each))


def _hierarchical(case: _Case, factors: np.ndarray) -> np.ndarray:
    """Buckets are reduced on nodes, then in a ring between them, each when the one before is through."""
    load, steps = case.load, len(factors)
    empty = np.zeros((steps, case.nodes * case.each - case.ranks))
    slowest = np.concatenate([factors, empty], 1).reshape(steps, case.nodes, case.each).max(2)
    nbytes = load.nbytes / case.buckets
    on_node, link = case.machine.reduce(case.each, nbytes), case.link(nbytes)
    node_free, link_free = np.zeros((steps, case.nodes)), np.zeros(steps)
    for bucket in range(1, case.buckets + 1):
        node_free = np.maximum(node_free, slowest * case.ready(bucket)) + on_node
        link_free = np.maximum(link_free, node_free.max(1)) + link
    return link_free + case.delay


def _ring(case: _Case, factors: np.ndarray) -> np.ndarray:
    """One ring of all ranks: from the latest start on, all its rounds."""
    load, free = case.load, np.zeros(len(factors))
    rounds = 2 * (case.ranks - 1) * case.hop(load.nbytes / case.buckets / case.ranks)
    for bucket in range(1, case.buckets + 1):
        free = np.maximum(free, factors.max(1) * case.ready(bucket)) + rounds
    return free


def _tree(case: _Case, factors: np.ndarray) -> np.ndarray:
    """Pairs, pairs of pairs and so on sum up to the first rank; the result goes back the same way."""
    load, free = case.load, np.zeros((len(factors), 1))
    levels = case.levels(load.nbytes / case.buckets)
    for bucket in range(1, case.buckets + 1):
        at = np.maximum(free, factors * case.ready(bucket))
        for cost in levels:
            alone = at[:, -1:] if at.shape[1] % 2 else at[:, :0]
            at = np.concatenate([np.maximum(at[:, 0:-1:2], at[:, 1::2]) + cost, alone], 1)
        free = at + sum(levels)
    return free[:, 0]


def _local(case: _Case, every: int, times: int, rng: np.random.Generator) -> tuple[float, np.ndarray]:
    """Every rank makes its steps alone, then all exchange; a step's share of that."""
    factors = case.factors(times * every, rng)
    own = factors.reshape(times, every, case.ranks).sum(1).max(1) * (case.work + case.update)
    exchange = case.machine.reduce(case.each, case.load.nbytes) + case.across(case.load.nbytes) + case.meetings()
    return float(np.mean(own) + exchange) / every, factors


def _gossip(case: _Case, rng: np.random.Generator) -> tuple[float, np.ndarray]:
    """Every step each rank swaps with a random partner; the two go on together, the others do not care."""
    factors = case.factors(ROUNDS, rng)
    near, far = case.partner(case.load.nbytes)
    clock, half, pairs = np.zeros(case.ranks), 0.0, case.ranks // 2
    for step in range(ROUNDS):
        clock = clock + factors[step] * (case.work + case.update)
        order = rng.permutation(case.ranks)
        a, b = order[:pairs], order[pairs:2 * pairs]
        met = np.maximum(clock[a], clock[b]) + np.where(a // case.each == b // case.each, near, far)
        clock[a] = clock[b] = met
        half = float(clock.mean()) if step + 1 == ROUNDS // 2 else half
    return (float(clock.mean()) - half) / (ROUNDS - ROUNDS // 2), factors


def _server(case: _Case, servers: int, rng: np.random.Generator) -> tuple[float, np.ndarray]:
    """Each rank sends its gradients to all servers, a part to each, and takes the new weights from there.

    A server is a queue: who comes first is served first, taking in and giving out. Servers are alike, so one is
    simulated. Rounds are taken as a whole: with one request a rank, nobody gets ahead of the others by a round.
    """
    factors = case.factors(max(ROUNDS, min(4 * ROUNDS, DRAWS // case.ranks)), rng)
    served, own = case.served(servers)
    clock, free, half = np.zeros(case.ranks), 0.0, 0.0
    for step in range(len(factors)):
        sent = clock + factors[step] * case.work + case.latency
        order = np.argsort(sent, kind="stable")
        done, free = _queue(sent[order], served, free)
        clock[order] = np.maximum(done, sent[order] + own) + case.latency
        half = float(clock.mean()) if step + 1 == len(factors) // 2 else half
    return (float(clock.mean()) - half) / (len(factors) - len(factors) // 2), factors


def _queue(arrivals: np.ndarray, each: float, free: float) -> tuple[np.ndarray, float]:
    """When each of those who arrive, in this order, has been served; and when the last has."""
    place = np.arange(len(arrivals))
    begun = np.maximum.accumulate(np.maximum(arrivals, free) - place * each) + place * each
    return begun + each, float(begun[-1] + each)


def formula(load: Workload, machine: Machine, ranks: int, sync: Sync, weak: bool) -> float:
    """Seconds of a step in closed form: nobody is slow, nothing overlaps."""
    case = _Case(load, machine, ranks, weak)
    own, nbytes = case.work + case.update, load.nbytes
    if ranks == 1 and sync.kind != "server":
        return own
    hierarchical = machine.reduce(case.each, nbytes) + case.across(nbytes) + case.meetings()
    if sync.kind == "local":
        return own + hierarchical / sync.count
    if sync.kind == "gossip":
        near, far = case.partner(nbytes)
        same = (case.each - 1) / (ranks - 1)  # of the partners
        return own + same * near + (1 - same) * far
    if sync.kind == "server":
        served, link = case.served(sync.count)
        return max(case.work + 2 * case.latency + max(served, link), ranks * served)
    if sync.kind == "ring":
        return own + 2 * (ranks - 1) * case.hop(nbytes / ranks) + case.meetings()
    if sync.kind == "tree":
        return own + 2 * sum(case.levels(nbytes)) + case.meetings()
    return own + hierarchical
