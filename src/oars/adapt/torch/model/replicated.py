"""Models that every rank computes completely: what the user is told, and what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oars.adapt.torch.context import ctx, site

if TYPE_CHECKING:
    from torch import nn

    from oars.adapt.torch.model.trace import Trace


def say_replicated(module: nn.Module, trace: Trace) -> str:
    """One line; ``file:line model`` is the name under which the record counts what such calls take."""
    name, here = type(module).__name__, site()
    ctx.record.notice(f"{name} runs replicated (correct, not faster), called at {here}: "
                      f"its rows depend on each other ({trace.gathers()[0].removeprefix('gather ')})",
                      "take batches from a DataLoader, so that the layers inside can be split; or compute along other "
                      "dimensions than the batch's there", "model")
    return f"{here} {name}"
