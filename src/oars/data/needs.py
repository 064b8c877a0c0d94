"""Packages that only some kinds of files need."""

from __future__ import annotations

import importlib
from types import ModuleType

from oars.data.errors import DataError

_PACKAGES = {"h5py": "h5py", "pyarrow": "pyarrow", "PIL.Image": "Pillow"}


def need(module: str, what: str, extra: str = "data") -> ModuleType:
    """Import ``module``, which ``what`` takes (a path, a command), or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = _PACKAGES.get(module, module)
        raise DataError(f"{what} needs {name} ({error}): pip install 'manyoars[{extra}]'") from None
