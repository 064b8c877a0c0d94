"""Lineage: rows remember how they were made, so that the living can make a dead rank's rows anew.

Every operation of the script on rows, and every module call, is *performed*: when a rank is lost on the way, it begins
anew with its arguments cut for the ranks that are left. Rows from before the loss are made again when they are used
next: from the loader's sample numbers, through the same operations, with the same random numbers. The script sees none
of this; its loop goes on with the values of the whole batch.

A result that all ranks hold alike (a loss, a gathered tensor) keeps its value, which was complete. Where it has a graph
it is a *boundary*: what is above it in the graph is the same on every rank, what is below belongs to rows. When a
backward has to be done again, the gradients that arrived at its boundaries go back through graphs made anew
(``backward/gradients.py``, ``recovery/backward_pass.py``).

Rows that outlive a step of their optimizer cannot be made again: the weights have moved on. A script that counts right
answers behind ``optimizer.step()`` uses such. So before the first step what a model gave is gathered, and before those
that follow if its rows, or what was made of them, were seen to be used so.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from oars import debug
from oars.adapt.python import random
from oars.adapt.torch.context import ctx, offsets_of, own
from oars.adapt.torch.rows import tensor as rows_
from oars.adapt.torch.rows.mirror import recent
from oars.adapt.torch.rows.tensor import Rows
from oars.engine.dissent import Whole
from oars.engine.world import RankLost

ON_WHOLE: dict[Callable, Callable] = {rows_.operate: rows_.gathered, rows_.change: rows_.change_whole}  # instead
_DEEP = 500  # operations that rows go back to their samples
_outlives: weakref.WeakSet = weakref.WeakSet()  # modules whose results were used behind a step
_judged: weakref.WeakSet = weakref.WeakSet()  # modules of which that can have been seen
waiting: deque[tuple[Entry, dict[int, Rows]]] = deque(maxlen=64)  # what may outlive a step: copies, by place
_LARGE = 4 << 20  # bytes: what is more is not gathered for that


class Irreplaceable(Exception):
    """What was lost with a rank cannot be made anew."""


class Entry:
    """One operation: what was called, with what, in which mode, and what came out."""

    __slots__ = ("__weakref__", "alike", "args", "autocast", "call", "changes", "depth", "era", "func", "grad",
                 "kwargs", "moves", "of", "outs", "plain", "state")

    def __init__(self, call: Callable, func: Any, args: tuple, kwargs: dict, state: Any) -> None:
        self.call, self.func, self.args, self.kwargs, self.state = call, func, args, kwargs, state
        self.grad, self.autocast = torch.is_grad_enabled(), _autocast()
        self.outs: dict[int, Any] = {}  # place among the results -> weak reference to the rows the script has
        self.alike: dict[int, Any] = {}  # the same of results that all ranks hold alike and that have a graph
        self.era, self.moves = ctx.era, ctx.moves
        self.of = func if isinstance(func, torch.nn.Module) else None  # kept when its result is
        self.changes = call is rows_.change  # its first argument, in place
        # Tensors that all ranks hold, as they were; parameters move on, see ``_moved_on``.
        self.plain = [(a, a._version) for a in (*args, *kwargs.values())
                      if isinstance(a, torch.Tensor) and not a.requires_grad]
        known = (a.entry for a in (*args, *kwargs.values()) if isinstance(a, Ref) and a.entry is not None)
        self.depth: int = 1 + max((entry.depth for entry in known), default=0)


class Ref:
    """Stands for a tensor among an entry's arguments: which operation gave it, in which place."""

    __slots__ = ("entry", "place")

    def __init__(self, entry: Entry | None, place: int) -> None:
        self.entry, self.place = entry, place  # no entry: nobody knows any more


UNKNOWN = Ref(None, 0)


