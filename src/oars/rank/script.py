"""Runs the user's script as ``python script.py`` or ``python -m package.module`` would, inside this process.

The script's module is the real ``__main__`` (so classes it defines pickle, and multiprocessing's children find
it), its tracebacks begin at its own first line, and its end gives the exit code Python would give.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

FRAMEWORKS = ("torch", "keras", "tensorflow", "jax")  # the names of their extras, too
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # oars/


def run_script(script: str, args: list[str], module: bool, failed: Callable[[BaseException], None],
               copy: str = "", cells: Callable[[types.ModuleType], None] | None = None) -> int:
    """Run to the end and return the exit code; an exception that ends it is given to ``failed`` to be printed.

    ``copy`` is of the script's folder, and modules are looked for there first. ``cells`` runs a notebook's code.
    """
    try:
        if cells is not None:
            main = _module_of_cells(script, args, copy)
            sys.modules["__main__"] = main
            cells(main)
        else:
            code, main = (_load_module if module else _load_file)(script, args, copy)
            sys.modules["__main__"] = main
            exec(code, main.__dict__)
    except SystemExit as end:
        return exit_code(end.code)
    except BaseException as error:
        failed(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def exit_code(code: Any) -> int:
    """What ``sys.exit(code)`` exits with; a message is printed."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _load_file(script: str, args: list[str], copy: str) -> tuple[types.CodeType, types.ModuleType]:
    sys.argv = [script, *args]
    path = os.path.abspath(script)  # what Python gives as __file__ and in tracebacks
    _first_on_path(os.path.dirname(os.path.realpath(script)), copy)
    main = _new_main(path, importlib.machinery.SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True), main


def _module_of_cells(notebook: str, args: list[str], copy: str) -> types.ModuleType:
    """A notebook's code comes cell by cell. It has a ``__file__`` as a script has: its variables belong to it."""
    sys.argv = [notebook, *args]
    _first_on_path(os.path.dirname(os.path.realpath(notebook)), copy)
    return _new_main(os.path.abspath(notebook), None)


def _load_module(name: str, args: list[str], copy: str) -> tuple[types.CodeType, types.ModuleType]:
    sys.argv = ["-m", *args]
    _first_on_path(os.getcwd(), copy)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(name + ".__main__")
    if spec is None or spec.loader is None or spec.origin is None:
        raise ImportError(f"No module named {name}")
    code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin
    main = _new_main(spec.origin, spec.loader)
    main.__spec__, main.__package__ = spec, spec.parent
    main.__dict__["__cached__"] = spec.cached
    return code, main


def _new_main(path: str, loader: Any) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=sys.modules["builtins"], __annotations__={},
                         __cached__=None)
    return main


def _first_on_path(folder: str, copy: str) -> None:
    """sys.path[0], which now says how this process was started, becomes the script's."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [copy, folder] if copy else [folder]


def missing_framework(error: BaseException) -> str:
    """One line if the script ended because a framework is not installed, else an empty one."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name not in FRAMEWORKS or importlib.machinery.PathFinder.find_spec(name) is not None:
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "the script"
    return f"{where} imports {name}, which is not installed: pip install 'manyoars[{name}]'"


def print_error(error: BaseException) -> None:
    """Print the traceback as Python does, through the script's own excepthook, without our frames."""
    seen: list[BaseException] = []
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and not any(link is other for other in seen):
            seen.append(link)
            link.__traceback__ = _without_ours(link)
            chain += [link.__cause__, link.__context__]
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.last_exc = error  # type: ignore[attr-defined]
    hook = sys.excepthook
    if hook is sys.__excepthook__ and _in_memory(error.__traceback__):
        hook = traceback.print_exception
    hook(type(error), error, error.__traceback__)


def _in_memory(trace: types.TracebackType | None) -> bool:
    """Whether the code of a frame is in no file (a notebook's cell): Python's own hook would not show its lines."""
    while trace is not None:
        known = linecache.cache.get(trace.tb_frame.f_code.co_filename, ())
        if len(known) == 4 and known[1] is None:
            return True
        trace = trace.tb_next
    return False


def _without_ours(error: BaseException) -> types.TracebackType | None:
    """The frames plain Python would have; ours stay only where the error comes from them: then it is our bug (but in
    frames with a ``__tracebackhide__`` an operation of the script's is done)."""
    frames: list[types.TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while frames and (_is_ours(frames[0]) or _is_machinery(frames[0])):
        del frames[0]
    raised_by_us = [frame for frame in frames if _is_ours(frame)] if frames and _is_ours(frames[-1]) and (
        "__tracebackhide__" not in frames[-1].tb_frame.f_locals) else []
    kept = None
    for frame in reversed(frames):
        if not _is_ours(frame) or (frame in raised_by_us and not isinstance(error, KeyboardInterrupt)):
            kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def _is_ours(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OURS)


def _is_machinery(trace: types.TracebackType) -> bool:
    """The import system, above the first line of a module's package: it is not the script's."""
    return "importlib" in trace.tb_frame.f_code.co_filename
