"""``--sync server`` in a worker: ``step()`` pushes gradients to the servers, and weights come back.

While ranks train separately, the servers hold the weights and the optimizer's state. When ranks part, the first worker
hands them out; where ranks meet to evaluate, to save or to end, they come home: so whatever a script does there to its
weights or its optimizer counts. In between, ``step()`` makes no step here: it pushes the gradients. Where the bound on
staleness is above 0, the weights that come back are waited for only when a model is called next.
"""

from __future__ import annotations

import functools
import json
import pickle
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import optim
from torch.optim.optimizer import Optimizer

from oars import runfolder
from oars.adapt.torch.async_modes.load_balance import Estimate, Pace
from oars.adapt.torch.async_modes.lost_samples import Owed
from oars.adapt.torch.async_modes.ps_shard import Coding, dumped, loaded
from oars.adapt.torch.backward.flat_buffers import Layout, carried, real, weights_of
from oars.adapt.torch.context import ctx
from oars.adapt.torch.recovery import lineage
from oars.engine.world import RankLost
from oars.exchange.mail import NOTHING, Mail, head
from oars.exchange.servers import Desk, Piece, Shard, Unserved, merge, place
from oars.exchange.serving import ASK, AWAY, GET, PUSH, SET

if TYPE_CHECKING:
    from collections.abc import Callable

# These treat elements one by one, so that their tensors can be cut and dealt out.
_BY_ELEMENT = (optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad,
               optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD)
_NOT_SERVED = (optim.LBFGS, optim.SparseAdam)


class Served:
    """One optimizer's shards."""

    def __init__(self, optimizer: Optimizer, number: int, servers: list[int]) -> None:
        self.tensors = weights_of(optimizer)
        sizes = [real(t.detach()).numel() for t in self.tensors]
        dealt = place(sizes, len(servers), ctx.plan.placement, type(optimizer) in _BY_ELEMENT)
        self.shards, self.codings = [], {}
        for i, pieces in enumerate(dealt):
            if pieces:
                shard = Shard((number, i), pieces, [*servers[i:], *servers[:i]][:2])
                shapes = [tuple(_cut(self.tensors[p.tensor], p).shape) for p in pieces]
                kinds = [carried(self.tensors[p.tensor].dtype) for p in pieces]
                self.shards.append(shard)
                self.codings[shard.key] = Coding(Layout(shapes, kinds), len(pieces), ctx.plan.wire)
        self.known = b""  # the settings that servers know
        self._seen: list[torch.Tensor] = []  # some of each tensor, as the servers gave it

    def glance(self, pushes: int) -> None:
        """Remember how the weights look, now and then: at the first steps, and more rarely later."""
        rarely = pushes & (pushes - 1)
        self._seen = [] if rarely else [_few(tensor) for tensor in self.tensors]

    def check(self) -> None:
        """The weights are as they were; what the script made of them would be lost, without a word."""
        if not all(map(torch.equal, self._seen, map(_few, self.tensors))):
            refuse("--sync server: this script changes weights itself after step(), or by two optimizers, which the "
                   "servers do not see: use --sync allreduce", 1)

    def contents(self, optimizer: Optimizer, shard: Shard) -> np.ndarray:
        """A shard's weights, settings and state, for who is to hold it."""
        place_of = {id(t): i for i, t in enumerate(self.tensors)}
        members = [[n for n, piece in enumerate(shard.pieces) if any(
            place_of.get(id(p)) == piece.tensor for p in group["params"])] for group in optimizer.param_groups]
        state = {}
        for n, piece in enumerate(shard.pieces):
            of = optimizer.state.get(tensor := self.tensors[piece.tensor], {})
            if of:
                state[n] = {name: _cut(value, piece).detach().cpu().clone() if _like(value, tensor) else value
                            for name, value in of.items()}
        return dumped({"class": type(optimizer), "defaults": optimizer.defaults, "settings": settings_of(optimizer),
                       "members": members, "state": state,
                       "weights": [_cut(self.tensors[p.tensor], p).detach().cpu().clone() for p in shard.pieces]})

    def take(self, optimizer: Optimizer, shard: Shard, data: np.ndarray) -> None:
        """What was held comes home."""
        answer = loaded(data.tobytes())
        with torch.no_grad():
            for n, (piece, weights) in enumerate(zip(shard.pieces, answer["weights"], strict=True)):
                tensor = self.tensors[piece.tensor]
                _put(tensor, piece, weights)
                for name, value in answer["state"].get(n, {}).items():
                    mine = optimizer.state[tensor]
                    before = mine.get(name)
                    if not (isinstance(value, torch.Tensor) and value.shape == weights.shape):
                        mine[name] = value.to(before.device) if isinstance(before, torch.Tensor) else value
                        continue
                    if not _like(before, tensor):
                        mine[name] = torch.zeros_like(tensor, dtype=None if tensor.is_complex() else value.dtype)
                    _put(mine[name], piece, value)


