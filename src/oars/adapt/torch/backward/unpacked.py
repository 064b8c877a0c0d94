"""Gradients that do not go through the flat buffers."""

from __future__ import annotations

import numpy as np
import torch

from oars.adapt.torch.context import ctx
from oars.adapt.torch.rows import collectives


def average_on_gpu(gradients: list[torch.Tensor], held: list[tuple[int, torch.Tensor]]) -> None:
    """One flat message per dtype, over NCCL; without what gradients held before, see ``Packing.lay_in``."""
    for i, before in held:
        gradients[i].sub_(before)
    for dtype in dict.fromkeys(g.dtype for g in gradients):  # a set's order is that of addresses
        some = [g for g in gradients if g.dtype == dtype]
        flat = ctx.nccl().allreduce(torch.cat([g.reshape(-1) for g in some])).div_(ctx.size)
        ctx.world.exchanged += flat.nbytes
        torch._foreach_copy_(some, [f.view_as(g) for f, g in zip(flat.split([g.numel() for g in some]), some,
                                                                strict=True)])
    for i, before in held:
        gradients[i].add_(before)


def mean_one_by_one(grad: torch.Tensor) -> torch.Tensor:
    """Gradients that do not fit a flat buffer: sparse ones, and those that have a graph of their own."""
    if grad.layout is torch.strided:
        return collectives.Mean.apply(grad)
    grad = grad.coalesce()
    parts = ctx.world.allgather((grad.indices().cpu().numpy(), grad.values().detach().cpu().float().numpy()))
    indices = torch.from_numpy(np.concatenate([i for i, _ in parts], 1))
    values = torch.from_numpy(np.concatenate([v for _, v in parts])).to(grad.dtype) / ctx.size
    return torch.sparse_coo_tensor(indices, values, grad.shape, device=grad.device, check_invariants=False).coalesce()
