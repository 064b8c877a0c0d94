"""Scripts that start ranks themselves (``torch.distributed``, ``torch.multiprocessing.spawn``) are not written for one
process: the message says what to delete.

A process that a rank spawns is nobody's rank, and may do as it likes but one thing: make a process group. Those of
several ranks would meet at one port.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as groups
import torch.multiprocessing as processes

from oars.adapt.python.patching import replaced
from oars.adapt.torch.context import ctx

_ASKED = 86  # how a child ends that asked for a process group
_LINE = ("torch.distributed is for processes started by hand or by torchrun: delete init_process_group, "
         "DistributedDataParallel, DistributedSampler and spawn, and let oars run -n start the ranks")


def rendezvous(inner: Callable[..., Any]) -> Any:
    """Around where process groups meet."""
    @functools.wraps(inner)
    def call(*args: object, **kwargs: object) -> Any:
        ctx.record.notice(_LINE)
        return inner(*args, **kwargs)

    return call


def spawn(inner: Callable[..., Any]) -> Any:
    """Around ``torch.multiprocessing.spawn``."""
    @functools.wraps(inner)
    def call(fn: Callable[..., Any], args: tuple = (), *how: Any, **named: Any) -> Any:
        try:
            return inner(_child, (fn, args), *how, **named)
        except processes.ProcessExitedException as end:
            if end.exit_code == _ASKED:
                raise SystemExit(f"oars: {_LINE}") from None
            raise

    return call


def _child(number: int, fn: Callable[..., Any], args: tuple) -> None:
    with replaced(groups, rendezvous=lambda *args, **kwargs: sys.exit(_ASKED)):
        fn(number, *args)
