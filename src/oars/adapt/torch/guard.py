"""``--guard``: the ranks' weights are compared, and a rank that is alone with its own takes the others'.

The state is what models that the script has called and optimizers that it has made hold: parameters, buffers, momenta;
and where the common random streams stand.
Blocks of it are hashed at every exchange of gradients (``exchange/guard.py``), just before these are averaged; all of
it before something is saved or a snapshot is taken, after a state was loaded, and at the end of the script.

If hashes differ, all ranks say what they have under each name. What most have is right. Gradients that have come from
a changed weight are not averaged: the buffers go back to what they were before this step's calls, the rank that is
alone takes the others' values, and all that was computed from rows since the last exchange is computed again
(``recovery/lineage.py``), as it is when a rank dies. So a bit that flips within a step of which all is looked at leaves
no trace in the weights. One that is found later than in its step has been averaged into every rank's weights: they are
equal again from there on, and the line that is printed says since when they were not.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from time import perf_counter_ns  # as it is now: scripts are given another clock later
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from oars import runfolder
from oars.adapt.python import random
from oars.adapt.replay import snapshot_file
from oars.adapt.torch.context import ctx, of_the_script
from oars.adapt.torch.model import call
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.recovery.lineage import Entry, Irreplaceable
from oars.adapt.torch.rows.tensor import Rows
from oars.engine import Astray
from oars.engine.retry import until_none_is_lost
from oars.engine.world import RankLost
from oars.exchange.guard import BLOCK, Line, Rounds, broadcast, digest, judged

if TYPE_CHECKING:
    from collections.abc import Callable

OFF, REPORT, HEAL = "off", "report", "heal"
_LOOK_AGAIN = 64  # exchanges: then tensors that have come or gone since are found
_STREAMS = "the common random streams"
_LIKE = 1 << 21  # bytes that take as long to look at as the streams do
_numpy = torch._C.TensorBase.numpy  # past who records what a script reads


class Healed(RankLost):
    """Nobody was lost, but what was computed since the last exchange has to be computed again."""


class Guard:
    """One rank's part in comparing."""

    def __init__(self, heals: bool, every: int) -> None:
        self.heals, self.rounds = heals, Rounds(every)
        self.agreed = self._began = 0  # steps before the last round that showed no difference, and before this one
        self._state: dict[str, torch.Tensor] = {}
        self._blocks: list[Any] = []
        self._found: Any = None  # when the state was looked for
        self._sizes: Any = None
        self._asks = False
        self._looked_at = 0
        self._said: set[str] = set()
        self._checked: Any = None  # where all of it was last compared
        # since the last exchange
        self._count = 0
        self._entries: deque[tuple[int, weakref.ref[Entry]]] = deque(maxlen=1 << 16)
        self._calls: deque[tuple[int, Entry]] = deque(maxlen=256)  # those of them that have moved buffers
        self._moved = False  # the call that has just been made has
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # these buffers, and what they held
        self._sources: deque[Any] = deque(maxlen=4)  # the loader's rows: read again they might be other ones

    # -- what happens between two exchanges

    def made(self, entry: Entry, rows: list | None = None) -> None:
        """An operation on rows was done; or (``rows``) a loader has given some."""
        if rows is not None:
            self._sources.append(rows)
            return
        if not self.heals:
            return
        self._count += 1
        self._entries.append((self._count, weakref.ref(entry)))
        if entry.of is not None and self._moved:
            self._calls.append((self._count, entry))
            self._moved = False

    def moves(self, buffers: list, before: list) -> None:
        """A module's call has changed its buffers."""
        if self.heals and buffers:
            self._moved = True
            for buffer, old in zip(buffers, before, strict=True):
                self._before.setdefault(id(buffer), (buffer, old))

    def exchanged(self) -> None:
        """What was computed so far counts."""
        self._count = 0
        for done in (self._entries, self._calls, self._before, self._sources):
            done.clear()  # type: ignore[attr-defined]

    def loaded(self) -> None:
        """The script has put other values into the state: compare all of it at the next exchange."""
        self._asks, self._found = True, None

    # -- looking

    def look(self) -> Line:
        """Some of the state, or all of it, as a few numbers."""
        now = perf_counter_ns()
        passed, self._looked_at = now - self._looked_at if self._looked_at else 0, now
        mark = (ctx.era, ctx._numbered, sum(map(_held, ctx._numbers)))
        if mark != self._found or self.rounds.count >= _LOOK_AGAIN:
            self._find()
            self._found = mark
        chosen = self.rounds.choose()
        if chosen.start == 0 and len(chosen):
            self._began = ctx.record.steps
        found = _hash([self._blocks[i] for i in chosen])
        asks, self._asks = self._asks, False
        return Line(found - (1 << 63), perf_counter_ns() - now if len(chosen) else 0, passed, asks)

    def compare(self, lines: np.ndarray) -> None:
        """Every rank's ``look``; Healed if what led to this exchange is to be computed again."""
        every = lines.tolist()
        if any(line[0] != every[0][0] for line in every):
            self._differ()
        elif self.rounds.learn(every):
            self.agreed = self._began

    def check(self, before: str) -> None:
        """Compare all of the state now: something is saved, or the script ends. Nothing has come from it since."""
        if not here() or self._checked == (ctx.moves, ctx.era, self._count):
            return
        self._checked = ctx.moves, ctx.era, self._count  # once, where much is saved between two steps
        self._find()
        every = until_none_is_lost(lambda: ctx.world.allgather_alike(np.array([_hash(self._blocks) - (1 << 63)])),
                                   lineage.renew)
        if (every == every[0]).all():
            self.agreed = ctx.record.steps
        else:
            until_none_is_lost(lambda: self._differ(before), lineage.renew)

    def _find(self) -> None:
        self._state = _state()
        self._blocks = [block for tensor in self._state.values() for block in _blocks(tensor)]
        sizes = [*(block.nbytes for block in self._blocks), _LIKE]
        self._blocks.append(_STREAMS)
        if (ctx.era, sizes) != self._sizes:
            self._sizes = ctx.era, sizes
            self.rounds.begin(sizes)
        self.rounds.count = 0

    # -- a difference

    def _differ(self, before: str = "") -> None:
        """Find what differs and who is alone with it; then go on, or stop."""
        world, steps = ctx.world, ctx.record.steps
        self._find()
        if ctx.share_from:
            self._take_over()
            return
        now = self._hashes()
        after = []
        if self.heals and not before:
            after = [buffer.detach().clone() for buffer, _ in self._before.values()]
            _put(list(self._before.values()))
        every = world.allgather((now, self._hashes()))
        found, to_heal = judged([now for now, _ in every]), judged([then for _, then in every])
        if streams := found.pop(_STREAMS, None):
            to_heal.pop(_STREAMS)
            self._streams_differ(streams[0], streams[1], before)
        if not found and not to_heal:  # ranks have looked at other tensors: one was gone sooner here than there
            _put([(buffer, held) for (buffer, _), held in zip(self._before.values(), after, strict=False)])
            self._sizes = None
            return
        self._say(to_heal or found, steps, before, bool(to_heal))
        if not self.heals:
            return
        self._heal({name: right or 0 for name, (right, _) in to_heal.items()})
        self.agreed = steps
        if before:
            return
        if any(each.broken for each in ctx.gradients.passes):
            ctx.record.notice(f"step {steps + 1} cannot be computed again: the gradients of the rank that was alone "
                              "count in it")
            return
        wrong = {rank for _, ranks in (*found.values(), *to_heal.values()) for rank in ranks}
        good = next((rank for rank in range(world.size) if rank not in wrong), 0)
        self._again(good)
        raise Healed

    def _take_over(self) -> None:
        """Ranks that have each done all of the work differ: where most are alike they are right, else the first is."""
        found = judged(ctx.world.allgather(self._hashes()))
        if streams := found.pop(_STREAMS, None):
            self._streams_differ(*streams, "")
        elif not found:  # they have looked at other tensors
            self._sizes = None
            return
        self._heal({name: right or 0 for name, (right, _) in found.items()})
        ctx.sharing.differ()

    def _streams_differ(self, right: int | None, ranks: list[int], before: str) -> None:
        """Numbers were drawn on some ranks only. Any rank's streams are as good as another's, if all have the same."""
        alone = [] if right is None else [ctx.members[rank] for rank in ranks]
        steps = ctx.record.steps
        ctx.record.event("differ", step=steps, tensors=[_STREAMS], ranks=alone, agreed=self.agreed, healed=self.heals)
        who = "on some ranks only" if not alone else f"on rank {alone[0]} only" if len(alone) == 1 else (
            f"on ranks {', '.join(map(str, alone))} only")
        text = f"the ranks' random streams differ: something drew numbers {who}"
        if text not in self._said:
            self._said.add(text)
            going_on = f"; all ranks continue from rank {ctx.members[right or 0]}'s" if self.heals else ""
            ctx.record.notice(f"{text}. Found {f'before {before}' if before else f'in step {steps + 1}'}{going_on}")
        if self.heals:
            states = ctx.world.allgather(random.state() if ctx.world.rank == (right or 0) else None)
            random.restore(states[right or 0])

    def _hashes(self) -> dict[str, int]:
        found = {name: _hash(_blocks(tensor)) for name, tensor in self._state.items()}
        found[_STREAMS] = int.from_bytes(random.fingerprint()[:8], "little")
        return found

    def _say(self, found: dict, steps: int, before: str, stands: bool) -> None:
        """``stands``: it is still there when this step's calls have not been made."""
        where = f"before {before}" if before else f"in step {steps + 1}"
        nobody = [name for name, (right, _) in found.items() if right is None]
        alone = sorted({ctx.members[rank] for right, ranks in found.values() if right is not None for rank in ranks})
        names = list(found)[:3] + [f"{len(found) - 3} more"] * (len(found) > 3)
        since = f"they were last equal at step {self.agreed}"
        ctx.record.event("differ", step=steps, tensors=list(found)[:100], ranks=alone, agreed=self.agreed,
                         healed=self.heals and not nobody)
        if nobody and self.heals and stands:
            kept = snapshot_file.found(ctx.record.folder / runfolder.SNAPSHOTS)
            left = f"; the snapshot of step {int(kept[0][:-5])} is kept (oars resume {ctx.record.folder.name})" \
                if kept else "; there is no snapshot to continue from (--snapshot 10m takes some)"
            raise Astray(f"oars: the ranks' weights differ {where}, in {', '.join(nobody[:3])}: {since}. With "
                         f"{ctx.size} ranks it is not known which one is right, so the run stops{left}")
        who = f"rank {alone[0]} is" if len(alone) == 1 else f"ranks {', '.join(map(str, alone))} are"
        who = f"{who} not like the others" if alone else f"with {ctx.size} ranks it is not known which one is right"
        taken = "it takes the others'" if len(alone) == 1 else "they take the others'"
        healed = "" if not self.heals else f"; {taken}" if stands else "; it is computed again"
        late = steps - self.agreed if self.heals else 0
        spread = f", and what was computed with it in up to {late} steps is in the average" if late > 0 else ""
        text = f"the ranks' weights differ in {', '.join(names)}: {who}"
        if self.heals or text not in self._said:  # what is not healed is found again and again
            self._said.add(text)
            ctx.record.notice(f"{text}. Found {where}, {since}{healed}{spread}")

    def _heal(self, rights: dict[str, int]) -> None:
        for name, right in rights.items():
            for block in _blocks(self._state[name]):
                data = block if isinstance(block, np.ndarray) else _numpy(block.cpu())
                broadcast(ctx.world, data, right)
                if data is not block:
                    block.copy_(torch.from_numpy(data))

    def _again(self, good: int) -> None:
        """Do all again that was computed from rows since the last exchange, with what the state is now."""
        alive = {number: entry for number, ref in self._entries if (entry := ref()) is not None}
        alive.update(self._calls)
        common = sorted(set.intersection(*map(set, ctx.world.allgather(list(alive)))))
        memo: dict = {}
        for number in common:
            try:
                lineage.again(alive[number], memo, moves=True)
            except Irreplaceable:  # where a backward needs it, it says so
                continue
            for place, ref in alive[number].alike.items():
                if (old := ref()) is not None:
                    old.data.copy_(memo[alive[number]][place].detach())
        def of_the_good(grad: torch.Tensor) -> torch.Tensor:
            taken = grad.detach().to("cpu", copy=True).contiguous()
            for block in _blocks(taken):
                broadcast(ctx.world, block, good)
            return taken.to(grad.device)

        for each in ctx.gradients.passes:
            each.agree(of_the_good)