class Servers:
    """This worker's part in it."""

    def __init__(self, estimate: Estimate, pace: Pace, owed: Owed) -> None:
        self._estimate, self._pace, self._owed = estimate, pace, owed
        self._desk = Desk(Mail(ctx.world.star), ctx.world.servers, self._lost)
        self._served: WeakKeyDictionary[Optimizer, Served] = WeakKeyDictionary()
        self._waiting: list[Served] = []  # for weights
        self._epoch = 0
        self._facts = {"pushes": 0, "left_out": 0, "staleness": 0, "staleness_max": 0, "waited_seconds": 0.0,
                       "held_seconds": 0.0, "served_seconds": 0.0, "queued_seconds": 0.0, "received_bytes": 0}

    # -- parting and coming home

    def open(self, numbers: dict[Optimizer, int]) -> None:
        """Ranks part: from here on the servers hold what these optimizers step. All workers are at this place."""
        for optimizer in numbers:
            if isinstance(optimizer, _NOT_SERVED):
                refuse(f"--sync server cannot step {type(optimizer).__name__}: use --sync allreduce", 2)
        while True:
            try:
                self._epoch += 1
                every = ctx.world.allgather((list(self._desk.ears), self._epoch))
                living = [server for server in ctx.world.servers if all(server in ears for ears, _ in every)]
                self._epoch = max(epoch for _, epoch in every)
                if not living:
                    self._end()
                self._served.clear()
                for optimizer, number in numbers.items():
                    self._served[optimizer] = served = Served(optimizer, number, living)
                    served.known = pickle.dumps(settings_of(optimizer))
                if all(ctx.world.allgather(ctx.world.rank > 0 or self._handed_out())):
                    return
            except RankLost:
                lineage.renew()

    def _handed_out(self) -> bool:
        """Give every server its shards, and its buddy a copy; whether all lived to have them."""
        for role in (1, 0):  # the buddies first: who is asked relays to them
            for optimizer, served in self._served.items():
                for shard in served.shards:
                    if role < len(shard.chain):
                        holder = Shard(shard.key, shard.pieces, shard.chain[role : role + 1])
                        buddy = [*shard.chain, -1][1] if role == 0 else -1
                        try:
                            self._desk.ask(holder, head(SET, epoch=self._epoch, who=buddy),
                                           served.contents(optimizer, shard))
                            self._answers(again=True)
                        except Unserved:
                            self._desk.forget()
                            return False
        return True

    def bring_home(self) -> None:
        """All workers have met: take the weights and the state as they are on the servers."""
        for served in self._served.values():
            for shard in served.shards:
                self._desk.ask(shard, head(GET, epoch=self._epoch), NOTHING)
        answers = self._answers()
        for optimizer, served in self._served.items():
            for shard in served.shards:
                served.take(optimizer, shard, answers[shard.key].body)
                shard.version = int(answers[shard.key].head["version"])

    # -- steps

    def serves(self, optimizer: Optimizer) -> bool:
        """Whether the gradients that are there now go to the servers."""
        return ctx.separate and optimizer in self._served

    def push(self, optimizer: Optimizer) -> None:
        """In place of the optimizer's step."""
        self.pull()
        served = self._served[optimizer]
        served.check()
        settings = pickle.dumps(settings_of(optimizer))
        news = settings if settings != served.known else b""
        served.known = settings
        learnt = self._owed.averages << 32 | self._owed.count()
        with torch.no_grad():
            for shard in served.shards:
                gradients = [None if (g := served.tensors[p.tensor].grad) is None
                             else _cut(g.to_dense() if g.layout is not torch.strided else g, p) for p in shard.pieces]
                body = served.codings[shard.key].encode(gradients)
                body = np.concatenate([body, np.frombuffer(news, np.uint8)]) if news else body
                shard.clock += 1
                self._desk.ask(shard, head(PUSH, epoch=self._epoch, clock=shard.clock, version=shard.version,
                                           share=self._estimate.share(), learnt=learnt, settings=len(news)), body)
        self._waiting.append(served)
        self._facts["pushes"] += 1
        if not ctx.plan.staleness:
            self.pull()

    def pull(self) -> None:
        """Take the weights that were asked for by the last push."""
        if not self._waiting:
            return
        began = time.perf_counter()
        answers = self._answers()
        waited = time.perf_counter() - began
        facts, heads = self._facts, [message.head for message in answers.values()]
        stale, held, served_for = (max((float(h[name]) for h in heads), default=0.0)
                                   for name in ("stale", "held", "served"))
        self._pace.idle(min(held, waited))  # the way there and back is its own: a slow rank is slow in that, too
        facts["left_out"] += any(h["stale"] < 0 for h in heads)
        facts["staleness"] += int(stale)
        facts["staleness_max"] = max(facts["staleness_max"], int(stale))
        facts["waited_seconds"] += waited
        facts["held_seconds"] += held
        facts["served_seconds"] += served_for
        facts["queued_seconds"] += max(0.0, waited - held - served_for)
        for served in self._waiting:
            served.check()
            for shard in served.shards:
                message = answers[shard.key]
                facts["received_bytes"] += message.body.nbytes
                shard.version, shard.clock = int(message.head["version"]), max(shard.clock, int(message.head["clock"]))
                with torch.no_grad():
                    for piece, view in zip(shard.pieces, served.codings[shard.key].layout.views(message.body),
                                           strict=True):
                        _put(served.tensors[piece.tensor], piece, view)
            served.glance(int(facts["pushes"]))
        self._waiting = []

    def _answers(self, again: bool = False) -> dict:
        """All answers that are due; the time goes into the exchange's. ``again``: who asks can do without."""
        began = time.perf_counter()
        ctx.world.board.enter("servers")
        try:
            return self._desk.answers(ctx.world.patient)
        except Unserved as why:
            if str(why):
                refuse(f"--sync server: the servers cannot make this script's optimizer: {why}", 2)
            if again:
                raise
            self._end()
        finally:
            ctx.world.board.leave(ctx.world.meetings)
            ctx.world.seconds += time.perf_counter() - began

    # -- meetings, and deaths

    def away(self) -> None:
        """This worker comes to a place where it waits for the others: nobody is to wait for it."""
        self._desk.tell(head(AWAY, epoch=self._epoch))
        self.pull()

    def together(self) -> None:
        """All workers have come to one place: from here on steps are counted anew."""
        self._epoch += 1
        for served in self._served.values():
            for shard in served.shards:
                shard.clock = 0

    @property
    def heard(self) -> dict[int, int]:
        """Of each worker's batches since the last average, how many have come to the servers."""
        living = list(self._desk.ears)
        for i in range(len(living)):
            self._desk.ask(Shard((-1, i), [], [*living[i:], *living[:i]]), head(ASK), NOTHING)
        answer = merge([message.body for message in self._answers().values()])
        return {worker: n & 0xFFFFFFFF for worker, n in answer.items() if n >> 32 == self._owed.averages}

    def _end(self) -> NoReturn:
        refuse("a server died, and no other server has a copy of its data: the run ends"
                + (" (with --servers 2 or more each has a buddy)" if ctx.plan.servers == 1 else ""), 1)

    def _lost(self, server: int) -> None:
        """A server has died; the others of the run hear it from us."""
        world = ctx.world
        if server in world.servers:
            world.servers.remove(server)
            world.board.gone(server)
            for tell in world.on_loss:
                tell([server], "serving")

    def write(self) -> None:
        """Put what this worker saw into the run folder."""
        ctx.world.sent += self._desk.mail.bytes
        facts = dict(self._facts, sent_bytes=self._desk.mail.bytes)
        facts["staleness"] = round(facts["staleness"] / max(1, facts["pushes"]), 3)
        path = ctx.record.folder / runfolder.sync(ctx.world.origin)
        path.write_text(json.dumps({"role": "worker", **facts}, indent=1) + "\n")


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's learning rate and the like, as servers, who have no GPU, can use them."""
    found = []
    for group in optimizer.param_groups:
        settings = {name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                    for name, value in group.items() if name != "params"}
        if any(p.is_cuda for p in group["params"]):
            settings.update({name: None if name == "fused" else False for name in ("fused", "capturable")
                             if name in settings})
        found.append(settings)
    return found


