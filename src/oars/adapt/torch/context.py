"""What every part of the PyTorch adapter shares: the ranks, the record, and where in the script we are.

One object, ``ctx``, filled by ``install``. A rank runs the script in one thread (backward may run in PyTorch's own
threads, one at a time), so plain attributes are enough. The exception is ``Here``, kept for each thread: whether ranks
are *in step*. In other threads of the script's, in forked children and while own samples are read they are not, and
everything is plain PyTorch.
"""

from __future__ import annotations

import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from oars.plan import Plan

if TYPE_CHECKING:
    from oars.adapt.python.random import Private
    from oars.adapt.torch.async_modes.phases import Phases
    from oars.adapt.torch.backward.gradients import Gradients
    from oars.adapt.torch.guard import Guard
    from oars.adapt.torch.pruning import Pruner
    from oars.adapt.torch.replay.snapshots import Snapshots
    from oars.adapt.torch.sharing import Sharing
    from oars.adapt.torch.thin import Thinner
    from oars.engine.world import World
    from oars.rank.record import Record

Costs = tuple[tuple[int, int], ...]  # of each rank: what a batch takes, and what each row of it takes
Offsets = tuple[int, ...]  # rank r holds rows offsets[r] .. offsets[r + 1] of a global batch of offsets[-1] rows


class Woven(tuple[int, ...]):
    """Offsets of rows that do not lie together: a dimension before the batch's was joined with it (``out.view(-1,
    words)`` of a batch with the sequence first). There are ``outer`` blocks, each with ``inner`` rows for each sample,
    cut at ``base``; as a tuple, these are offsets by which ranks' shares can be counted."""

    base: Offsets
    outer: int
    inner: int

    def __new__(cls, base: Offsets, outer: int, inner: int) -> Woven:
        made = super().__new__(cls, (o * outer * inner for o in base))
        made.base, made.outer, made.inner = base, outer, inner
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Woven) and (self.base, self.outer, self.inner) == (
            other.base, other.outer, other.inner)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.base, self.outer, self.inner))


class Draw(NamedTuple):
    """Random numbers that a model draws in each call: for ``rows`` of each sample along ``dim`` (-1: for nothing that
    has rows)."""

    name: str  # of the operation; "" is dropout
    dim: int
    rows: int
    order: Sequence[int] = ()  # of its dimensions in memory, when it was traced


class Split:
    """The split call being run: the model sees plain local tensors and does not know."""

    def __init__(self, offsets: Offsets, draws: list[Draw] | None, empty: bool) -> None:
        self.offsets = offsets
        self.draws = draws  # of the call, in turn
        self.drawn = 0
        self.empty = empty  # this rank has no rows and computes on a stand-in row whose result is dropped


class Here(threading.local):
    """What holds in one thread: at first, what holds in any but the main one (see ``begin``)."""

    def __init__(self) -> None:
        # Whether all ranks run what runs now, so that they can meet. Autograd's own threads, which Python has not
        # started, work for the main one.
        self.in_step = isinstance(threading.current_thread(), threading._DummyThread)
        self.plain = True
        self.split: Split | None = None


_here = Here()


