"""How far the script has come: what recording and playing both count."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from oars.adapt.torch.batches.collate import children


class Progress:
    """``progress`` is the only instance."""

    def __init__(self) -> None:
        self.modules: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # called by the script itself -> order
        self.made: dict[str, WeakKeyDictionary[Any, int]] = {  # in the order they were made
            kind: WeakKeyDictionary() for kind in ("optimizers", "schedulers", "scalers")}
        self.backwards = 0  # so far
        self.at_step: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # ``backwards`` at its last step
        self.last_batch: Any = None  # the one the script is working on
        self.in_step = 0
        self.passed_over = False  # the step under way was left out
        self._counts = dict.fromkeys(("modules", *self.made), 0)

    def number(self, of: WeakKeyDictionary, thing: object, kind: str) -> None:
        """Give ``thing`` its number, once."""
        if thing not in of:
            of[thing] = self._counts[kind]
            self._counts[kind] += 1

    def next_batch(self, batch: Any) -> None:
        """This batch is handed to the script; None: one is being fetched."""
        self.last_batch = batch

    def goes_back(self) -> None:
        """The script calls ``backward``."""
        self.backwards += 1

    def leave_out(self, step: bool) -> None:
        """Whether the step under way is left out, as far as is known."""
        self.passed_over = step

    def enter_step(self) -> None:
        """A step begins, or something that steps are part of."""
        self.in_step += 1

    def leave_step(self) -> None:
        """It is done."""
        self.in_step -= 1

    def in_last_batch(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to the batch that was handed out last."""
        stack = [self.last_batch]
        while stack:
            x = stack.pop()
            if x is tensor:
                return True
            if not isinstance(x, torch.Tensor):
                stack += children(x) or []
        return False


progress = Progress()