def perform(call: Callable, func: Any, args: tuple, kwargs: dict, draws: str = "") -> Any:
    """``call(func, args, kwargs)``, again and again until no rank is lost on the way; its results remember it.

    ``draws``: "" if it draws no random numbers, "torch" if from PyTorch's streams, "any" if perhaps from others too.
    """
    if ctx.busy:
        return call(func, args, kwargs)
    for a in args[0] if args and type(args[0]) is list else args:
        if type(a) is Rows and a.made is not None and a.made.entry.moves != ctx.moves:
            _outlived(a.made.entry)
    if torch._C._len_torch_dispatch_stack():  # see ``module_call``
        call = ON_WHOLE.get(call, call)
    state = random.state(draws == "torch") if draws else None
    refs = _before_change(args) if call is rows_.change else None
    ctx.busy = True
    ctx.performed += 1
    around, ctx.place, ctx.drawn = ctx.place, (ctx.performed, 0), state
    try:
        while True:
            try:
                if ctx.era:
                    for a in tree_leaves((args, kwargs)):
                        if isinstance(a, Rows) and a.era != ctx.era:
                            refresh(a)
                out = call(func, args, kwargs)
                break
            except (RankLost, rows_.Otherwise) as error:
                if isinstance(error, RankLost):
                    renew()
                if state is not None:
                    random.restore(state)
            except Whole as all_:
                if call not in ON_WHOLE:
                    raise all_.error from None
                if state is not None:
                    random.restore(state)
                out = ON_WHOLE[call](func, args, kwargs)
                break
    finally:
        ctx.busy, ctx.place, ctx.drawn = False, around, None
    _remember(out, call, func, args, kwargs, state, refs)
    return out


def renew() -> None:
    """Adopt the ranks that are left."""
    ctx.renew()
    if debug.on:
        debug.say(f"era {ctx.era}: batches are cut for ranks {ctx.members}")
    recent.clear()


def source(rows: list[Rows], fetch: Callable[[], list[Rows]]) -> None:
    """The rows of a loader's batch remember how to read them again."""
    _remember(rows, _read, fetch, (), {}, None, ())


def _read(fetch: Callable[[], list[Rows]], args: tuple, kwargs: dict) -> list[Rows]:
    return fetch()


def _remember(out: Any, call: Callable, func: Any, args: tuple, kwargs: dict, state: Any, refs: tuple | None) -> None:
    entry = None
    leaves: list[Any] = [out] if isinstance(out, torch.Tensor) else tree_leaves(out)
    for place, leaf in enumerate(leaves):
        kind = type(leaf)
        if not issubclass(kind, torch.Tensor):
            continue
        rows = kind is Rows
        if not rows and (leaf.grad_fn is None or made_of(leaf) is not None):
            continue
        if entry is None:
            refs = tuple(map(_ref, args)) if refs is None else refs
            entry = Entry(call, func, refs, {k: _ref(v) for k, v in kwargs.items()}, state)
        if rows:
            leaf.made, leaf.version = Ref(entry, place), leaf.local._version
            entry.outs[place] = weakref.ref(leaf)
            if entry.depth > _DEEP and not leaf.local.requires_grad:
                _root(leaf)
        else:  # noted with the graph and not on the tensor, which is the script's: it may be pickled, or looked through
            node = leaf.grad_fn
            node.metadata.setdefault("oars", {})[leaf.output_nr] = Ref(entry, place)
            node.register_prehook(partial(_arrive, entry, place, leaf.output_nr))
            entry.alike[place] = weakref.ref(leaf)
    if entry is not None and ctx.guard is not None:
        ctx.guard.made(entry, leaves if call is _read else None)
    if entry is not None and entry.of is not None and (entry.of in _outlives or entry.of not in _judged):
        _wait(entry, leaves)


def _root(rows: Rows) -> None:
    """Rows with a long history (a state carried from batch to batch) begin a new one, from their whole."""
    begin_anew(rows, rows_.whole(rows, "lineage"))


def begin_anew(rows: Rows, full: torch.Tensor) -> None:
    """From here on these rows come from their whole, and from nothing before that."""
    rows.mirror = None
    entry = Entry(_rows_of_whole, (full, rows.dim_), (), {}, None)
    entry.outs[0] = weakref.ref(rows)
    rows.made, rows.version = Ref(entry, 0), rows.local._version


def from_whole(full: torch.Tensor, dim: int) -> Rows:
    """This rank's rows of a tensor that all ranks have whole."""
    rows = _rows_of_whole((full, dim), (), {})
    begin_anew(rows, full)
    return rows