class Context:
    """See the module's docstring; ``ctx`` is the only instance."""

    # Several ranks:
    gradients: Gradients  # the leaves of all graphs, and the exchange of their gradients
    perform: Callable[..., Any]  # ``recovery.lineage.perform``: does an operation, again if a rank is lost on the way
    sharing: Sharing  # whether steps are long enough to be shared (--split auto)
    private: Private  # the random streams that are this rank's own: what reading samples draws from
    guard: Guard | None = None  # compares the ranks' weights (--guard)
    pruner: Pruner | None = None  # makes networks smaller (--prune), on one rank too
    thinner: Thinner | None = None  # leaves samples out (--samples thin), on one rank too
    # With --sync local, gossip or server:
    phases: Phases  # when ranks train on their own, and where they meet
    # With snapshots:
    snapshots: Snapshots

    def __init__(self) -> None:
        self.world: World = None  # type: ignore[assignment]  # one rank has none
        self.pid = os.getpid()
        self.record: Record = None  # type: ignore[assignment]  # until install
        self.plan = Plan()
        self.rank = 0
        self.size = 1
        self.members: list[int] = []  # the ranks that batches are cut for, by their numbers at the start
        self.era = 0  # how often ranks were lost: rows of an earlier one must be made anew before they are used
        self.grown = 0  # the era in which ranks last joined
        self.alone = False  # ranks train on their own for a while (--sync local)
        self.separate = False  # ... and do so now
        self.share_from = 0  # batches of fewer rows are not cut: every rank has them whole (see sharing.py)
        self.costs: Costs = ()  # what a batch takes each rank, where they differ much: batches are cut by it
        self.busy = False  # inside an operation that begins anew when a rank is lost
        self.again = False  # ... which is being done again, for rows that were lost
        self.going_back = False  # inside a backward of the script's
        self.spoilt = False  # a rank was lost during this backward: it goes on without messages, then is done again
        self.depth = 0  # module calls under way whose tensors are rows (or which run replicated)
        self.samples = 0  # handed out by loaders since the last step
        self.optimizer_of: Any = WeakTensorKeyDictionary()  # parameter -> its optimizer's number
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._numbered = 0
        self.moves = 0  # how often optimizers have changed weights
        self.moved: dict[int, int] = {}  # optimizer (its number) -> when it last did so
        self.iterations = 0  # over loaders, begun so far
        self.handed: list[tuple[int, int, list]] = []  # for the ledger: iteration, batch, the samples' numbers
        self._nccl: Any = None
        self.changes = 0  # grows when a module's attributes or hooks change: then what was found by tracing is old
        self.mode, self.marked = 0, 0  # a bit for each module that is not in the mode it was made in; bits so far
        self.trying = False  # copies of a model are made and called: they are no models of the script's
        self.traces: list[Any] = []  # calls being watched for whether they treat rows one by one
        self.performed = 0  # operations of the script's on rows, and calls of modules
        self.operations = 0  # the same, those inside of modules too
        self.place: Any = None  # the one under way, by these numbers
        self.drawn: Any = None  # where the random streams stood before it

    @property
    def plain(self) -> bool:
        """Inside a split call or a backward, or not in step: module calls and losses pass straight through."""
        return _here.plain

    @plain.setter
    def plain(self, value: bool) -> None:
        _here.plain = value

    @property
    def split(self) -> Split | None:
        """The split call under way."""
        return _here.split

    @split.setter
    def split(self, value: Split | None) -> None:
        _here.split = value

    @property
    def in_step(self) -> bool:
        """Whether all ranks run what runs now. If not, nothing is cut, and nothing sent."""
        return _here.in_step

    @contextmanager
    def out_of_step(self, why: str = "") -> Iterator[None]:
        """What is done in here is plain PyTorch; with a ``why`` (while …) this rank's own, and it meets no others."""
        before = _here.in_step, _here.plain, _here.split
        reading = self.world.reading
        _here.in_step, _here.plain, _here.split = False, True, None
        if why:
            self.world.reading = why
        try:
            yield
        finally:
            self.world.reading = reading
            _here.in_step, _here.plain, _here.split = before

    def join(self, world: World) -> None:
        """This process is a rank of ``world``."""
        self.world, self.rank, self.size = world, world.rank, world.size
        self.era, self.members = world.era, world.members
        world.adopt()
        world.phase = self.phase
        world.place, world.site = lambda: self.place, site
        if self.plan.sync == "allreduce":  # ranks that train on their own meet where they happen to be
            world.line = line

    def begin(self) -> None:
        """This thread of this process runs the script."""
        _here.in_step, _here.plain = True, False
        os.register_at_fork(after_in_child=_forked)

    def nccl(self) -> Any:
        """How CUDA tensors cross, or None where ranks share GPUs, or code them: then they go through the host."""
        if self._nccl is None and not self.plan.share_gpus and self.plan.wire == "fp32":
            from oars.engine.nccl import Nccl

            self._nccl = Nccl(self.world)
        return self._nccl

    def number(self, optimizer: Any) -> int:
        """Which optimizer this is: an address is used again, on one rank and not on another."""
        if optimizer not in self._numbers:
            self._numbered += 1
            self._numbers[optimizer] = self._numbered
        return self._numbers[optimizer]

    def renew(self) -> None:
        """After a loss: from here on batches are cut for the ranks that are left."""
        self.world.adopt()
        self.rank, self.size, self.era = self.world.rank, self.world.size, self.world.era
        self.members, self.costs = self.world.members, ()
        self._nccl = None
        offsets_of.cache_clear()

    def phase(self) -> str:
        """What the training is at, for the report of a loss."""
        if self.going_back:
            return "backward"
        if self.busy:
            return "forward" if torch.is_grad_enabled() else "evaluation"
        return ""

    def worked(self) -> None:
        """Something that takes time was computed on own rows alone."""
        if self.traces:
            self.traces[0].worked = True
        else:
            self.record.split = True

    def note(self, event: str) -> None:
        """Tell every trace under way that something other than row-by-row work happened."""
        for trace in self.traces:
            trace.events.append(event)


def _forked() -> None:
    """This is a child: no rank."""
    _here.in_step, _here.plain, _here.split = False, True, None


ctx = Context()


