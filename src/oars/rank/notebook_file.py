"""Notebooks as files: JSON with a list of cells. What is read here is checked here; nothing of Jupyter is needed.

Format 4 is read, which Jupyter has written since 2015.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from oars.runfolder import UsageError

_TELL_LANGUAGE = {"kernelspec": "language", "language_info": "name"}  # of a notebook's metadata
SKIPPED, MAY_FAIL = "skip-execution", "raises-exception"  # tags of cells, with the names that Jupyter gave them


def is_notebook(script: str, module: bool) -> bool:
    """Whether a script is a notebook, by its name."""
    return script.endswith(".ipynb") and not module


def check_notebook(path: str) -> None:
    """Whether this host can run it; else UsageError."""
    read(path)
    if importlib.util.find_spec("IPython") is None:
        raise UsageError(f"{path}: notebooks need IPython: pip install 'manyoars[notebook]'")


def read(path: str) -> dict[str, Any]:
    """The notebook, its old outputs removed; UsageError if this is none, or none of Python's."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no notebook: {error}") from None
    form = found.get("nbformat") if isinstance(found, dict) else None
    if form != 4:
        raise UsageError(f"{path} is a notebook of format {form}, and format 4 is read: open it in Jupyter and save it"
                         if isinstance(form, int) else f"{path} is no notebook: it has no nbformat")
    cells, about = found.get("cells"), found.get("metadata") or {}
    if not isinstance(cells, list) or not all(isinstance(cell, dict) and "cell_type" in cell for cell in cells):
        raise UsageError(f"{path} is no notebook: it has no list of cells")
    tables = [about, *(cell.get("metadata") or {} for cell in cells)]
    tables += [about.get(key) or {} for key in _TELL_LANGUAGE] if isinstance(about, dict) else []
    if not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{path} is no notebook: its metadata are no tables")
    found_in = [(about.get(key) or {}).get(name) for key, name in _TELL_LANGUAGE.items()]
    language = str(next(filter(None, found_in), "python"))
    if language.lower() not in ("python", "ipython", "python3"):
        raise UsageError(f"{path} is a notebook of {language}: oars runs those of Python")
    for cell in cells:
        if cell["cell_type"] == "code":
            cell.update(execution_count=None, outputs=[])
    return found


def to_run(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that are run, in order."""
    return [cell for cell in notebook["cells"]
            if cell["cell_type"] == "code" and source(cell).strip() and SKIPPED not in tags(cell)]


def source(cell: dict[str, Any]) -> str:
    """A cell's code; files have it as one string or as a list of lines."""
    text = cell.get("source", "")
    return text if isinstance(text, str) else "".join(text)


def tags(cell: dict[str, Any]) -> list[str]:
    """What was said of a cell."""
    return (cell.get("metadata") or {}).get("tags") or []


def dumped(notebook: dict[str, Any]) -> str:
    """The file's text, as Jupyter writes it."""
    return json.dumps({**notebook, "cells": [_joined(cell) for cell in notebook["cells"]]}, indent=1,
                      ensure_ascii=False, default=repr) + "\n"


def _joined(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell whose printed text is one string: it is gathered in pieces."""
    if not cell.get("outputs"):
        return cell
    return {**cell, "outputs": [{**output, "text": "".join(output["text"])} if "text" in output else output
                                for output in cell["outputs"]]}
