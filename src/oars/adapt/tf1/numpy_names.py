"""NumPy's names of 2017, which went with NumPy 1.24 and 2.0: ``np.float``, ``np.int``, ``np.NaN``, ``np.asscalar``, …

Scripts of TensorFlow 1's time use them (``--tf1``). What NumPy still has, or has again with another meaning
(``np.bool``, ``np.long``), stays as it is.
"""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING

from oars.adapt.python.patching import put

if TYPE_CHECKING:
    from types import ModuleType

_PYTHONS = {"float": float, "int": int, "bool": bool, "object": object, "str": str, "complex": complex, "long": int,
            "unicode": str, "asscalar": operator.methodcaller("item")}
_RENAMED = {"float_": "float64", "complex_": "complex128", "cfloat": "complex128", "singlecomplex": "complex64",
            "longfloat": "longdouble", "string_": "bytes_", "unicode_": "str_", "bool8": "bool_", "object0": "object_",
            "int0": "intp", "uint0": "uintp", "Inf": "inf", "Infinity": "inf", "infty": "inf", "PINF": "inf",
            "NaN": "nan", "NAN": "nan", "product": "prod", "cumproduct": "cumprod", "sometrue": "any",
            "alltrue": "all", "round_": "round", "row_stack": "vstack", "in1d": "isin", "trapz": "trapezoid"}


def install(numpy: ModuleType) -> None:
    """Give NumPy the names it does not have any more."""
    old = {name: getattr(numpy, now) for name, now in _RENAMED.items() if hasattr(numpy, now)}
    old |= {**_PYTHONS, "NINF": -numpy.inf, "NZERO": -0.0, "PZERO": 0.0,
            "msort": lambda a: numpy.sort(a, axis=0)}
    for name, value in old.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not hasattr(numpy, name):
                put(numpy, name, value)
