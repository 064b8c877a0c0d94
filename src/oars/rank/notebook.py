"""Runs a notebook in a rank as a script: its cells one after the other, in the real ``__main__``.

IPython compiles and runs the cells, so magics, ``!commands``, ``display`` and pictures of matplotlib work; there is no
kernel and no other process. Every rank runs all cells and keeps what they show, as it keeps what a script prints. The
voice writes the executed copy into the run folder after each cell: of a run that is killed, all whole cells are there.
While a resumed run plays what it did before, the outputs are collected once more, so that its copy is complete.

A cell's code has a file name of its own, ``analysis.ipynb, cell 3``: tracebacks, notices and stall reports name it. The
number is the one that Jupyter shows as ``[3]``.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from oars import runfolder
from oars.adapt.replay.tape import tape
from oars.plan import Plan
from oars.rank import notebook_file
from oars.rank.record import Record

INLINE = "module://matplotlib_inline.backend_inline"
GRACE = 3.0  # seconds that other ranks leave the voice to write the copy with the cell that took too long
_HIDDEN = ("exit", "quit", "open", "get_ipython")  # IPython's own in the script's names; builtins has all of them


class Notebook:
    """One notebook, while this rank runs it. ``refused`` ends the run with one line."""

    def __init__(self, folder: Path, plan: Plan, record: Record, refused: Callable[[str], Any]) -> None:
        self.path, self.limit = os.path.abspath(plan.script), plan.cell_timeout
        self.record, self.refused = record, refused
        self.copy = folder.resolve() / runfolder.executed(plan.script)
        self.called = os.path.relpath(self.copy, plan.cwd)  # where the command was given
        self.content = notebook_file.read(self.path)
        self.cell: dict[str, Any] = {"outputs": []}  # the one that is running
        self._clear = False  # the outputs so far, when the next one comes
        self._shown: dict[str, list[dict[str, Any]]] = {}  # what ``update_display`` may change, by its id
        self._pid = os.getpid()

    def run(self, main: ModuleType) -> None:
        """Run all cells in this module; the first error that is not expected ends them, and is raised."""
        os.chdir(os.path.dirname(self.path))  # as Jupyter does
        os.environ.setdefault("MPLBACKEND", INLINE)
        shell = _shell(self, main)
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(self, "stdout", sys.stdout), _Tee(self, "stderr", sys.stderr)
        try:
            for cell in notebook_file.to_run(self.content):
                self._run(shell, cell)
        finally:
            sys.stdout, sys.stderr = streams
            self.write()

    def _run(self, shell: Any, cell: dict[str, Any]) -> None:
        self.cell, self._clear = cell, False
        number = cell["execution_count"] = shell.execution_count
        timer = None
        if self.limit:
            timer = threading.Timer(self.limit + (0 if self.record.voice else GRACE), self._late, [number])
            timer.daemon = True
            timer.start()
        try:
            result = shell.run_cell(notebook_file.source(cell), store_history=True)
        finally:
            if timer is not None:
                timer.cancel()
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            self._failed(error)
        elif not tape.playing:
            self.write()

    def _failed(self, error: BaseException) -> None:
        error.__traceback__ = _of_cells(error.__traceback__, self.path)
        if isinstance(error, SystemExit):
            raise error
        if not any(output["output_type"] == "error" for output in self.cell["outputs"]):
            self.show_error(type(error), error, traceback.format_exception(error))
        if notebook_file.MAY_FAIL not in notebook_file.tags(self.cell) or not isinstance(error, Exception):
            raise error

    def _late(self, number: int) -> None:
        """The time of a cell is over, whatever it waits for."""
        text = f"cell {number} of {os.path.basename(self.path)} took longer than --cell-timeout {self.limit:g}"
        self.cell["outputs"].append({"output_type": "error", "ename": "TimeoutError", "evalue": text,
                                     "traceback": [text]})
        try:
            self.write()
        finally:  # the cell may change it at this moment, or the disk be full
            self.refused(f"{text}; what it has shown is in {self.called}")

    # ---- what cells show ----

    def stream(self, name: str, text: str) -> None:
        """A cell has printed something."""
        self._begin_output()
        last = self.cell["outputs"][-1:]
        if last and last[0].get("name") == name:
            last[0]["text"].append(text)
        elif text:
            self.cell["outputs"].append({"output_type": "stream", "name": name, "text": [text]})

    def show(self, kind: str, data: dict[str, Any], about: dict[str, Any] | None, name: str | None = None,
             **more: Any) -> None:
        """A cell displays something; ``name`` is its id if it may be changed later."""
        self._begin_output()
        output = {"output_type": kind, "data": _plain(data), "metadata": about or {}, **more}
        self.cell["outputs"].append(output)
        if name is not None:
            self._shown.setdefault(name, []).append(output)
        self._print(data)

    def show_again(self, data: dict[str, Any], about: dict[str, Any] | None, name: str | None) -> None:
        """What was displayed with this id has changed."""
        for output in self._shown.get(name or "", []):
            output.update(data=_plain(data), metadata=about or {})
        self._print(data)

    def show_error(self, kind: type, error: BaseException, lines: list[str]) -> None:
        """A cell's error, in the copy; the run shows it once it is known that it ends the notebook."""
        if not isinstance(error, SystemExit):
            self._begin_output()
            self.cell["outputs"].append({"output_type": "error", "ename": kind.__name__, "evalue": str(error),
                                         "traceback": lines})

    def clear(self, wait: bool) -> None:
        """Forget what the cell has shown, now or when it shows more."""
        self._clear = wait
        if not wait:
            self.cell["outputs"].clear()

    def _begin_output(self) -> None:
        if self._clear:
            self.clear(False)

    @staticmethod
    def _print(data: dict[str, Any]) -> None:
        """Displayed things are seen in the terminal as text."""
        if "text/plain" in data:
            target = getattr(sys.stdout, "inner", sys.stdout)
            target.write(data["text/plain"] + "\n")

    def write(self) -> None:
        """The executed copy as it is so far."""
        if self.record.voice and not tape.playing and os.getpid() == self._pid:
            runfolder.put(self.copy, notebook_file.dumped(self.content))


