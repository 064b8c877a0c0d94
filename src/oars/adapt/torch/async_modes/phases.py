"""Ranks on their own: what ``--sync local``, ``gossip`` and ``server`` make of a script (docs/sync.md).

A model that is called with gradients is *training*: from there on ranks train separately. The script still sees global
batches of which a rank holds its rows, but work that mixes rows asks nobody: what this rank has is taken for its share
of the whole (times N), so the loss and the gradients are its own estimate of the global ones, and nobody waits. A
model that is called without gradients is *evaluated*: the ranks meet, take the mean of their weights, and all that
follows is exact, as under allreduce, until the next training call. So they do where a loader's pass ends: what a script
does behind its loop, it does with the averaged weights, whatever it is. They meet as well every K steps (``local``),
where weights are read (``weight_reads.py``), where a loader begins, and at the end.

Ranks that train separately read different values and could take different branches. So at every meeting each says
where in the script it is. One whose loop was shorter takes part in the others' averages until they come to where it
waits. Ranks that come to different places are out of step: the run ends, and says so.
"""

from __future__ import annotations

import functools
import sys
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from oars import debug
from oars.adapt.torch.async_modes import ps_worker, weight_reads
from oars.adapt.torch.async_modes.gossip import Talks
from oars.adapt.torch.async_modes.load_balance import Estimate, Pace
from oars.adapt.torch.async_modes.lost_samples import Owed, OwnGradients
from oars.adapt.torch.backward.flat_buffers import Weights, weights_of
from oars.adapt.torch.context import ctx, site
from oars.adapt.torch.model import call as calls
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.rows.tensor import Rows
from oars.engine.world import RankLost
from oars.exchange.allreduce import Exchange
from oars.exchange.compressed import exchange_by
from oars.exchange.local import Round

_COLLECTIVES = ("allreduce", "allgather", "allgather_rows", "allgather_alike", "broadcast")
PLACES = ("ended a round", "began to read a loader", "evaluated", "read its weights", "came to its end",
          "ended a pass", "looked for the others", *(f"needed the others' rows ({name})" for name in _COLLECTIVES))
STEP, LOADER, EVALUATION, WEIGHTS, END, PASS, NOTICE = range(7)


