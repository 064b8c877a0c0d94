"""A backward of the script's, as it can be done again when a rank was lost in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oars.adapt.torch.context import ctx, mine
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.recovery.lineage import Entry, Irreplaceable
from oars.adapt.torch.rows import collectives
from oars.adapt.torch.rows import tensor as rows_
from oars.adapt.torch.rows.tensor import Rows


class Pass:
    """One backward of the script: what is needed to do it again after a loss.

    A boundary of the graph is a result that is equal on all ranks. Above the boundaries the graph is the same on every
    rank: the gradients that it gave, at boundaries and directly to leaves (weight penalties), are kept. Below the
    boundaries are rows, whose graph is made again.
    """

    def __init__(self, rows: list[tuple[Rows, Any]], inputs: Any, create_graph: bool) -> None:
        self.inputs, self.era = inputs, ctx.era
        self.broken = "a backward with create_graph" if create_graph else ""
        self._rows = rows  # roots that are rows themselves, with their seeds
        self._top: set[tuple[Entry, int]] = set()
        self._grads: dict[tuple[Entry, int], torch.Tensor] = {}
        self._direct: list[tuple[torch.Tensor, torch.Tensor]] = []

    def find_boundaries(self, roots: list[torch.Tensor]) -> bool:
        """Find the boundaries below ``roots`` and what reaches leaves past them. Are any from before a loss?"""
        stale = any(root.era != ctx.era for root, _ in self._rows)
        local = {root.local.grad_fn for root, _ in self._rows}
        stack, seen = [r.grad_fn for r in roots if r.grad_fn not in local], set()
        while stack:
            node: Any = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            boundary = node.metadata.get("oars")
            if boundary:
                for made in boundary.values():
                    self._top.add((made.entry, made.place))
                    stale |= made.entry.era != ctx.era
                continue
            if isinstance(node, collectives.ACROSS):
                self.broken = "a graph with rows where none were expected"
            for i, (below, _) in enumerate(node.next_functions):
                leaf = getattr(below, "variable", None)
                if leaf is None:
                    stack.append(below)
                else:
                    node.register_hook(lambda into, _, i=i, leaf=leaf: self._direct.append((leaf, into[i])))
        return stale

    def arrived(self, entry: Entry, place: int, grad: torch.Tensor) -> None:
        """Keep what came to a boundary from above."""
        if (entry, place) in self._top:
            self._grads[entry, place] = grad

    def agree(self, upon: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """What came from above is the same on every rank: take what all agree upon."""
        self._grads = {at: upon(grad) for at, grad in self._grads.items()}
        self._direct = [(leaf, grad if grad is None else upon(grad)) for leaf, grad in self._direct]

    def anew(self) -> tuple[list, list]:
        """The boundaries, made anew, and the gradients that go back from them."""
        if self.broken:
            raise Irreplaceable(self.broken)
        memo: dict = {}
        roots = [lineage.again(entry, memo, used=True)[place] for entry, place in self._grads]
        seeds: list[Any] = list(self._grads.values())
        for rows, seed in self._rows:
            lineage.refresh(rows, used=True)
            root, seed = local_root(rows, seed)
            roots.append(root)
            seeds.append(seed)
        return roots, seeds

    def add_direct(self, touched: list[torch.Tensor]) -> None:
        """Add what reached leaves past all boundaries."""
        for leaf, grad in self._direct:
            if grad is not None:
                leaf.grad = grad.clone() if leaf.grad is None else leaf.grad + grad
                touched.append(leaf)


def local_root(root: torch.Tensor, seed: torch.Tensor | None) -> tuple[Any, Any]:
    """Rows to go back from: a rank's rows carry N times their gradient (see rows/collectives.py)."""
    if not isinstance(root, Rows):
        return root, rows_.whole(seed, "backward") if isinstance(seed, Rows) else seed
    if seed is None:
        seed = torch.ones_like(root.local)
        if root.offsets[-1] != 1 or root.local.numel() > 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return root.local, seed * ctx.size
    if isinstance(seed, Rows):
        seed = seed.local
    elif seed.dim() == root.local.dim() and seed.shape[root.dim_] == root.offsets[-1]:
        seed = mine(seed, root.offsets, root.dim_)
    return root.local, seed * ctx.size
