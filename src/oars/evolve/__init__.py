"""Networks that shrink while they train (``oars run --prune``), on tensors and modules; nothing here knows of ranks.

``schedule`` says when a cut is due, ``graph`` what can leave together and what is worth least, ``trial`` whether the
small network would still be the same, ``cut`` takes units out of parameters, buffers and optimizer state in place, and
fills them up again with zeros for the script's files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


class NothingToCut(BaseException):
    """No layer of the script can be cut: one line for the user; no script is to catch this."""


def fit(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Give ``model`` the widths of a smaller network and its weights, as in ``oars.evolve.fit(Net(),
    torch.load("oars-runs/it/small.pt"))``."""
    from oars.evolve.cut import fit_to

    return fit_to(model, state)
