"""Packages that only some kinds of files need."""

from __future__ import annotations

import importlib
from types import ModuleType

from oars.data.errors import DataError

_PACKAGES = {"h5py": "h5py", "pyarrow": "pyarrow", "PIL.Image": "Pillow"}


def need(module: str, path: str, extra: str = "data") -> ModuleType:
    """Import ``module``, which reading ``path`` takes, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = _PACKAGES.get(module, module)
        raise DataError(f"{path}: reading this needs {name} ({error}); pip install manyoars[{extra}]") from None
