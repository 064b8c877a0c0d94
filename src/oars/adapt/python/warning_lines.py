"""Warnings name the script's line, as on one process.

Python finds the line that a warning is shown with by counting frames (``stacklevel``); PyTorch's warnings from C++ take
the innermost one. Where an operation is done for the script, frames of ours lie between the operation and the script,
so the line would be ours. A warning that has come to a line of ours is raised once more where the script's code is.
Only what shows a warning is replaced: PyTorch's compiler knows ``warnings.warn`` itself.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType

import oars

_OURS = os.path.dirname(os.path.abspath(oars.__file__)) + os.sep


def shown(inner: Callable[[warnings.WarningMessage], None]) -> Callable[[warnings.WarningMessage], None]:
    """Around ``warnings._showwarnmsg``."""
    def show(msg: warnings.WarningMessage) -> None:
        if not msg.filename.startswith(_OURS):
            inner(msg)
            return
        found, ours, below = sys._getframe(1), 0, False
        while found.f_back is not None:  # where Python has counted to
            ours = ours + 1 if _is_ours(found.f_code) else 0
            below |= _is_end(found.f_code)
            if (found.f_code.co_filename, found.f_lineno) == (msg.filename, msg.lineno):
                break
            found = found.f_back
        # Python notes what it has shown, by lines: ours is another one's each time.
        found.f_globals.get("__warningregistry__", {}).clear()
        vars(warnings)["onceregistry"].pop((str(msg.message), msg.category), None)
        place = None if below else _outside(found, ours)
        if place is None:  # more levels than the script has
            warnings.warn(msg.message, stacklevel=1 << 30)
            return
        names = place.f_globals
        warnings.warn_explicit(msg.message, msg.category, place.f_code.co_filename, place.f_lineno,
                               names.get("__name__") or "<unknown>", names.setdefault("__warningregistry__", {}),
                               names, msg.source)

    return show


def _outside(frame: FrameType | None, levels: int) -> FrameType | None:
    """The frame so many levels outside of ours. A function of PyTorch that has handed an operation over to us, which
    then calls the same function, does not count: one process calls it once."""
    ours = True
    while frame is not None and not _is_end(frame.f_code):
        if _is_ours(frame.f_code):
            ours = True
        elif ours and frame.f_code.co_name == "handle_torch_function" and frame.f_back is not None:
            ours, frame = False, frame.f_back
        else:
            ours, levels = False, levels - 1
            if not levels:
                return frame
        frame = frame.f_back
    return None


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)


def _is_end(code: CodeType) -> bool:
    """Whether this is what runs the script (``rank/script.py``): on one process there is nothing around it."""
    return code.co_name == "run_script" and _is_ours(code)
