"""``--prune``: the script's networks get smaller between its steps, on all ranks alike.

After a step is committed the first rank looks whether a cut is due, whether the training can bear it, and whether no
graph waits for its backward; it decides what leaves (``oars.evolve``) and tells the others, so ranks that round
differently cut alike. Then every rank cuts its models, the optimizers' state and the script's own copies.

Nothing in the script notices: parameters stay the same objects, and ``state_dict`` gives the script's own shapes, with
zeros where units are gone (``pruned_calls``). Who writes into what it gave (an EMA does) has it taken over before the
model is used.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from oars import runfolder
from oars.adapt.python import random
from oars.adapt.python.clock import perf_counter
from oars.adapt.replay.tape import tape
from oars.adapt.torch.context import ctx
from oars.adapt.torch.replay import state as capture
from oars.adapt.torch.rows.tensor import Rows
from oars.evolve import NothingToCut, cut, grow, schedule
from oars.evolve.cut import Cut
from oars.evolve.graph import Net, operations
from oars.evolve.grow import Growth, join, replace
from oars.evolve.trial import Example, brief
from oars.plan import Pruning

ROWS = 4  # of a batch, in an example


class Model:
    """One of the script's models: a module that it calls itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.example: Example | None = None
        self.net: Net | None = None
        self.attributes: dict[str, dict[str, Any]] = {}  # that cuts have changed
        self.grown: set[str] = set()  # the tensors that were widened