class _Tee(io.TextIOBase):
    """A stream of this rank whose text goes to the running cell too. What child processes and native code write does
    not come here."""

    def __init__(self, notebook: Notebook, name: str, inner: Any) -> None:
        self.notebook, self.name, self.inner = notebook, name, inner

    def write(self, text: str) -> int:
        self.notebook.stream(self.name, text)
        return self.inner.write(text)

    def flush(self) -> None:
        self.inner.flush()

    def fileno(self) -> int:
        return self.inner.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.inner.encoding

    @property
    def errors(self) -> Any:  # type: ignore[override]
        return self.inner.errors

    @property
    def buffer(self) -> Any:
        return self.inner.buffer


def _shell(notebook: Notebook, main: ModuleType) -> Any:
    """IPython, without a profile, a history file and colours of a terminal."""
    class Compiler(CachingCompiler):
        def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
            return f"{notebook.path}, cell {number}"

        def format_code_name(self, name: str) -> tuple[str, str]:
            return "File", os.path.basename(name)

    class Results(DisplayHook):
        def write_output_prompt(self) -> None:
            pass

        def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
            notebook.show("execute_result", format_dict, md_dict, execution_count=notebook.cell["execution_count"])

        def finish_displayhook(self) -> None:
            self._is_active = False

    class Displays(DisplayPublisher):
        def publish(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, source: Any = None, *,
                    transient: dict[str, Any] | None = None, update: bool = False, **_: Any) -> None:
            name = (transient or {}).get("display_id")
            if update:
                notebook.show_again(data, metadata, name)
            else:
                notebook.show("display_data", data, metadata, name)

        def clear_output(self, wait: bool = False) -> None:
            notebook.clear(wait)

    class Shell(InteractiveShell):
        compiler_class, displayhook_class, display_pub_class = Compiler, Results, Displays

        def init_profile_dir(self, profile_dir: Any) -> None:
            pass

        def init_virtualenv(self) -> None:
            pass

        def enable_gui(self, gui: str | None = None) -> None:
            if gui not in (None, "inline"):
                raise RuntimeError(f"%matplotlib {gui} needs a window, and a notebook of a run has none: "
                                   "use %matplotlib inline")

        def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:
            notebook.show_error(etype, evalue, list(stb))

    settings = Config()
    settings.HistoryManager.enabled = False
    settings.HistoryManager.hist_file = ":memory:"
    warnings.filterwarnings("ignore", "To exit: use", UserWarning)  # what IPython says after sys.exit()
    names = main.__dict__
    shell = Shell.instance(config=settings, ipython_dir=os.getcwd(), user_module=main, user_ns=names)
    for name in _HIDDEN:
        del names[name]
    formatter: Any = shell.display_formatter
    formatter.active_types = formatter.format_types
    return shell


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold: pictures in base64."""
    return {kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for kind, value in data.items()}


def _of_cells(trace: TracebackType | None, path: str) -> TracebackType | None:
    """A traceback from the first line of a cell on, without what runs cells."""
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(f"{path}, cell "):
        trace = trace.tb_next
    return trace
