"""Rows that leave the main thread: whoever gets them there cannot ask other ranks, so they are made whole before.

What is given to a thread, a process, a pool or a queue is replaced by its whole. What a function that is given has in
its closure stays rows, for the script goes on with them; but their whole is remembered (``mirror.py``), which is what
an operation on them uses in a thread.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from oars.adapt.torch.batches.collate import Cut
from oars.adapt.torch.context import ctx
from oars.adapt.torch.rows.tensor import Rows, whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess
    from threading import Thread

_SIMPLE = (int, float, str, bytes, bool, type(None))
_DEPTH = 4


def given_away(inner: Callable[..., Any]) -> Any:
    """Around what takes things for another thread: ``Queue.put``, ``Executor.submit``."""
    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ctx.in_step:
            args, kwargs = _plain(args, _DEPTH), _plain(kwargs, _DEPTH)
        return inner(self, *args, **kwargs)

    return call


def started(inner: Callable[..., Any]) -> Any:
    """Around ``start`` of threads and processes: what they hold."""
    @functools.wraps(inner)
    def start(self: Thread | BaseProcess) -> Any:
        if ctx.in_step:
            for name, value in list(vars(self).items()):
                plain = _plain(value, _DEPTH)
                if plain is not value:
                    setattr(self, name, plain)
        return inner(self)

    return start


def _plain(x: Any, depth: int) -> Any:
    """``x`` with wholes for rows; itself if there are none in it."""
    kind = type(x)
    if kind in _SIMPLE or kind is Cut or depth == 0:
        return x
    if kind is Rows:
        return whole(x, "thread")
    if kind in (list, tuple):
        parts = [_plain(part, depth - 1) for part in x]
        return kind(parts) if any(a is not b for a, b in zip(parts, x, strict=True)) else x
    if kind is dict:
        made = {key: _plain(part, depth - 1) for key, part in x.items()}
        return made if any(made[key] is not part for key, part in x.items()) else x
    if kind is functools.partial:
        args, named = _plain(x.args, depth - 1), _plain(x.keywords, depth - 1)
        return x if args is x.args and named is x.keywords else functools.partial(x.func, *args, **named)
    if kind is types.FunctionType:
        for cell in x.__closure__ or ():
            _remember(cell.cell_contents if cell != types.CellType() else None, depth - 1)
    return x


def _remember(x: Any, depth: int) -> None:
    """The wholes of rows that stay what they are."""
    if type(x) is Rows:
        with torch.no_grad():
            whole(x, "thread")
    elif depth and type(x) in (list, tuple, dict):
        for part in x.values() if isinstance(x, dict) else x:
            _remember(part, depth - 1)
