"""Numbers that models change themselves when they are called: running statistics and the like."""

from __future__ import annotations

from typing import Any

import torch


class Moving:
    """The buffers that a module's calls change: in calls of one ``kind``, and in any so far."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the module, by the order of first calls
        self.kind: Any = None
        self.buffers: list[torch.Tensor] = []
        self._known: dict[int, tuple[torch.Tensor, int]] = {}  # all there are, by their ids; their versions at first
        self._ever: dict[int, torch.Tensor] = {}

    def see(self, kind: tuple, buffers: list, versions: list[int], moved: list) -> None:
        """What moved in a call of another kind than before."""
        self.kind, self.buffers = kind, moved
        before = self._known or {id(b): (b, v) for b, v in zip(buffers, versions, strict=True)}
        self._known = {id(b): before.get(id(b), (b, -1)) for b in buffers}  # -1: in the place of another
        self._ever = {id(b): b for b in (*self._ever.values(), *moved) if id(b) in self._known}

    def has_moved(self, buffer: torch.Tensor) -> bool:
        """Whether any call has changed it, if only a later one than the first of its kind, or has put it in the place
        of another."""
        return id(buffer) in self._ever or self._known.get(id(buffer), (None, -1))[1] != buffer._version