# ---- the state as bytes ---------------------------------------------------------------------------------------------


def _state() -> dict[str, torch.Tensor]:
    """All tensors, by names that are the same on every rank."""
    found: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in names and not isinstance(tensor, Rows) and not is_lazy(tensor):
            names[id(tensor)] = name
            found[name] = tensor

    for number, module in call.called():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            add(f"{type(module).__name__} {number} {name}", tensor)
    for optimizer, number in sorted(ctx._numbers.items(), key=lambda pair: pair[1]):
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):  # Keras's own
            for i, variable in enumerate(optimizer.variables):
                add(f"{kind} {number} variable {i}", variable.value)
            continue
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if isinstance(p, Rows):
                continue
            add(f"{kind} {number} parameter {i}", p)
            for key, value in list(optimizer.state.get(p, {}).items()):
                if isinstance(value, torch.Tensor):
                    add(f"{kind} {number} {key} of {names[id(p)]}", value)
    return found


def _held(optimizer: Any) -> int:
    """How much state an optimizer has; Keras's have variables."""
    return len(optimizer.state if isinstance(optimizer, Optimizer) else optimizer.variables)


def _blocks(tensor: torch.Tensor) -> list[Any]:
    """The bytes of a tensor in pieces, as they lie in memory; of one that does not lie there densely, none."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return []
    with torch.no_grad():
        strides = tensor.stride()
        dense = tensor.detach().permute(sorted(range(tensor.dim()), key=lambda d: -strides[d]))
        if not dense.is_contiguous():
            return []
        flat = dense.reshape(-1).view(torch.uint8)
        data = _numpy(flat) if flat.device.type == "cpu" else flat
    return [data[i : i + BLOCK] for i in range(0, len(data), BLOCK)]


def _hash(blocks: list[Any]) -> int:
    found = 0
    there = [block for block in blocks if isinstance(block, torch.Tensor)]
    for block in blocks:
        if block is _STREAMS:
            found = digest(np.frombuffer(random.fingerprint(), np.uint8), found)
        elif isinstance(block, np.ndarray):
            found = digest(block, found)
    if there:  # one wait for the device
        for value in torch.stack([_on_device(block) for block in there]).tolist():
            found = digest(np.frombuffer(np.int64(value).tobytes(), np.uint8), found)
    return found


_odd: dict[torch.device, torch.Tensor] = {}


def _on_device(block: torch.Tensor) -> torch.Tensor:
    """A sum of a block's numbers, each times an odd one, as NumPy's ``digest`` makes it."""
    if block.device not in _odd:
        made = torch.Generator().manual_seed(22)
        _odd[block.device] = torch.randint(0, 1 << 62, (512,), generator=made).mul_(2).add_(1).to(block.device)
    whole = block.numel() // 4096 * 4096
    rest = block[whole:].to(torch.int64)
    found = (rest * torch.arange(1, 2 * len(rest), 2, device=block.device)).sum()
    if whole:
        found = found + (block[:whole].view(torch.int64).view(-1, 512).sum(0) * _odd[block.device]).sum()
    return found


def _put(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in values:
            buffer.data.copy_(value)


# ---- where else it is asked -----------------------------------------------------------------------------------------


def here() -> bool:
    """Whether the ranks can meet here: the script's own code runs, in the main thread, and all of them do the same."""
    return (ctx.size > 1 and random.in_order() and not random.inside() and not ctx.plain
            and not ctx.busy and not ctx.separate and not ctx.world.astray and not ctx.record.played)


def saving(inner: Callable[..., Any]) -> Any:
    """Around ``torch.save``: what is saved is what all ranks have."""
    def save(*args: Any, **kwargs: Any) -> Any:
        # (PyTorch itself calls this to pickle a tensor, on one rank and not on another.)
        if ctx.guard is not None and here() and of_the_script(sys._getframe(1).f_code.co_filename):
            ctx.guard.check("something is saved")
        return inner(*args, **kwargs)

    return save


def loading(inner: Callable[..., Any]) -> Any:
    """Around ``load_state_dict``."""
    def load(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        if ctx.guard is not None:
            ctx.guard.loaded()
        return out

    return load
