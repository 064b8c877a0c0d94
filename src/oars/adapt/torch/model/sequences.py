"""Batches made by hand that have the sequence first and the batch second, as PyTorch's recurrences and transformers do
by default.

A hand-made batch is cut along its first dimension and watched (``call.py``). If its rows meet, the same call is done
again from its beginning, with the second dimension cut, unless the model does what must not be done twice. Whichever
dimension lets more of the weights work on own rows is cut from then on. What such a model gave (a hidden state) comes
back as rows along its second dimension, and plain tensors beside it are cut likewise.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import nn

from oars.adapt.torch.context import ctx, on_every_rank
from oars.adapt.torch.model.trace import Trace
from oars.adapt.torch.rows.tensor import Rows

known: WeakSet[nn.Module] = WeakSet()  # whose batch is the second dimension
_ONCE = {"changes itself", "prints", "kept rows", "own random", "rows from elsewhere"}  # must not happen twice


def second(leaves: list) -> int:
    """The size of the second dimension of a hand-made batch."""
    batch = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()
                 and not isinstance(leaf, nn.Parameter))
    return batch.shape[1] if batch.dim() > 1 else 0


def may_be(module: nn.Module, leaves: list, trace: Trace) -> bool:
    """Whether a call in which rows met may be done again with the second dimension as the batch."""
    size = second(leaves)
    if ctx.traces or ctx.separate or size < ctx.size or on_every_rank(size) or _ONCE & set(trace.events):
        return False
    known.add(module)
    return True


def side_of(module: nn.Module, leaves: list) -> int:
    """1 if a module's batch is the second dimension, and rows among its arguments lie so."""
    return int(module in known and any(isinstance(leaf, Rows) for leaf in leaves)
               and all(leaf.dim_ == 1 for leaf in leaves if isinstance(leaf, Rows)))