def push(step: Callable[..., Any]) -> Any:
    """In the place of an optimizer's step: its gradients go to the servers."""
    @functools.wraps(step)
    def call(self: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        assert ctx.phases.servers is not None
        servers, loss = ctx.phases.servers, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not servers.serves(self):
            return step(self, *([lambda: loss] if closure is not None else []), *args, **kwargs)
        servers.push(self)
        return loss

    return call


def _like(value: object, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece of a tensor: a tensor as it is, or some of its elements in a row."""
    tensor = real(tensor.detach())
    return tensor if piece.stop - piece.start == tensor.numel() else tensor.reshape(-1)[piece.start : piece.stop]


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements of a tensor, to the bit."""
    return real(tensor.detach()).reshape(-1)[:256].clone().view(torch.uint8)


def _put(tensor: torch.Tensor, piece: Piece, value: torch.Tensor) -> None:
    """Replace a piece of a tensor."""
    tensor = real(tensor.detach())
    if piece.stop - piece.start == tensor.numel():
        tensor.copy_(value.view(tensor.shape))
    elif tensor.is_contiguous():
        tensor.view(-1)[piece.start : piece.stop].copy_(value)
    else:  # its elements lie in another order
        flat = tensor.reshape(-1)
        flat[piece.start : piece.stop] = value.to(flat.device)
        tensor.copy_(flat.view(tensor.shape))


def refuse(text: str, code: int) -> NoReturn:
    """End the run with one line."""
    print(f"oars: {text}", file=sys.__stderr__, flush=True)
    raise SystemExit(code)
