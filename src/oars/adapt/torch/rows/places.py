"""Indexing by tensors, one of which counts the rows: ``mask[batch_idx, kv_idx]``, ``scores[torch.arange(n), labels]``.

So models look up what belongs to each row: transformers its masks of padding, classifiers their last token. Each rank
looks up its own, with the places of its own rows.
"""

from __future__ import annotations

from typing import Any

import torch

from oars.adapt.torch.context import ctx, own
from oars.adapt.torch.rows.size import sized
from oars.adapt.torch.rows.tensor import Rows, cut


def by_place(x: Rows, entries: list) -> Rows | None:
    """``x[entries]``, one entry a dimension; None if none of them counts all rows, or where it does not lead to own
    rows of something."""
    spots = [i for i, e in enumerate(entries) if not isinstance(e, slice)]
    if x.dim_ not in spots or spots != list(range(spots[0], spots[0] + len(spots))):
        return None
    given = [entries[i] for i in spots]
    if any(e is None or isinstance(e, bool) or getattr(e, "dtype", None) in (torch.bool, torch.uint8) for e in given):
        return None
    batch, device = x.offsets[-1], x.local.device
    index: list[Any] = [e if isinstance(e, (int, torch.Tensor)) else torch.as_tensor(e) for e in given]
    rows = index[x.dim_ - spots[0]]
    at = _counts(rows, batch)
    if at is None:
        return None
    right = at - rows.dim()  # of the dimensions that indexing gives, from the last one
    mine = torch.arange(own(x.offsets)[1], device=device).reshape([-1 if d == at else 1 for d in range(rows.dim())])
    local: list[Any] = []
    for e in index:
        if e is rows:
            local.append(mine)
        elif isinstance(e, Rows):
            if e.offsets != x.offsets or e.dim_ - e.local.dim() != right:
                return None
            local.append(e.local)
        elif isinstance(e, torch.Tensor) and e.dim() >= -right and e.shape[right] != 1:
            if e.shape[right] != batch:
                return None
            local.append(cut(e, x.offsets, e.dim() + right))
        else:
            local.append(e)
    if rows not in sized:  # else it will count a rank's own rows in a call on these
        ctx.note("made rows")
    width = max(e.dim() for e in local if isinstance(e, torch.Tensor))
    out = x.local[tuple(entries[: spots[0]] + local + entries[spots[-1] + 1 :])]
    return Rows(out, x.offsets, spots[0] + width + right)


def _counts(e: object, batch: int) -> int | None:
    """Along which dimension an index is 0, 1, …, batch-1, all others being of size one."""
    if not isinstance(e, torch.Tensor) or isinstance(e, Rows) or e.dtype != torch.long or e.numel() != batch:
        return None
    at = next((d for d, size in enumerate(e.shape) if size == batch), None)
    if at is None or not torch.equal(e.reshape(-1), torch.arange(batch, device=e.device)):
        return None
    return at
