"""Act on a module when the script imports it, and not before: heavy modules are never imported for their patches."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[ModuleType], Any]]] = {}


def when_imported(name: str, act: Callable[[ModuleType], Any]) -> None:
    """Call ``act(module)`` now if the module is there, else right after its first import."""
    if name in sys.modules:
        act(sys.modules[name])
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(act)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it asks the other finders, and lets their loader call us back."""

    def find_spec(self, name: str, path: Sequence[str] | None,
                  target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        acts = _waiting.pop(name)
        try:
            spec = importlib.util.find_spec(name) if path is None else _spec_on(name, path)
        finally:
            _waiting[name] = acts  # who asks where a module is may not import it: TensorFlow looks for Keras
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for act in _waiting.pop(name, []):
                act(module)

        # An instance attribute: the loader belongs to this one module.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _spec_on(name: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder) and (spec := finder.find_spec(name, path)):
            return spec
    return None