class Phases:
    """When ranks are on their own, and where they meet."""

    def __init__(self, gradients: OwnGradients) -> None:
        plan = ctx.plan
        self.auto, self.warmup, self.outer = plan.every == "auto", plan.warmup, plan.outer
        self.every = 8 if self.auto else int(plan.every)  # steps of a round; to begin with
        self.talks = Talks() if plan.sync == "gossip" else None
        self.exact = Exchange(ctx.world)
        self.exchange = exchange_by(ctx.world, plan.wire) if plan.sync == "local" else self.exact
        self.owed = gradients.owed = Owed()
        self.servers: ps_worker.Servers | None = None
        self.rounds: WeakKeyDictionary[Optimizer, Round] = WeakKeyDictionary()  # in the order they were made
        self.held: list[Optimizer] = []  # while separate: the script may drop them before their weights are averaged
        self.estimate, self.pace = Estimate(), Pace()
        self.made = 0  # optimizers
        self.moved = 0  # steps since all was averaged
        self.meeting = False  # collectives are those of a meeting
        self.evaluations = 0
        self.storages = weight_reads.Storages()
        self.drifted: WeakSet[Optimizer] = WeakSet()  # those whose state is each rank's own
        self.alike: WeakSet[nn.Module] | None = None  # those that are the same on all ranks; None: all are, still
        self.parted = 0  # steps since ranks parted
        if plan.sync == "server":
            self.servers = ps_worker.Servers(self.estimate, self.pace, self.owed)
        # Whether ranks are at different steps when a death is noticed.
        self.loose = self.talks is not None or self.servers is not None
        ctx.world.before = self._before_collective
        ctx.record.at_end = self.end

    def any_shape(self) -> bool:
        """Whether ranks' rows need not be of one shape: in a local phase; an evaluation begins with a fresh pass."""
        return ctx.separate and not self.owed.fresh

    # -- training and evaluation

    def turn(self, module: nn.Module, leaves: list) -> None:
        """The script calls a module: is this training, or evaluation?

        Evaluated is what is called without gradients, or in ``eval()``, on rows of a loader that nobody learns from, or
        on no loader's. (A teacher, too, is called without gradients, but on the batch that is learnt from.)
        """
        if next(module.parameters(), None) is None:  # a loss
            return
        if self.servers is not None and ctx.separate:
            self.servers.pull()
        grad, rows = torch.is_grad_enabled(), any(isinstance(x, Rows) for x in leaves)
        if (grad and module.training) or (rows and self.owed.training()):
            if grad and _trained(module):
                self.estimate.see(leaves)
                if rows:
                    self.owed.to_learn()
                else:
                    self.owed.unknown = self.estimate.whole
                if not ctx.separate and ctx.record.steps >= self.warmup:
                    self.part()
            return
        if ctx.separate:
            self._often("a model is called without gradients, on no loader's batch,")
        if ctx.separate or (self.alike is not None and module not in self.alike):
            self.meet(EVALUATION, modules=(module,))
        self.owed.not_learnt()

    def _often(self, what: str) -> None:
        """Ranks meet because the script does this: if at about every step, they are not on their own."""
        self.evaluations += 1
        if self.evaluations == 20 and self.evaluations * 2 > ctx.record.steps:
            ctx.record.notice(f"{what} at {site()}: the ranks meet and average there every time",
                              "do this less often, once in an epoch for example", "exchange")

    def read(self) -> None:
        """The script reads weights."""
        if _outermost():
            self._often("weights are read")
            self.meet(WEIGHTS)

    def part(self) -> None:
        """All weights are equal: from here on every rank is on its own."""
        self.parted = 0
        while True:
            try:
                self._hold()
                for optimizer in self.rounds:  # the script may have put back what it had kept of them
                    self._make_alike(dict(enumerate(weights_of(optimizer))))
                break
            except RankLost:
                lineage.renew()
        for optimizer in self.rounds:
            self._refuse_unfit(optimizer)
        if self.servers is not None:
            self.servers.open({optimizer: round_.number for optimizer, round_ in self.rounds.items()})
        for optimizer, round_ in self.rounds.items():
            if round_.by_change:
                weights = Weights(weights_of(optimizer))
                buffer = np.zeros(weights.layout.nbytes, np.uint8)
                weights.lay_in(buffer)
                round_.begin(buffer)
        self.pace.go()
        self.alike = WeakSet()
        self.storages.see(self.rounds)
        ctx.separate = True

    def _refuse_unfit(self, optimizer: Optimizer) -> None:
        """LBFGS compares losses and gradients of many calls: those of a rank's own rows mislead it."""
        if self.servers is None and isinstance(optimizer, torch.optim.LBFGS):
            ps_worker.refuse(f"--sync {ctx.plan.sync} cannot step {type(optimizer).__name__}: use --sync allreduce",
                             2)

    def _hold(self) -> None:
        """Optimizers that the script has dropped go when Python finds them, on some ranks before others: what is gone
        on one goes on all, and until the next average no other does."""
        self.held.clear()
        self.held.extend(self.rounds)
        gathered = ctx.world.allgather([round_.number for round_ in self.rounds.values()])
        for optimizer in self.held:
            if any(self.rounds[optimizer].number not in of for of in gathered):
                del self.rounds[optimizer]
        self.held[:] = self.rounds

    def _unite(self) -> None:
        self.held.clear()
        if self.servers is None:
            self.drifted = WeakSet(self.rounds)
        ctx.separate = False

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make a step. With gradients of all ranks it is the same step on each, if its state
        is."""
        while not ctx.separate and optimizer in self.drifted:
            try:
                self._make_alike(weight_reads.of_state(optimizer))
                self.drifted.discard(optimizer)
            except RankLost:
                lineage.renew()

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step."""
        if not ctx.separate:  # gradients were averaged
            if ctx.record.steps > self.warmup:
                ctx.record.notice("no nn.Module in train() is called to train: gradients are averaged at every step, "
                                  "as under --sync allreduce", "call the network as an nn.Module, in train()",
                                  "exchange")
            return
        self._refuse_unfit(optimizer)  # made since ranks parted
        self.moved += 1
        round_ = self.rounds[optimizer]
        round_.steps += 1
        self.parted += 1
        if ctx.record.interrupted:
            self.meet(NOTICE)
        elif not self.loose:
            if round_.steps >= self.every:
                self.meet(STEP, round_.number)
        elif ctx.era != ctx.world.era or (ctx.world.survives and ctx.world.fallen()):
            self.meet(NOTICE)
        else:
            if self.talks is not None:
                self.talks.step(optimizer, round_.number, self.owed.count())
            if self.parted >= 8 and self.parted & (self.parted - 1) == 0:  # 8, 16, 32, …: cut by who is how fast
                self.meet(NOTICE)

    # -- meetings

    def _before_collective(self, name: str, width: int) -> None:
        """Ranks come to a collective: in a local phase, are they all there?"""
        if ctx.separate and not self.meeting:
            self.meet(NOTICE + 1 + _COLLECTIVES.index(name), width)

    def meet(self, place: int, of: int = -1, modules: Iterable[nn.Module] = ()) -> None:
        """Wait for all ranks to come to this place of the script; average what is to be averaged there, and what
        these modules have besides, if it differs."""
        if debug.on:
            debug.say(f"meets the other ranks: it {PLACES[place]}")
        self.meeting = True
        if self.servers is not None and ctx.separate:
            self.servers.away()
        pace = self.pace.report(*self.owed.taken()) if ctx.separate else (0, 0, 0)
        try:
            while True:
                try:
                    if not self.loose:
                        self.owed.mourn({})
                    if self._met(place, of, pace):
                        if self.alike is not None:
                            for module in modules:
                                self._make_alike(weight_reads.of_module(module))
                                self.alike.add(module)
                        return
                except RankLost:
                    operation = NOTICE < place < len(PLACES) - 1  # a broadcast needs nobody's rows
                    if not self.loose or operation:
                        lineage.renew()
                    else:
                        ctx.world.adopt()  # batches stay cut as they are until all ranks stand at one place
                    if operation:
                        raise  # it begins anew for the living
        finally:
            self.meeting = False
            self.pace.go()

    def _met(self, place: int, of: int, pace: tuple[int, int, int]) -> bool:
        """One meeting; whether all had come for the same."""
        rates = zlib.crc32(repr(self._rates()).encode())
        gathered = self.exact.agree(np.array([place, of, self.moved, ctx.record.interrupted, rates, ctx.record.steps,
                                          self.owed.rows, self.pace.worth(self.every), *pace]))
        at, same = gathered[:, 0], bool((gathered[:, :2] == gathered[0, :2]).all())
        passing = (at == STEP) | (at == NOTICE)
        if ctx.world.era != ctx.era:  # only where ranks are loose
            gathering = place > NOTICE and bool((at == place).all())
            if not (same or gathering) or (place == NOTICE and (gathered[:, 5] != gathered[0, 5]).any()):
                if not passing.any():
                    if not (at == PASS).any():
                        self._parted(gathered)
                    return place == PASS  # on to where the others wait
                return place == NOTICE and bool((at != NOTICE).any() or (gathered[:, 5] > ctx.record.steps).any())
            self._renew()
            if self.servers is not None:
                self.servers.together()
            if place > NOTICE:
                raise RankLost
        elif same and self.servers is not None:
            self.servers.together()
        if same and (gathered[:, 4] != rates).any():
            self._same_rates()
        if passing.any() and (at <= NOTICE).all():
            self._pass(gathered[at == STEP], gathered)
        elif not same and not ((at == PASS).any() and (at < NOTICE).all()):
            self._parted(gathered)
        elif gathered[:, 2].any() and (not same or place in (EVALUATION, WEIGHTS, END, PASS)):
            self._average_all(gathered[:, 6])
        if same and place <= NOTICE and (gathered[:, 5] == ctx.record.steps).all():
            self.pace.share(gathered[:, 8:].tolist())
            if self.auto and place == STEP:
                self.every = int(gathered[:, 7].max())
        if same and place in (EVALUATION, PASS):
            self._unite()
        if gathered[:, 3].any():
            ctx.record.raise_interrupt()  # Ctrl-C reached some rank: all stop here
        return place in (STEP, NOTICE) or same or (place == PASS and not passing.any())

    def _pass(self, stepping: np.ndarray, reports: np.ndarray) -> None:
        """Some ranks end a round; whoever waits elsewhere for them takes part."""
        if not len(stepping):
            return
        if (stepping[:, 1] != stepping[0, 1]).any():
            self._parted(reports)
        self.pace.averages()
        self._average(next(o for o, r in self.rounds.items() if r.number == stepping[0, 1]), reports[:, 6])
        self.owed.averaged()
        self.pace.averaged()

    def _renew(self) -> None:
        """All ranks that are left stand at one place: from here on batches are cut for them."""
        details: dict[int, int] = {}
        for heard in ctx.world.allgather((self.talks or self.servers).heard):  # type: ignore[union-attr]
            details.update({m: max(n, details.get(m, 0)) for m, n in heard.items()})
        lineage.renew()
        self.owed.mourn(details)

    def _average(self, optimizer: Optimizer, rows: np.ndarray) -> None:
        """One optimizer's weights: from every rank's own to those all go on from, by the ``rows`` each has learnt."""
        round_, weights = self.rounds[optimizer], Weights(weights_of(optimizer))
        round_.fit(weights.layout.nbytes)
        through, layout = round_.through(), weights.layout
        share = len(rows) * rows[ctx.world.rank] / rows.sum() if rows.any() else 1.0
        self._lay_in(through, weights, lambda: round_.lay_in(layout.spans, share))
        mean = round_.close(layout.nbytes, layout.spans, layout.shapes)
        if self.talks is not None:
            ctx.record.event("consensus", step=ctx.record.steps, distance=weights.distance(mean))
        weights.take_out(mean)

    def _lay_in(self, through: Exchange, weights: Weights, then: Callable[[], None] = lambda: None) -> None:
        if not through.holds(weights.layout.nbytes):
            through.reserve(weights.layout.nbytes)
        weights.lay_in(through.inbox)
        then()
        if (through.agree(np.array([weights.digest], np.int64)) != weights.digest).any():
            raise RuntimeError("oars: the ranks' parameters are not the same ones: the script built its model "
                               "differently on some ranks")

    def _make_alike(self, tensors: dict[Any, torch.Tensor]) -> None:
        differing = weight_reads.unlike(tensors)
        if differing.tensors:
            self._average_exactly(differing)

    def _average_exactly(self, weights: Weights) -> None:
        self._lay_in(self.exact, weights)
        self.exact.average(weights.layout.spans)
        weights.take_out(self.exact.result)

    def _average_all(self, rows: np.ndarray) -> None:
        """Every optimizer's weights, and what models have changed by themselves: running statistics."""
        if self.talks is not None:
            self.talks.fall_silent({o: r.number for o, r in self.rounds.items()}, self.owed.count())
        if self.servers is not None:
            self.servers.bring_home()
        else:
            self._average_weights(rows)
        moving = calls.moving_buffers()
        gathered = ctx.world.allgather({number: moved for number, (_, moved) in moving.items()})
        of_all = sorted(set(moving).intersection(*gathered))
        rest = Weights(list({id(b): b for number in of_all for i, b in enumerate(moving[number][0])
                             if any(i in of[number] for of in gathered)}.values()))
        if rest.tensors:
            self._average_exactly(rest)
        self.owed.averaged()
        self.moved = 0
        if self.talks is not None:
            self.talks.heard.clear()
        self._hold()

    def _average_weights(self, rows: np.ndarray) -> None:
        steps = ctx.world.allgather({r.number: r.steps for r in self.rounds.values()})
        for optimizer, round_ in list(self.rounds.items()):
            if all(round_.number in of for of in steps) and any(of[round_.number] for of in steps):
                self._average(optimizer, rows)

    def _rates(self) -> dict[int, list]:
        """Every optimizer's settings: learning rates and the like."""
        return {round_.number: [{k: v for k, v in group.items() if isinstance(v, (int, float, str, tuple))}
                                for group in optimizer.param_groups] for optimizer, round_ in self.rounds.items()}

    def _same_rates(self) -> None:
        """A schedule that goes by a rank's own loss: all take the first rank's."""
        gathered = ctx.world.allgather(self._rates())
        differ = {number for number, groups in gathered[0].items()
                  if all(number in of for of in gathered) and any(of[number] != groups for of in gathered)}
        if not differ:
            return
        for optimizer, round_ in self.rounds.items():
            if round_.number in differ:
                for group, settings in zip(optimizer.param_groups, gathered[0][round_.number], strict=True):
                    group.update(settings)
        ctx.record.notice("the ranks' learning rates differed (a schedule follows each rank's own loss): all "
                          "ranks take the first rank's")

    def _parted(self, reports: np.ndarray) -> NoReturn:
        here, there = 0, int(np.argmax((reports[:, :2] != reports[0, :2]).any(1)))
        names = [ctx.world.members[r] for r in (here, there)]
        if reports[here, 0] == reports[there, 0] > NOTICE:
            ps_worker.refuse(f"the rows of rank {names[0]} and rank {names[1]} differ in shape and are to be joined "
                             f"(at {site()}): use --sync allreduce", 2)
        print(f"oars: the ranks are out of step: rank {names[0]} {PLACES[reports[here, 0]]}, rank {names[1]} "
              f"{PLACES[reports[there, 0]]}. In separate training each rank reads its own loss: let the script decide "
              "by values that it reads in evaluation, or use --sync allreduce", file=sys.__stderr__, flush=True)
        raise SystemExit(2)

    def end(self) -> None:
        """The script has come to its end here."""
        self.meet(END)
        self.owed.end()
        if self.servers is not None:
            self.servers.write()
        self._unite()


