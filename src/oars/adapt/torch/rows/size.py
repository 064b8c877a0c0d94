"""The batch's size, as a model that is being traced sees it, and what got its size from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from oars.adapt.torch.context import ctx

if TYPE_CHECKING:
    import numpy as np

sized: WeakIdKeyDictionary = WeakIdKeyDictionary()  # plain tensors that got their size from the batch's


class BatchSize(int):
    """The batch's size as a traced model sees it: notices when the model uses it for more than shapes.

    ``x / x.size(0)`` inside a model means the global batch; on plain local rows it would be another number. So a
    traced call that does arithmetic with it is not run on plain local tensors.
    """

    def __mul__(self, other: object) -> Any:
        return BatchSize(int(other) * int.__int__(self)) if isinstance(other, int) else self._used("__mul__", other)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Any:
        return BatchSize(int.__int__(self) // other) if isinstance(other, int) else self._used("__floordiv__", other)

    def _used(self, op: str, *args: Any) -> Any:
        ctx.note("size")
        return getattr(int.__int__(self), op)(*args)

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other) if isinstance(other, BatchSize) else self._used("__eq__", other)

    def __ne__(self, other: object) -> bool:
        return int.__ne__(self, other) if isinstance(other, BatchSize) else self._used("__ne__", other)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        ctx.note("size")
        return getattr(ufunc, method)(*[int.__int__(a) if isinstance(a, BatchSize) else a for a in args], **kwargs)

    __hash__ = int.__hash__


def _noticing(op: str) -> Callable:
    return lambda self, *args: self._used(op, *args)


for _op in (
    "add radd sub rsub truediv rtruediv rfloordiv mod rmod divmod rdivmod pow rpow lt le gt ge neg pos abs invert and "
    "rand or ror xor rxor lshift rlshift rshift rrshift round trunc floor ceil bool float int str repr format"
).split():
    setattr(BatchSize, f"__{_op}__", _noticing(f"__{_op}__"))