@lru_cache(maxsize=4096)
def offsets_of(rows: int) -> Offsets:
    """Where each rank's share of ``rows`` begins: contiguous, differing by at most one row, or by ``ctx.costs``."""
    if ctx.costs and rows >= 2 * ctx.size:
        dealt = _dealt(rows, ctx.costs)
        return tuple(sum(dealt[:r]) for r in range(ctx.size + 1))
    each, more = divmod(rows, ctx.size)
    return tuple(r * each + min(r, more) for r in range(ctx.size + 1))


def _dealt(rows: int, costs: Costs) -> list[int]:
    """So many rows for each rank, at least two, that who is through last is so as early as can be."""
    def by(end: int) -> list[int]:
        return [max(2, (end - fixed) // each) for fixed, each in costs]

    early, late = 0, max(fixed + each * rows for fixed, each in costs)
    while late - early > 1:
        middle = (early + late) // 2
        early, late = (middle, late) if sum(by(middle)) <= rows else (early, middle)
    dealt = by(early)
    while sum(dealt) < rows:
        dealt[min(range(len(costs)), key=lambda r: costs[r][0] + costs[r][1] * (dealt[r] + 1))] += 1
    return dealt


def on_every_rank(rows: int) -> bool:
    """Whether a batch is too small to be cut for ranks that train on their own: then each has it whole. One row alone
    has no statistics, which BatchNorm refuses."""
    return ctx.alone and ctx.size > 1 and rows < 2 * ctx.size


@lru_cache(maxsize=4096)
def scaled(offsets: Offsets, k: int) -> Offsets:
    """Offsets of a tensor that holds ``k`` rows for each row."""
    if isinstance(offsets, Woven):
        return Woven(offsets.base, offsets.outer, offsets.inner * k)
    return tuple(o * k for o in offsets)


@lru_cache(maxsize=4096)
def tiny(offsets: Offsets) -> bool:
    """Whether some rank has no rows."""
    return any(a == b for a, b in zip(offsets, offsets[1:], strict=False))


def own(offsets: Offsets) -> tuple[int, int]:
    """This rank's first row and how many it has."""
    lo = offsets[ctx.rank]
    return lo, offsets[ctx.rank + 1] - lo


def mine(x: torch.Tensor, offsets: Offsets, dim: int) -> torch.Tensor:
    """This rank's rows of a whole tensor."""
    if isinstance(offsets, Woven):
        blocks = x.unflatten(dim, (offsets.outer, offsets.base[-1], offsets.inner))
        return blocks.narrow(dim + 1, *own(offsets.base)).flatten(dim, dim + 2)
    return x.narrow(dim, *own(offsets))


def order_of(x: torch.Tensor) -> list[int]:
    """The dimensions of what is made like this tensor, as they lie in memory: the outermost first."""
    strides = torch.empty_like(x, device="meta").stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], -x.shape[d]))


def one_row(offsets: Offsets) -> bool:
    """Whether some rank has fewer than two rows: then it cannot know how the batch lies in memory."""
    return any(b - a < 2 for a, b in zip(offsets, offsets[1:], strict=False))


def empty_whole(shape: list[int], rows: torch.Tensor, order: Sequence[int] = ()) -> torch.Tensor:
    """A tensor of the batch's shape to draw numbers in: they are drawn in the order of memory, so its dimensions lie
    there as those of own rows do, if not in this ``order``."""
    order = order or order_of(rows)
    empty = torch.empty([shape[d] for d in order], dtype=rows.dtype, device=rows.device)
    return empty.permute([order.index(d) for d in range(rows.dim())])


def in_script_thread() -> bool:
    """Whether this is a thread of the script's, in a rank."""
    return threading.current_thread() is not threading.main_thread() and os.getpid() == ctx.pid


_OURS = tuple(os.path.join(folder, "") for folder in (
    os.path.dirname(torch.__file__), os.path.abspath(os.path.join(__file__, *[os.pardir] * 3))))


def of_the_script(file: str) -> bool:
    """Whether code of this file is the script's, not PyTorch's nor ours."""
    return not file.startswith(_OURS)


_codes: dict[Any, int] = {}  # of functions: 0 if they are PyTorch's or ours, else a hash of where they stand


def line() -> int:
    """A hash of the user's line that is running now, the same on all ranks that are there."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        known = _codes.get(code)
        if known is None:
            name = code.co_filename
            known = _codes[code] = zlib.crc32(f"{os.path.basename(name)} {code.co_firstlineno}".encode()) | 1 if (
                of_the_script(name) and not name.startswith("<")) else 0
        if known:
            return known ^ frame.f_lasti
        frame = frame.f_back
    return 0


def site() -> str:
    """``file:line`` in the user's code that is running now."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if of_the_script(name) and not name.startswith("<"):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