def _rows_of_whole(func: tuple[torch.Tensor, int], args: tuple, kwargs: dict) -> Rows:
    """An entry's call: this rank's rows of a tensor that all ranks have whole; ``func`` is it, and its dimension."""
    full, dim = func
    offsets = offsets_of(full.shape[dim])
    return Rows(full.narrow(dim, *own(offsets)), offsets, dim)


def _arrive(entry: Entry, place: int, output: int, grads: tuple) -> None:
    if grads[output] is not None:
        ctx.gradients.arrived(entry, place, grads[output])


def made_of(a: torch.Tensor) -> Ref | None:
    """How a tensor that all ranks hold alike was made of rows, if it was: known by its place in the graph."""
    node: Any = a.grad_fn
    return node.metadata.get("oars", {}).get(a.output_nr) if node is not None else None


def _ref(a: Any) -> Any:
    if isinstance(a, Rows):
        return a.made if a.made is not None and a.local._version == a.version else UNKNOWN
    if isinstance(a, torch.Tensor):
        # With a graph it is needed anew, as there is a new graph behind it; else its value will do.
        return (made_of(a) or a) if a.requires_grad and torch.is_grad_enabled() else a
    if isinstance(a, (list, tuple, dict)):
        return tree_map(_ref, a, is_leaf=lambda x: isinstance(x, torch.Tensor))
    return a


def _before_change(args: tuple) -> tuple:
    """References to what an operation that changes its first argument is given, before it does."""
    refs = tuple(map(_ref, args))
    rows, value = args[0], args[-1]
    if refs[0] is UNKNOWN and isinstance(rows, Rows) and isinstance(value, Rows) and refs[-1] is not UNKNOWN and (
            value.local.untyped_storage().data_ptr() == rows.local.untyped_storage().data_ptr()):
        # ``x[:, 0] *= 2`` is a view, a change of it, and an assignment of it: the assignment tells all.
        return (rows.made or UNKNOWN, *refs[1:])
    return refs


def refresh(rows: Rows, used: bool = False) -> None:
    """Rows from before a loss: make them anew."""
    _made(_ref(rows), {}, used)


def current(a: Any) -> Any:
    """A tensor as it is: a boundary from before a loss is made anew, with a graph that is not used up."""
    made: Any = made_of(a) if isinstance(a, torch.Tensor) and not isinstance(a, Rows) else None
    return again(made.entry, {}, True)[made.place] if made is not None and made.entry.era != ctx.era else a


def again(entry: Entry, memo: dict, used: bool = False, moves: bool = False) -> list:
    """Do an operation again and return all it results in; rows the script still has are brought up to date.

    ``memo``: what has been done again already. ``used``: the graphs there are have been gone back through already.
    ``moves``: the first time does not count, so that what a model's call changes by itself is changed now.
    """
    if entry in memo:
        return memo[entry]
    args, kwargs = tree_map(lambda a: _made(a, memo, used) if isinstance(a, Ref) else a, (entry.args, entry.kwargs),
                            is_leaf=lambda a: isinstance(a, Ref))
    if any(a._version != version for a, version in entry.plain):
        raise Irreplaceable("a tensor that rows were computed from was changed in place later")
    if entry.moves != ctx.moves and _moved_on(entry):
        ctx.record.notice("rows kept from an earlier step were lost with a rank: they are computed again, with the "
                          "current weights")
    if entry.changes:  # in place: not what others of this memo use
        first = args[0]
        args = (Rows(first.local.clone(), first.offsets, first.dim_), *args[1:])
    now = random.state() if entry.state is not None else None
    busy, ctx.busy, before, ctx.again = ctx.busy, True, ctx.again, not moves
    try:
        with ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(entry.grad))
            for device, dtype in entry.autocast:
                modes.enter_context(torch.autocast(device, dtype=dtype))
            if now is not None:
                random.restore(entry.state)
            results = tree_leaves(entry.call(entry.func, args, kwargs))
    finally:
        ctx.busy, ctx.again = busy, before
        if now is not None:
            random.restore(now)
    entry.era = ctx.era
    memo[entry] = results
    for place, ref in entry.outs.items():
        rows = ref()
        if rows is not None and rows.made is not None and rows.made.entry is entry:
            new = results[place]
            rows.local, rows.offsets, rows.dim_, rows.mirror, rows.era = new.local, new.offsets, new.dim_, None, ctx.era
            rows.version = new.local._version
    return results