class Pruner:
    """One rank's part; ``ctx.pruner``."""

    def __init__(self, plan: Pruning | None, widen: dict[str, int], widen_when: int) -> None:
        self.plan = plan or schedule.never()
        self.schedule, self.cuts, self.widen = schedule.Schedule(self.plan), plan is not None, widen
        self.widened, self.widen_when = not widen, widen_when
        self.models: list[Model] = []
        self.inside = 0  # a call of a model is under way
        self.passes: WeakKeyDictionary[Any, schedule.Pass] = WeakKeyDictionary()
        self.latest = schedule.Pass()
        self.main: int | None = None  # the optimizer whose steps count
        self.examined = False
        self.kept: Any = WeakTensorKeyDictionary()  # parameter -> what was cut of it
        self.lent: list[tuple[torch.Tensor, int, torch.Tensor, cut.Dims]] = []  # by state_dict
        self.asked = 0  # times that the script has asked for a state_dict since the first step
        self.said = False
        self.events: list[dict[str, Any]] = []  # of the cuts so far: a voice that dies may not have written the last
        self.spoke = False
        gc.freeze()  # what is there now is no script's: what looks for copies of models need not look at it
        atexit.register(self.leave)

    # -- what the script does

    def called(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """The script calls a module itself."""
        self.take_back()
        module = getattr(module, "_orig_mod", module)
        model = next((each for each in self.models if each.module is module), None)
        if model is None:
            model = Model(module)
            self.models.append(model)
        if model.example is None and torch.is_grad_enabled() and module.training and not ctx.record.played:
            model.example = _example(args, kwargs)

    def take_back(self) -> None:
        """The script may have written into what ``state_dict`` gave it."""
        lent, self.lent = self.lent, []
        for given, version, real, dims in lent:
            if given._version != version:
                with torch.no_grad():
                    real.data.copy_(cut.select(given, dims))

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: cut, if it is time."""
        if ctx.record.played:
            return
        number = ctx.number(optimizer)
        if self.main is None:
            self.main = number
        if number == self.main:
            loss = _loss()
            rate = optimizer.param_groups[0].get("lr")
            self.schedule.step(loss, float(rate) if isinstance(rate, (int, float)) else None)
        if not self.widened:
            steps = self.schedule.clock.steps
            if steps >= self.widen_when if self.widen_when else steps % schedule.LONGEST == 0:
                self._meet()
        elif self.cuts and (not self.examined or self.schedule.due()):
            self._meet()
        elif self.cuts and not self.said and self.schedule.clock.now(self.plan["unit"]) is None:
            self.said = True
            ctx.record.notice("nothing is cut: the batches come from no loader that has a length, so passes cannot be "
                              "counted; say steps: --prune-when 200..2000steps")

    # -- a cut

    def _meet(self) -> None:
        """All ranks: the first one decides, each does it."""
        began = perf_counter()
        if ctx.world is None:
            decision = self._decide()
        else:
            decision = ctx.world.broadcast(self._decide)
        if "nothing" in decision:
            raise NothingToCut(decision["nothing"])
        if "examined" in decision:
            self.examined = True
            ctx.record.event("prunable", layers=decision["examined"])
        if "growths" in decision:
            self._grow(decision["growths"])
        if decision.get("over"):
            self.schedule.end(decision["over"])
            ctx.record.notice(decision["over"])
        if "cuts" in decision:
            self._cut(decision["cuts"], decision["event"], began)

    def _decide(self) -> dict[str, Any]:
        try:
            with tried():
                if capture.to_be_differentiated():
                    return {}
                if not self.widened:
                    return self._widen() if self.widen_when or self.schedule.still() else {}
                if not self.examined:
                    return self._examine()
                if not self.schedule.bears():
                    return {"over": self.schedule.over}
                return self._choose()
        except Exception as error:  # no reason to end a training
            return {"over": f"nothing is cut any more ({brief(error)})"}

    def _trained(self) -> list[Model]:
        """The models that are trained and are no part of another one."""
        parts = {id(part) for each in self.models for part in each.module.modules() if part is not each.module}
        return [each for each in self.models if each.example is not None and id(each.module) not in parts]

    def _widen(self) -> dict[str, Any]:
        found: dict[int, list[Growth]] = {}
        why: dict[str, str] = {}
        for model in self._trained():
            assert model.example is not None
            examples = [model.example, *self._inner(model)]
            found[self.models.index(model)], reasons = grow.widened(model.module, examples, self.widen)
            why.update(reasons)
        if not any(found.values()):
            if not self.models:
                return {}
            listed = "; ".join(f"{layer}: {reason}" for layer, reason in list(why.items())[:3])
            return {"nothing": f"--widen {', '.join(self.widen)} makes no layer wider ({listed or 'there is none'})"}
        return {"growths": found}

    def _examine(self) -> dict[str, Any]:
        layers: dict[str, str] = {}
        self._nets()
        for model, net in self._known():
            name = type(model.module).__name__
            layers.update({f"{name}.{layer}" if layer else name: why for layer, why in net.reasons.items()})
        if not layers and not any(each.example is not None for each in self.models):
            return {}  # no model was called yet
        if not any(net.roots for _, net in self._known()):
            why = "; ".join(f"{layer}: {reason}" for layer, reason in list(layers.items())[:3])
            more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
            return {"nothing": f"--prune: no layer of this script can be cut ({why or 'it has no layers'}{more}); "
                               "leave --prune out"}
        return {"examined": layers}

    def _nets(self) -> None:
        models = self._trained()
        for model in models:
            if model.net is not None:
                continue
            mine = {id(p) for p in model.module.parameters()}
            shared = [other for other in models if other is not model
                      and any(id(p) in mine for p in other.module.parameters())]
            optimizers = [o for o in _optimizers() if any(id(p) in mine for g in o.param_groups for p in g["params"])]
            odd = next(filter(None, map(cut.foreign_state, optimizers)), "")
            assert model.example is not None
            net = model.net = Net(model.module, [model.example, *self._inner(model)], lambda p: p in ctx.optimizer_of)
            if odd or shared:
                why = "its weights are in two models" if shared else \
                    f"the optimizer holds {odd!r}, which does not have the weights' shapes"
                net.reasons = dict.fromkeys([n for n, m in model.module.named_modules() if isinstance(m, nn.Linear)],
                                            why)
            else:
                net.examine()

    def _inner(self, model: Model) -> list[Example]:
        """Modules in a model that the script also calls by themselves."""
        names = {id(part): name for name, part in model.module.named_modules() if name}
        return [each.example._replace(path=names[id(each.module)]) for each in self.models
                if each.example is not None and id(each.module) in names]

    def _known(self) -> list[tuple[Model, Net]]:
        return [(model, model.net) for model in self._trained() if model.net is not None]

    def _choose(self) -> dict[str, Any]:
        number = self.schedule.done + 1
        self._nets()
        cuts: dict[int, Cut] = {}
        for model, net in self._known():
            found = net.choose(lambda first: schedule.width(first, self.plan["keep"], number),
                               functools.partial(self._worth, dict(model.module.named_parameters()), number),
                               norms=self.plan["score"] == "wv")
            if found is not None:
                cuts[self.models.index(model)] = found
        event: dict[str, Any] = {"cut": number, "operations_before": self._operations()}
        return {"cuts": cuts, "event": event}

    def _operations(self) -> int:
        return sum(operations(model.module, model.example) or 0 for model in self._trained()
                   if model.example is not None)

    def _worth(self, tensors: Mapping[str, torch.Tensor], number: int, name: str) -> torch.Tensor | None:
        p = tensors.get(name)
        if p is None:
            return None
        if self.plan["score"] == "random":
            generator = torch.Generator().manual_seed(zlib.crc32(f"{ctx.plan.seed} {number} {name}".encode()))
            return torch.rand(p.shape, generator=generator)
        worth = p.detach().square()
        if self.plan["score"] == "wv":
            for optimizer in _optimizers():
                held = optimizer.state[p] if p in optimizer.state else {}
                moment = next((held[key] for key in ("exp_avg_sq", "square_avg", "sum") if key in held), None)
                if isinstance(moment, torch.Tensor) and moment.shape == p.shape:
                    worth = worth * moment
        return worth

    def _cut(self, cuts: dict[int, Cut], event: dict[str, Any], began: float) -> None:
        before = sum(p.numel() for model in self._trained() for p in model.module.parameters())
        for number, each in cuts.items():
            self.apply(self.models[number], each)
        self.schedule.made()
        with tried():
            after = self._operations()
        widths = {f"{number}.{name}" if number else name: indices
                  for number, model in enumerate(self._trained()) for name, indices in _widths(model.module)}
        parameters = sum(p.numel() for model in self._trained() for p in model.module.parameters())
        self.events.append({"step": ctx.record.steps, "operations": after, "widths": widths,
                            "parameters_before": before, "parameters": parameters,
                            "milliseconds": round(1e3 * (perf_counter() - began), 3), **event})
        self._tell()

    def _tell(self) -> None:
        """The voice writes down the last cut; one that has become the voice all of them, once."""
        if ctx.record.voice:
            for event in self.events if not self.spoke else self.events[-1:]:
                ctx.record.event("cut", **event)
            self.spoke = True

    def apply(self, model: Model, change: Cut) -> None:
        """Cut a model, what optimizers hold for it, and the script's copies of it."""
        names = dict(cut.tensors_of(model.module))
        shapes = {id(t): t.shape for t in names.values()}
        copies = list(_copies(model.module, names, change, self._by_state_dict()))
        done = cut.cut_module(model.module, change)
        for p, kept, _ in done.values():
            self.kept[p] = kept
        for optimizer in _optimizers():
            cut.cut_state(optimizer, done, shapes)
        for other in copies:
            if isinstance(other, nn.Module):
                for p, kept, _ in cut.cut_module(other, change).values():
                    self.kept[p] = kept
            else:
                for tensor, dims in other:
                    cut.shrink(tensor, dims)
        for path, values in change.attributes.items():
            model.attributes.setdefault(path, {}).update(values)
        self._changed()

    def _grow(self, growths: dict[int, list[Growth]]) -> None:
        self.widened = True
        trained = self._trained()
        with tried():
            operations_before = self._operations()
        before = sum(p.numel() for model in trained for p in model.module.parameters())
        for number, changes in growths.items():
            for change in changes:
                model = self.models[number]
                module = model.module
                twins = list(_twins(module, dict(cut.tensors_of(module))))
                join(module, change, _optimizers())
                for twin in twins:
                    join(twin, change, [])
                for path, values in change.attributes.items():
                    model.attributes.setdefault(path, {}).update(values)
                model.grown |= set(change.parts)
        self._changed()
        with tried():
            operations_now = self._operations()
        ctx.record.event("widened", step=ctx.record.steps, operations_before=operations_before,
                         operations=operations_now, parameters_before=before, parameters=sum(
                             p.numel() for model in trained for p in model.module.parameters()))

    def _changed(self) -> None:
        """Shapes have changed: what was known of them is found again."""
        ctx.changes += 1
        if ctx.world is not None:
            ctx.gradients.plans.clear()
        if ctx.guard is not None:
            ctx.guard.loaded()
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()

    def _by_state_dict(self) -> bool:
        """Whether the script's copies of weights follow ``state_dict``, which keeps its shapes."""
        return self.asked >= self.schedule.clock.steps / 2 > 0

    # -- snapshots, and the end

    def state(self) -> dict[str, Any]:
        """What a snapshot holds: what is left of each tensor, and where the schedule stands."""
        return {"schedule": self.schedule.state(), "models": [
            {"kept": cut.kept_in(model.module), "attributes": model.attributes, "grown": {
                name: list((cut.kept_in(model.module).get(name) or (t.shape,))[0])
                for name, t in cut.tensors_of(model.module) if name in model.grown}} for model in self.models],
            "widened": self.widened, "examined": self.examined, "main": self.main, "asked": self.asked}

    def arrive(self, held: dict[str, Any] | None) -> None:
        """A resumed script, or a rank that joins, stands where the snapshot was taken: cut its models as they were."""
        if held is None:
            return
        for model, of in zip(self.models, held["models"], strict=False):
            there = dict(cut.tensors_of(model.module))
            if of["grown"] and not model.grown and any(
                    tuple(there[name].shape) != tuple(shape) for name, shape in of["grown"].items()):
                self._widen_again(model, of["grown"], of["attributes"])
            tensors = {name: tuple(None if part is None else tuple(part) for part in dims)
                       for name, (shape, dims) in of["kept"].items()
                       if tuple(there[name].shape) == tuple(shape)}  # a copy was cut with its model
            attributes = {path: {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
                          for path, values in of["attributes"].items()}
            if tensors:
                with torch._C.DisableTorchFunction():  # what was played left no values
                    self.apply(model, Cut(tensors, attributes))
        self.widened, self.examined = held["widened"], held["examined"]
        self.main, self.asked = held["main"], held["asked"]
        self.schedule.restore(held["schedule"], self.latest)

    def _widen_again(self, model: Model, shapes: dict[str, list[int]], attributes: dict[str, dict[str, Any]]) -> None:
        """The widths that a model, and its copies, had before they were cut; values come with the snapshot."""
        there = dict(cut.tensors_of(model.module))
        model.grown, model.attributes = set(shapes), attributes
        for each in [model.module, *_twins(model.module, there)]:
            tensors = dict(cut.tensors_of(each))
            with torch._C.DisableTorchFunction():
                for name, shape in shapes.items():
                    replace(tensors[name], tensors[name].new_zeros(shape))
            for path, values in attributes.items():
                part = each.get_submodule(path)
                for key, size in values.items():
                    setattr(part, key, tuple(size) if isinstance(size, list) else size)
        self._changed()

    def leave(self) -> None:
        """The script is over: the voice puts the small networks into the run folder."""
        if not ctx.in_step or not ctx.record.voice or ctx.record.played:
            return
        if not self.spoke:
            self._tell()
        number = 0
        for model in self.models:
            if cut.kept_in(model.module):
                tensors = {name: t.detach().cpu() for name, t in cut.tensors_of(model.module)}
                attributes = {path: {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
                              for path, values in model.attributes.items()}
                torch.save({"state": tensors, "attributes": attributes}, ctx.record.folder / runfolder.small(number))
                number += 1


@contextmanager
def tried() -> Iterator[None]:
    """What is done in here with copies of models is nobody else's: no rank, no tape and no random stream notices."""
    before, streams = (ctx.changes, ctx.mode, ctx.marked), random.state()
    ctx.trying = True
    tape.busy += 1
    try:
        with ctx.out_of_step() if ctx.world is not None else nullcontext():
            yield
    finally:
        tape.busy -= 1
        ctx.trying = False
        ctx.changes, ctx.mode, ctx.marked = before
        random.restore(streams)


def _loss() -> torch.Tensor | None:
    from oars.adapt.torch import step_log

    loss = ctx.gradients.last_loss if ctx.world is not None else step_log.last_loss()
    return loss if isinstance(loss, torch.Tensor) and not isinstance(loss, Rows) and loss.numel() == 1 else None


def _optimizers() -> list[Optimizer]:
    return [optimizer for optimizer, _ in sorted(ctx._numbers.items(), key=lambda pair: pair[1])
            if isinstance(optimizer, Optimizer)]


def _example(args: tuple, kwargs: dict) -> Example:
    """A few rows of what a model is called with."""
    held: list[int] = []

    def few(x: Any) -> Any:
        if isinstance(x, Rows):
            part = x.local.detach()
            return part.narrow(x.dim_, 0, min(ROWS, part.shape[x.dim_])).clone()
        if isinstance(x, torch.Tensor):
            if not held and x.dim():
                held.append(x.shape[0])
            part = x.detach()
            return part[:ROWS].clone() if x.dim() and x.shape[0] == held[0] else part.clone()
        return x

    args, kwargs = tree_map(few, (args, kwargs))
    return Example("", args, kwargs)


def _widths(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, part in module.named_modules():
        kept = cut.kept_of(part).get("weight")
        if kept is not None and isinstance(part, (nn.Linear, nn.modules.conv._ConvNd)):
            out = 1 if getattr(part, "transposed", False) else 0
            if kept[1][out] is not None:
                yield name, cut.tensor_of(part, "weight").shape[out]


def _twins(model: nn.Module, names: Mapping[str, torch.Tensor]) -> Iterator[nn.Module]:
    """The script's copies of a model, of its own class and shapes."""
    shapes, own = {name: tensor.shape for name, tensor in names.items()}, {id(tensor) for tensor in names.values()}
    for thing in gc.get_objects():
        if type(thing) is type(model) and thing is not model:
            theirs = dict(cut.tensors_of(thing))
            if {n: t.shape for n, t in theirs.items()} == shapes and not own & {id(t) for t in theirs.values()}:
                yield thing


def _copies(model: nn.Module, names: Mapping[str, torch.Tensor], change: Cut, by_state_dict: bool) -> Iterator[Any]:
    """The script's copies of a model, of its own class and shapes; and of its weights alone, in dictionaries and lists:
    these as (tensor, what is left)."""
    shapes = {name: tensor.shape for name, tensor in names.items()}
    first = next(iter(change.tensors))
    own = {id(tensor) for tensor in names.values()}
    order = [name for name, _ in model.named_parameters()]
    yield from _twins(model, names)
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is dict and first in thing and not by_state_dict:
            if all(isinstance(t := thing.get(name), torch.Tensor) and t.shape == shapes[name] and id(t) not in own
                   and t.data_ptr() != names[name].data_ptr() for name in change.tensors if name in order):
                yield [(thing[name], change.tensors[name]) for name in change.tensors if name in thing]
        elif kind is list and len(thing) == len(order) and not by_state_dict:
            if all(type(t) is torch.Tensor and t.shape == shapes[name] and t.data_ptr() != names[name].data_ptr()
                   for t, name in zip(thing, order, strict=True)):
                yield [(t, change.tensors[name]) for t, name in zip(thing, order, strict=True)
                       if name in change.tensors]
