"""CUDA tensors between ranks that have a GPU each: NCCL, with MPI to find each other.

The process group is our own: the script's ``torch.distributed`` stays as it found it.
"""

from __future__ import annotations

import socket
from typing import Any

from oars.engine.world import World


class Nccl:
    """Collectives on CUDA tensors, in place."""

    def __init__(self, world: World) -> None:
        import torch.distributed as torch_distributed

        dist: Any = torch_distributed

        store: Any = None
        if world.rank == 0:
            store = dist.TCPStore(socket.gethostname(), 0, world.size, is_master=True, wait_for_workers=False)
        host, port = world.broadcast(lambda: (socket.gethostname(), store.port))
        if world.rank:
            store = dist.TCPStore(host, port, world.size, is_master=False)
        self._store = store
        self._group = dist.ProcessGroupNCCL(store, world.rank, world.size)

    def allreduce(self, tensor: object) -> Any:
        """Sum over ranks, in place; ordered with the current stream's work."""
        self._group.allreduce([tensor]).wait()
        return tensor
