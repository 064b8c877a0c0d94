"""Files that TensorFlow writes by itself, in C++, past Python's file functions and so past the overlay.

=============================================== =====================================================================
patched (on one rank: nothing)                  what it does on N ranks
=============================================== =====================================================================
``tf.train.Checkpoint``, ``CheckpointManager``, the first rank writes, the others wait until it has; then all read
``tf.compat.v1.train.Saver``,                   the same files
``tf.saved_model.save``
``tf.io.gfile``: remove, rmtree, rename, copy,  the first rank does it, and tells what it got or which error; so also
mkdir; exists, isdir, glob, listdir             what is asked of files is one answer, and ranks decide alike
``tf.io.gfile.GFile``                           the overlay, as for ``open``
``tf.summary`` writers                          the first rank's are real, the others' go to a temporary folder
=============================================== =====================================================================
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from typing import Any

from oars.adapt import files
from oars.adapt.imports import when_imported
from oars.adapt.meet import meet

_FIRST = ("delete_file", "delete_recursively", "rename", "copy", "create_dir", "file_exists", "is_directory",
          "get_matching_files", "list_directory")
_acting = False  # on the first rank, inside one of these: what it is made of is not said to the others


def first_rank_only(plain: Any, give: Any = None) -> Any:
    """``plain`` on the first rank, while the others wait; ``give`` makes of what it told what each rank returns."""
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _acting or threading.current_thread() is not threading.main_thread():
            return plain(*args, **kwargs)

        def act() -> Any:
            global _acting
            _acting = True
            try:
                told = plain(*args, **kwargs)
            except Exception as error:
                return error
            finally:
                _acting = False
            if isinstance(told, (str, bytes)):
                return os.fsdecode(told)
            return told if isinstance(told, (bool, list)) else None

        told = meet.world.broadcast(act)
        if isinstance(told, Exception):
            raise told
        return give(told, *args) if give is not None else told

    return call


def _prefix(told: Any, saver: Any, prefix: Any, *_: Any) -> Any:
    return prefix


def _path(told: Any, *_: Any) -> Any:
    return told


def install(tf: Any) -> None:
    """Patch savers, writers and gfile."""
    from tensorflow.python.checkpoint import functional_saver
    from tensorflow.python.lib.io import file_io
    from tensorflow.python.ops import gen_summary_ops as summary
    from tensorflow.python.platform import gfile
    from tensorflow.python.saved_model import save as saved_model
    from tensorflow.python.summary.writer import event_file_writer

    saver = functional_saver.MultiDeviceSaver
    saver.save = first_rank_only(saver.save, _prefix)
    tf.compat.v1.train.Saver.save = first_rank_only(tf.compat.v1.train.Saver.save, _path)
    tf.saved_model.save = saved_model.save = first_rank_only(saved_model.save)
    for name in (*_FIRST, *(f"{name}_v2" for name in _FIRST), "atomic_write_string_to_file"):
        plain = getattr(file_io, name)
        changed = first_rank_only(plain)
        for module in (file_io, gfile, tf.io.gfile, tf.compat.v1.gfile):
            for public in [public for public, value in vars(module).items() if value is plain]:
                setattr(module, public, changed)
    _overlay(file_io.FileIO)
    summary.create_summary_file_writer = _private(summary.create_summary_file_writer)
    # Of tensorboard only what writes by TensorFlow may know of it (see the overlay's patches).
    when_imported("tensorboard.compat", lambda compat: setattr(compat, "tf2", tf))
    writer = event_file_writer.EventFileWriter
    plain = writer.__init__
    writer.__init__ = lambda self, logdir, *args, **kwargs: plain(self, _own(logdir), *args, **kwargs)


def _own(logdir: Any) -> Any:
    return logdir if meet.record.voice else tempfile.mkdtemp(prefix="oars-summary-")


def _private(plain: Any) -> Any:
    @functools.wraps(plain)
    def create(writer: Any, logdir: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(writer, _own(logdir), *args, **kwargs)

    return create


def _overlay(file: Any) -> None:
    plain, redirect = file.__init__, files.redirect()

    @functools.wraps(plain)
    def init(self: Any, name: Any, mode: str, *args: Any, **kwargs: Any) -> None:
        if redirect is not None and isinstance(name, (str, os.PathLike)) and "://" not in os.fspath(name):
            name = redirect(name, mode.replace("b", "").replace("+", "")[:1] or "r")
        plain(self, name, mode, *args, **kwargs)

    file.__init__ = init