def _moved_on(entry: Entry) -> bool:
    """Whether weights that an operation used have been changed since by an optimizer."""
    return any(ctx.moved.get(ctx.optimizer_of.get(p, 0), 0) > entry.moves for p in _weights(entry))


def _weights(entry: Entry) -> Any:
    """Parameters that an operation used."""
    if isinstance(entry.func, torch.nn.Module):
        return entry.func.parameters()
    return (a for a in tree_leaves((entry.args, entry.kwargs)) if isinstance(a, torch.Tensor))


def _history(entry: Entry) -> Iterator[Entry]:
    """An operation, and all that its arguments came from."""
    seen, to_go = {entry}, [entry]
    while to_go:
        entry = to_go.pop()
        yield entry
        refs = (a for a in tree_leaves((entry.args, entry.kwargs)) if isinstance(a, Ref))
        before = {ref.entry for ref in refs if ref.entry is not None}
        to_go += before - seen
        seen |= before


def _outlived(entry: Entry) -> None:
    """Rows of an earlier step are used."""
    for before in _history(entry):
        if before.of is not None and before.of not in _outlives and (
                before.call is _rows_of_wholes or _moved_on(before)):
            _outlives.add(before.of)


def _wait(entry: Entry, results: list) -> None:
    """Keep a copy of a module's results, in case they are used after the next step."""
    given: dict[int, Any] = {place: leaf for place, leaf in enumerate(results) if isinstance(leaf, torch.Tensor)}
    if (entry.grad and ctx.world.survives and not ctx.alone and all(isinstance(leaf, Rows) for leaf in given.values())
            and any(leaf.local.requires_grad for leaf in given.values())
            and sum(leaf.numel() * leaf.element_size() for leaf in given.values()) <= _LARGE):
        waiting.append((entry, {place: perform(_without_graph, None, (leaf,), {}) for place, leaf in given.items()}))


def _without_graph(func: Callable[..., Any], args: tuple, kwargs: dict) -> Rows:
    (rows,) = args
    return Rows(rows.local.detach(), rows.offsets, rows.dim_)


def before_step(optimizer: int) -> None:
    """Weights are about to move on: what may be used behind that is gathered, if it came from them."""
    for _ in range(len(waiting)):
        entry, copies = waiting.popleft()
        if any(copy.local._version != copy.version for copy in copies.values()):  # the script has changed it since
            continue
        if not any(ctx.optimizer_of.get(p) == optimizer for before in _history(entry) for p in _weights(before)):
            waiting.append((entry, copies))
            continue
        with torch.no_grad():
            wholes = {place: (rows_.whole(copy, "keep"), copy.dim_) for place, copy in copies.items()}
        entry.call, entry.func, entry.args, entry.kwargs = _rows_of_wholes, wholes, (), {}
        entry.state, entry.plain = None, []
        _judged.add(entry.of)


def _rows_of_wholes(func: dict[int, tuple[torch.Tensor, int]], args: tuple, kwargs: dict) -> list:
    """The same for several results of one call."""
    return [_rows_of_whole(func[place], (), {}) if place in func else None for place in range(max(func) + 1)]


def stepped(optimizer: int) -> None:
    """Weights have moved on."""
    ctx.moves += 1
    ctx.moved[optimizer] = ctx.moves


def forget() -> None:
    """What was seen to outlive steps: ranks have joined, which have not seen it."""
    for known in (_outlives, _judged, waiting):
        known.clear()


def _made(ref: Ref, memo: dict, used: bool) -> Any:
    """The tensor a reference stands for, of this era."""
    entry, place = ref.entry, ref.place
    if entry is None:
        raise Irreplaceable("rows that were changed in place, through a view of them, or that came from .grad")
    known = entry.outs.get(place)
    rows = known() if known is not None else None
    if (rows is not None and rows.made is not None and rows.made.entry is entry and rows.era == ctx.era
            and not (used and rows.local.grad_fn is not None)):
        return rows
    return again(entry, memo, used)[place]


def _autocast() -> list[tuple[str, torch.dtype]]:
    return [(device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if
            torch.is_autocast_enabled(device)]
