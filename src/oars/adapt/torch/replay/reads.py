"""Values that the script reads from tensors: recorded, and handed out again when it is played.

``float(loss)``, ``loss.item()``, ``if better:``, ``tolist()``, ``numpy()``: all of the script's own, and of libraries
that are not PyTorch's. What PyTorch's own code reads inside its functions is left alone, but for what a script's course
depends on: formatting, GradScaler's look for infinities, schedulers.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import oars
from oars.adapt.replay.tape import Diverged, TooLarge, tape
from oars.adapt.torch.context import site
from oars.adapt.torch.replay import placeholder
from oars.adapt.torch.replay.placeholder import StandIn, is_tainted, unsure

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (torch, oars))
_COUNTED = ("torch/_tensor.py", "amp/grad_scaler.py", "optim/lr_scheduler.py", "optim/swa_utils.py")
_inside: dict[str, bool] = {}  # file -> whether its reads are none of the script's
_main = threading.main_thread()


def _is_inside(file: str) -> bool:
    known = _inside.get(file)
    if known is None:
        known = _inside[file] = file.startswith(_LIBRARIES) and not file.endswith(_COUNTED)
    return known


def scalar(read: Callable[..., Any]) -> Any:
    """Around what gives one value."""
    @functools.wraps(read)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tape.busy or _is_inside(sys._getframe(1).f_code.co_filename) or threading.current_thread() is not _main:
            return read(*args, **kwargs)
        if not tape.playing:
            value = read(*args, **kwargs)
            tape.put_value(value)
            return value
        recorded = tape.take_value()
        if tape.strict and not _tainted(args) and not _agree(value := read(*args, **kwargs), recorded):
            raise Diverged(f"{site()} reads {value} where, the first time, it read {recorded}: the data, the seed or "
                           "the script has changed")
        return recorded

    return call


def array(read: Callable[..., Any]) -> Any:
    """Around what gives many values."""
    name = read.__name__

    @functools.wraps(read)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tape.busy or _is_inside(sys._getframe(1).f_code.co_filename) or threading.current_thread() is not _main:
            return read(self, *args, **kwargs)
        tape.busy += 1  # one reads by another
        try:
            if not tape.playing:
                value = read(self, *args, **kwargs)
                tape.put_value(np.asarray(value) if name == "tolist" else value)
                return value
            recorded = tape.take_value()
            if not _tainted((self,)):
                return read(self, *args, **kwargs)
        finally:
            tape.busy -= 1
        if recorded is TooLarge:
            unsure.setdefault(site(), "values of more than 64 kB that were read here are not on the tape")
            recorded = np.zeros(tuple(self.shape), torch.empty(0, dtype=self.dtype).numpy().dtype)
        if name == "tolist":
            return recorded.tolist() if isinstance(recorded, np.ndarray) else recorded
        return recorded.astype(args[0]) if name == "__array__" and args and args[0] is not None else recorded

    return call


def _agree(value: object, recorded: Any) -> bool:
    """Equal, but for rounding."""
    if isinstance(value, float) and isinstance(recorded, float):
        return abs(value - recorded) <= 1e-3 * max(1.0, abs(recorded)) or repr(value) == repr(recorded)
    return value == recorded


def _tainted(args: tuple) -> bool:
    return any(isinstance(a, torch.Tensor) and (is_tainted(a) or (a.is_meta and not isinstance(a, StandIn)))
               for a in args)


def unseen(show: Callable[..., Any]) -> Any:
    """What printing a tensor reads of it is its own affair."""
    @functools.wraps(show)
    def call(*args: Any, **kwargs: Any) -> Any:
        tape.busy += 1
        try:
            return show(*args, **kwargs)
        finally:
            tape.busy -= 1

    return call


def format_(plain: Callable[..., Any]) -> Any:
    """Around ``Tensor.__format__``."""
    @functools.wraps(plain)
    def call(self: torch.Tensor, spec: str) -> str:
        if tape.playing and not tape.busy and is_tainted(self):
            return format(tape.take_value(), spec) if self.dim() == 0 else format(repr(self), spec)
        return plain(self, spec)

    return call


placeholder.RULES["__contains__"] = lambda func, args, kwargs: tape.take_value()
