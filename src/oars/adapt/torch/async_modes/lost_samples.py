"""What a dead rank had learnt since the last average is lost with it: its samples are handed out once more.

While ranks train on their own, every rank remembers who has which samples of the batches since the last average. When a
rank dies, its part of them is spread over the batches to come of the same loader: these are a little larger. So no
sample of an epoch is left out, and the loop keeps its number of steps. Where no batch is left to take them, or batches
have to be of one size (``drop_last``), one line says how many were lost; so where batches come from no loader, or from
one that the script reads in a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from oars.adapt.python import patching
from oars.adapt.torch.backward.gradients import Gradients
from oars.adapt.torch.batches import loaders
from oars.adapt.torch.batches.collate import Cut
from oars.adapt.torch.batches.reading import Key, reading
from oars.adapt.torch.context import Offsets, ctx, offsets_of, on_every_rank

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter


class Batch:
    """A batch as it was handed out: who has which samples of it."""

    def __init__(self, loader: Key, place: tuple[int, int], cut: Cut, again: list) -> None:
        self.loader, self.place, self.again = loader, place, again  # the samples in it that were owed
        self.indices = cut.indices
        self.split = not on_every_rank(len(cut.indices))
        self.deal(cut.offsets if cut.era == ctx.era else offsets_of(len(cut.indices)))

    def deal(self, offsets: Offsets) -> None:
        """Every rank has its rows."""
        self.era = ctx.era
        self.samples: dict[int, list] = {-1: self.indices}  # all of it on every rank: nobody's alone
        if self.split:
            self.samples = {m: self.indices[offsets[r] : offsets[r + 1]] for r, m in enumerate(ctx.members)}


class Owed:
    """The batches since the last average, and the samples that have to be handed out again."""

    def __init__(self) -> None:
        self._handed: list[Batch] = []  # to the script, which has not learnt from them yet
        self._since: list[Batch] = []  # learnt from since the last average
        self._owes: dict[Key, list] = {}  # also if the loader is gone: what it owes is reported at the end
        self._passes: set[int] = set()  # over loaders, that the script learns from
        self._last: int | None = None  # the pass of the batch that the script has
        self.averages = 0  # averages so far
        self.rows = 0  # learnt from by this rank since the last average
        self._taken = (0, 0)  # batches, and rows of them, learnt from since it was last asked
        self.unknown = 0  # rows of the batch that the script trains on, if it is no loader's
        self._unknown = 0  # ... of all such since the last average
        self.fresh = True  # the batch under way is of a pass that it has not learnt from
        self._gone: set[int] = set()
        ctx.world.on_loss.append(lambda gone, phase: self._gone.update(gone))

    def batch(self, iterator: _BaseDataLoaderIter, data: Any, cut: Cut) -> Any:
        """A loader's global batch, and what is owed with it."""
        here = reading(iterator)
        loader, place = here.loader, here.place
        self._last, self.fresh = place[0], place[0] not in self._passes
        owed = self._owes.get(loader, [])
        again: list = []
        if owed and not self.fresh:
            left = max(1, len(iterator._index_sampler) - place[1])
            again = owed[: min(-(-len(owed) // left), len(cut.indices))]
            cut = Cut([*cut.indices, *again], (), 0, 0, False, ctx.era - 1)  # cut and read anew, as after a loss
        batch = loaders.whole_batch(iterator, data, cut)
        del owed[: len(again)]
        self._handed.append(Batch(loader, place, cut, again))
        return batch

    def training(self) -> bool:
        """Whether the batch that the script has is of a pass it learns from."""
        return self._last in self._passes

    def to_learn(self) -> None:
        """The script trains on the batch it has."""
        if self._last is not None:
            self._passes.add(self._last)

    def learnt(self) -> None:
        """There was a backward: the script has learnt from the last batch of each loader that it has been handed."""
        batches = {batch.place[0]: batch for batch in self._handed}
        if ctx.separate and not batches:
            self._unknown += self.unknown
        self.unknown = 0
        self._handed = [batch for batch in self._handed if batch is not batches[batch.place[0]]]
        self._put_back()
        for batch in batches.values():
            self._passes.add(batch.place[0])  # also if by a model in eval()
            if batch.era != ctx.era:  # ranks were lost since, and its rows made again for the living
                batch.deal(offsets_of(len(batch.indices)))
            if ctx.separate:
                self._since.append(batch)
                mine = len(batch.samples[ctx.world.origin if batch.split else -1])
                self.rows, self._taken = self.rows + mine, (self._taken[0] + 1, self._taken[1] + mine)

    def not_learnt(self) -> None:
        """The ranks evaluate, or begin another pass: what the script was handed is not for learning."""
        self._put_back()
        ctx.handed.clear()
        self._last = None

    def _put_back(self) -> None:
        for batch in self._handed:
            if batch.again:
                self._owes.setdefault(batch.loader, []).extend(batch.again)
        self._handed.clear()

    def averaged(self) -> None:
        """All ranks' work since the last average is in everybody's weights now."""
        self._gone.clear()
        if loaders._LEDGER and self._since:
            ctx.record.write_ledger(ctx.world.origin, [
                (*b.place, len(b.indices), b.era, [s for part in b.samples.values() for s in part])
                for b in self._since])
        self._since.clear()
        self.rows, self._unknown, self.averages = 0, 0, self.averages + 1

    def taken(self) -> tuple[int, int]:
        """Batches, and rows of them, that this rank has learnt from since this was last asked."""
        taken, self._taken = self._taken, (0, 0)
        return taken

    def count(self) -> int:
        """Batches learnt from since the last average."""
        return len(self._since)

    def mourn(self, learnt: dict[int, int]) -> None:
        """What the dead had learnt since the last average is lost, but for batches that they have reported."""
        lost, gone = 0, len(self._gone)
        _tell(self._unknown * gone // (ctx.size + gone),
              "they came from no loader, or from one that is read in a thread")
        for i, batch in enumerate(self._since):
            parts = [batch.samples.pop(m) for m in sorted(self._gone & batch.samples.keys()) if i >= learnt.get(m, 0)]
            samples = [s for part in parts for s in part]
            if batch.loader.drop_last:
                lost += len(samples)
            elif samples:
                self._owes.setdefault(batch.loader, []).extend(samples)
        self._gone.clear()
        _tell(lost, "batches have to be of one size (drop_last)")

    def end(self) -> None:
        """No batch comes any more."""
        _tell(sum(map(len, self._owes.values())), "no batch was left to take them")


class OwnGradients(Gradients):
    """While ranks train separately, gradients stay each rank's own."""

    owed: Owed

    def _put_off(self) -> None:
        super()._put_off()
        self.owed.learnt()

    def exchange_gradients(self) -> list[int]:
        """Nothing is exchanged."""
        if not ctx.separate:
            exchanged = super().exchange_gradients()
            self.owed.learnt()
            return exchanged
        own = self.in_order()
        if self.pending:
            patching.remove(torch.Tensor, "grad")
            self.pending.clear()
        self.touched.clear()
        self.passes.clear()
        self.base.clear()
        ctx.handed.clear()
        self.owed.learnt()
        return own


def _tell(lost: int, why: str) -> None:
    if lost:
        ctx.record.event("passed over", step=ctx.record.steps, samples=lost, reason=why)
        ctx.record.notice(f"{lost} samples that a dead rank had used since the last average are not used again: "
                          f"{why}")
