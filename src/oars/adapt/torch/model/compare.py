"""A traced call is compared with the same call on plain own rows, which is what later calls are.

Tracing sees every operation on rows, but not what Python's own C code does with the batch's size (``range(n)``,
``'%d' % n``, ``np.ones(n)``). So a model that seems to take its rows one by one is called once more, on plain own rows,
from the same state: what it gives and what it leaves behind must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from oars.adapt.python import random
from oars.adapt.torch.batches.memory import Memory
from oars.adapt.torch.rows.tensor import Rows
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# How far results may lie apart; of other kinds 1e-3. Another size of the batch is no matter of rounding.
_ROOM = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.complex32: 1e-2}


class State:
    """All that a call may change: the module's buffers and attributes, what its code can name, the random streams."""

    def __init__(self, module: nn.Module, buffers: list[torch.Tensor]) -> None:
        self._memory, self.streams = Memory.of_model(module), random.state()
        self._buffers = [(b, b.detach().clone()) for b in buffers]

    def put_back(self) -> None:
        self._memory.put_back()
        random.restore(self.streams)
        with torch.no_grad():
            for buffer, old in self._buffers:
                buffer.data.copy_(old)

    def changed(self) -> bool:
        """Whether attributes, and what the code can name, are others now."""
        return self._memory.changed()


class Rehearsal:
    """A call that is made twice; made before the first time."""

    def __init__(self, module: nn.Module, buffers: list[torch.Tensor], local: list) -> None:
        self._module, self._of = module, buffers
        self._before = State(module, buffers)
        self.local = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
                      for x in local]  # the first call may change its arguments

    def differs(self, results: list, again: Callable[[list], list]) -> bool:
        """Whether ``again``, on plain own rows, gives something else than ``results``. All is left as it is now."""
        after = State(self._module, self._of)
        self._before.put_back()
        try:
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
                plain = again(self.local)  # a checkpoint that this is in must not count what is saved here
            return (not random.alike(random.state(), after.streams) or after.changed() or len(plain) != len(results)
                    or any(map(_unlike, results, plain)))
        except RankLost:
            raise
        except Exception:  # the script's own code: on a batch of another size it may fail in any way
            return True
        finally:
            after.put_back()


def _unlike(of_rows: Any, plain: Any) -> bool:
    a = of_rows.local if isinstance(of_rows, Rows) else of_rows
    if not isinstance(a, torch.Tensor) or not isinstance(plain, torch.Tensor):
        return isinstance(a, (bool, int, float, str)) and a != plain
    a, b = a.detach(), plain.detach()
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return True
    if a.is_meta or a.layout != torch.strided or not a.numel():
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    room = _ROOM.get(a.dtype, 1e-3)
    finite = a.abs().nan_to_num(0, 0, 0).max().item()
    return not torch.allclose(a, b, rtol=room, atol=room * finite / 10, equal_nan=True)
