"""Scripts that start ranks themselves (``torch.distributed``, ``torch.multiprocessing.spawn``) are not written for one
process: they are told what to delete.

A process that a rank spawns is nobody's rank, and may do as it likes but one thing: make a process group. Those of
several ranks would meet at one port.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed.distributed_c10d as groups
import torch.multiprocessing as processes

_ASKED = 86  # how a child ends that asked for a process group
_LINE = ("torch.distributed is for processes started by hand or by torchrun: delete init_process_group, "
         "DistributedDataParallel, DistributedSampler and spawn, and let oars run -n start the ranks")


def install(record: Any) -> None:
    """To be called on several ranks."""
    meets, plain_spawn = groups.rendezvous, processes.spawn

    def rendezvous(*args: Any, **kwargs: Any) -> Any:
        record.notice(_LINE)
        return meets(*args, **kwargs)

    @functools.wraps(plain_spawn)
    def spawn(fn: Any, args: tuple = (), *how: Any, **named: Any) -> Any:
        try:
            return plain_spawn(_child, (fn, args), *how, **named)
        except processes.ProcessExitedException as end:
            if end.exit_code == _ASKED:
                raise SystemExit(f"oars: {_LINE}") from None
            raise

    groups.rendezvous, processes.spawn = rendezvous, spawn


def _child(number: int, fn: Any, args: tuple) -> None:
    def rendezvous(*args: Any, **kwargs: Any) -> None:
        sys.exit(_ASKED)

    groups.rendezvous = rendezvous
    fn(number, *args)
