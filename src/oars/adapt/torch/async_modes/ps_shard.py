"""What a server holds: pieces of the script's parameters, and the script's own optimizer, which steps them.

The optimizer comes pickled from the first worker: its class by name, its settings, its state cut as the parameters are.
Settings that a schedule changes come with the gradients (``servers.py``).
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from oars.adapt.torch.backward.flat_buffers import Layout, laid_out
from oars.exchange.allreduce import span_of
from oars.exchange.codes import code_of

_save, _load = torch.save, torch.load  # as they are before ranks meet wherever a script saves
_MASK = 64  # bytes that the mask of a push is a multiple of, so that what follows is aligned


class Coding:
    """How the gradients of some tensors travel: which of them there are, then their values, coded."""

    def __init__(self, layout: Layout, tensors: int, wire: str) -> None:
        self.layout = layout
        self._tensors, self._mask = tensors, -(-max(1, tensors) // _MASK) * _MASK
        self._code: Any = None if wire == "fp32" else code_of(wire)
        self._left: list[np.ndarray] = []  # what codes have lost, to be sent the next time

    def encode(self, gradients: list[torch.Tensor | None]) -> np.ndarray:
        """The bytes of a push."""
        mask, values = np.zeros(self._mask, np.uint8), np.zeros(self.layout.nbytes, np.uint8)
        mask[: self._tensors] = [gradient is not None for gradient in gradients]
        for view, gradient in zip(self.layout.views(values), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        if self._code is None:
            return np.concatenate([mask, values])
        spans = [span_of(values, span).astype(np.float32) for span in self.layout.spans]
        for span, left in zip(spans, self._left, strict=False):
            span += left
        coded = [self._code.encode(span) for span in spans]
        self._left = [np.nan_to_num(span - self._code.decode(data, len(span)), nan=0, posinf=0, neginf=0)
                      for span, data in zip(spans, coded, strict=True)]
        return np.concatenate([mask, *coded])

    def decode(self, body: np.ndarray) -> list[torch.Tensor | None]:
        """The gradients in a push."""
        values, at = body[self._mask :], 0
        if self._code is not None:
            coded, values = values, np.zeros(self.layout.nbytes, np.uint8)
            for span in self.layout.spans:
                width = len(self._code.encode(np.zeros(span[1], np.float32)))
                span_of(values, span)[:] = self._code.decode(coded[at : at + width].copy(), span[1])
                at += width
        return [view if there else None for view, there in zip(self.layout.views(values), body, strict=False)]


class Holder:
    """One part (see ``exchange/serving.py``)."""

    def __init__(self, data: bytes, wire: str) -> None:
        request = loaded(data)
        self.tensors: list[torch.Tensor] = [tensor.requires_grad_() for tensor in request["weights"]]
        self.optimizer = request["class"].__new__(request["class"])
        groups = [{**settings, "params": [self.tensors[i] for i in members]}
                  for settings, members in zip(request["settings"], request["members"], strict=True)]
        state = {self.tensors[i]: of for i, of in request["state"].items()}
        self.optimizer.__setstate__({"defaults": request["defaults"], "param_groups": groups,
                                     "state": defaultdict(dict, state)})
        self.coding = Coding(laid_out(self.tensors), len(self.tensors), wire)
        self._copy: np.ndarray | None = None

    def read(self, body: np.ndarray) -> list[torch.Tensor | None]:
        """See ``serving.Holder``; so are the others."""
        return self.coding.decode(body)

    def configure(self, settings: bytes) -> None:
        for group, new in zip(self.optimizer.param_groups, pickle.loads(settings), strict=True):
            group.update(new)

    def step(self, gradients: list[tuple[float, list[torch.Tensor | None]]]) -> None:
        total = sum(share for share, _ in gradients)
        for i, tensor in enumerate(self.tensors):
            mean: Any = None
            for share, of in gradients:
                if (gradient := of[i]) is None:
                    continue
                part = gradient * (share / total) if len(gradients) > 1 else gradient
                mean = part if mean is None else mean.add_(part)
            tensor.grad = None if mean is None else mean.to(tensor.dtype)
        self.optimizer.step()
        self._copy = None

    def weights(self) -> np.ndarray:
        if self._copy is None:  # a new one: the last may still be on its way to somebody
            self._copy = np.zeros(self.coding.layout.nbytes, np.uint8)
            with torch.no_grad():
                for view, tensor in zip(self.coding.layout.views(self._copy), self.tensors, strict=True):
                    view.copy_(tensor)
        return self._copy

    def everything(self) -> np.ndarray:
        state = {i: self.optimizer.state[t] for i, t in enumerate(self.tensors) if t in self.optimizer.state}
        return dumped({"weights": [tensor.detach() for tensor in self.tensors], "state": state})


def loaded(data: bytes) -> Any:
    """The other way round."""
    return _load(io.BytesIO(data), map_location="cpu", weights_only=False)


def dumped(value: object) -> np.ndarray:
    """The bytes of something with tensors in it."""
    file = io.BytesIO()
    _save(value, file)
    return np.frombuffer(file.getbuffer(), np.uint8)