def _trained(module: nn.Module) -> bool:
    return any(p in ctx.optimizer_of for p in module.parameters())


def _outermost() -> bool:
    return not (ctx.phases.meeting or ctx.plain or ctx.busy or ctx.depth) and (
        threading.current_thread() is threading.main_thread())


# ---- layers ---------------------------------------------------------------------------------------------------------


def module_call(inner: Callable[..., Any]) -> Any:
    """Around a module's call: is this training, or evaluation?"""
    def call(self: nn.Module, *args: object, **kwargs: object) -> Any:
        if _outermost():
            ctx.phases.turn(self, tree_leaves((args, kwargs)))
        return inner(self, *args, **kwargs)

    return call


def meets_at(place: int) -> Callable[[Callable], Callable]:
    """A layer around what ranks meet for: reads of weights, the beginning of a loader."""
    def layer(inner: Callable) -> Callable:
        @functools.wraps(inner)
        def call(*args: object, **kwargs: object) -> Any:
            phases = ctx.phases
            if not _outermost():
                return inner(*args, **kwargs)
            if place == WEIGHTS and ctx.separate:
                phases._often("weights are read")
            phases.meet(place, modules=[x for x in tree_leaves(args[:1]) if isinstance(x, nn.Module)])
            if place == LOADER:
                phases.owed.not_learnt()
                if phases.alike is not None and not ctx.separate:
                    phases.alike.clear()  # the script may have put back weights that it had kept
            phases.meeting = True  # what it does by itself needs no further word
            try:
                return inner(*args, **kwargs)
            finally:
                phases.meeting = False

        return call

    return layer


def iter_next(inner: Callable[..., Any]) -> Any:
    """Around a loader's ``__next__``: ranks meet where its pass ends."""
    @functools.wraps(inner)
    def next_(self: Any) -> Any:
        try:
            return inner(self)
        except StopIteration:
            if ctx.separate and _outermost():
                ctx.phases.meet(PASS)
            raise

    return next_


def add_param_group(inner: Callable[..., Any]) -> Any:
    """Around ``Optimizer.add_param_group``: every optimizer has rounds of its own."""
    def add(self: Optimizer, group: dict) -> None:
        phases = ctx.phases
        if phases.servers is not None and ctx.separate and _outermost():
            phases.meet(EVALUATION)  # what is stepped changes: it is handed out anew
        if self not in phases.rounds:
            phases.made += 1
            phases.rounds[self] = Round(phases.made, phases.exchange, phases.exact, phases.outer)
            if ctx.separate:
                phases.held.append(self)
        inner(self, group)
        if ctx.separate:
            phases.storages.see(phases.rounds)

    return add


def before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """A hook before every optimizer's step."""
    ctx.phases.steps(optimizer)


def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """A hook behind every optimizer's step."""
    ctx.phases.stepped(optimizer)
