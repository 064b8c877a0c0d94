"""Files that TensorFlow writes by itself, in C++, past Python's file functions and so past the overlay.

=============================================== =====================================================================
patched (on one rank: nothing)                  what it does on N ranks
=============================================== =====================================================================
``tf.train.Checkpoint``, ``CheckpointManager``, the first rank writes, the others wait until it has; then all read
``tf.compat.v1.train.Saver``,                   the same files
``tf.saved_model.save``
``tf.io.gfile``: remove, rmtree, rename, copy,  the first rank does it, and tells what it got or which error; so also
mkdir; exists, isdir, glob, listdir;            what is asked of files is one answer, and ranks decide alike
``tf.io.matching_files``
``tf.io.gfile.GFile``; in eager code            the overlay, as for ``open``
``tf.io.read_file`` and ``write_file``;
``tf.lite.Interpreter``
``tf.io.TFRecordWriter``                        the overlay; when it is closed, the others wait for the first rank
``Dataset.save``, ``Dataset.cache("file")``     the first rank's are real, the others' go to a temporary folder
``tf.compat.v1.Session``, ``iter`` of a         first the others wait for the first rank: TensorFlow reads its files,
``Dataset`` (``reading``)                       and they may have been written a moment ago
``tf.summary`` writers                          the first rank's are real, the others' go to a temporary folder, and
                                                take their place if it dies
=============================================== =====================================================================
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from oars.adapt import files
from oars.adapt.meet import meet
from oars.adapt.python import random
from oars.adapt.python.imports import when_imported

_FIRST = ("delete_file", "delete_recursively", "rename", "copy", "create_dir", "file_exists", "is_directory",
          "get_matching_files", "list_directory")
acting = False  # on the first rank, inside one of these: what it is made of is not said to the others


def first_rank_only(plain: Any, give: Any = None) -> Any:
    """``plain`` on the first rank, while the others wait; ``give`` makes of what it told what each rank returns."""
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if acting or not random.in_order():
            return plain(*args, **kwargs)

        def act() -> Any:
            global acting
            acting = True
            try:
                told = plain(*args, **kwargs)
            except Exception as error:
                return error
            finally:
                acting = False
            if isinstance(told, (str, bytes)):
                return os.fsdecode(told)
            return told if isinstance(told, (bool, list)) else None

        told = meet.world.broadcast(act)
        if isinstance(told, Exception):
            raise told
        return give(told, *args) if give is not None else told

    return call


def wait() -> None:
    """Go on when the first rank has come here."""
    if not acting and random.in_order():
        meet.world.broadcast(lambda: None)


def _prefix(told: Any, saver: Any, prefix: Any, *_: Any) -> Any:
    return prefix


def _kept_count(plain: Any) -> Any:
    """A saver knows which checkpoints it has left, on all ranks: any of them may be the next to save."""
    told = first_rank_only(lambda saver, *args, **kwargs: [
        plain(saver, *args, **kwargs), saver._last_checkpoints, saver._checkpoints_to_be_deleted])

    @functools.wraps(plain)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        path, self._last_checkpoints, self._checkpoints_to_be_deleted = told(self, *args, **kwargs)
        return path

    return save


def install(tf: Any) -> None:
    """Patch savers, writers and gfile."""
    from tensorflow.python.checkpoint import functional_saver
    from tensorflow.python.data.ops import dataset_ops
    from tensorflow.python.lib.io import file_io, tf_record
    from tensorflow.python.ops import gen_io_ops
    from tensorflow.python.ops import gen_summary_ops as summary
    from tensorflow.python.platform import gfile
    from tensorflow.python.saved_model import save as saved_model
    from tensorflow.python.summary.writer import event_file_writer

    saver = functional_saver.MultiDeviceSaver
    saver.save = first_rank_only(saver.save, _prefix)
    tf.compat.v1.train.Saver.save = _kept_count(tf.compat.v1.train.Saver.save)
    tf.saved_model.save = saved_model.save = _to_folders(saved_model.save)
    for name in (*_FIRST, *(f"{name}_v2" for name in _FIRST), "atomic_write_string_to_file"):
        plain = getattr(file_io, name)
        changed = first_rank_only(plain)
        for module in (file_io, gfile, tf.io.gfile, tf.compat.v1.gfile):
            for public in [public for public, value in vars(module).items() if value is plain]:
                setattr(module, public, changed)
    _overlay(file_io.FileIO)
    _records(tf_record.TFRecordWriter)
    tf.io.read_file, tf.io.write_file = _at_once(tf, tf.io.read_file, "r"), _at_once(tf, tf.io.write_file, "w")
    tf.io.matching_files = gen_io_ops.matching_files = _matching(tf, gen_io_ops.matching_files)
    _datasets(dataset_ops.DatasetV2)
    summary.create_summary_file_writer = _private(tf, summary.create_summary_file_writer)
    # Of tensorboard only what writes by TensorFlow may know of it (see the overlay's patches).
    when_imported("tensorboard.compat", lambda compat: setattr(compat, "tf2", tf))
    when_imported("tensorflow.lite.python.interpreter", lambda module: _interpreted(module.Interpreter))
    _events(event_file_writer.EventFileWriter)


def _to_folders(plain: Any) -> Any:
    """The first rank saves, and so do those that were given another folder: a temporary one."""
    shared = first_rank_only(plain)

    @functools.wraps(plain)
    def save(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
        global acting
        shared(obj, export_dir, *args, **kwargs)
        if acting or not random.in_order():
            return
        mine = os.fsdecode(export_dir)
        if meet.world.broadcast(lambda: mine) != mine:
            acting = True
            try:
                plain(obj, export_dir, *args, **kwargs)
            finally:
                acting = False

    return save


def _own(logdir: Any) -> Any:
    return logdir if meet.record.voice else tempfile.mkdtemp(prefix="oars-summary-")


@contextlib.contextmanager
def _writing(logdir: Any) -> Iterator[str]:
    """A writer makes its file, under a name of its own: where. The first rank's is real; if that dies, the file of the
    next one takes its place."""
    folder, place = os.path.abspath(os.fsdecode(logdir)), os.fsdecode(_own(logdir))
    before = _names(place)
    yield place
    made = sorted(_names(place) - before)
    if "://" not in place and random.in_order():
        gone = meet.world.broadcast(lambda: made)
        if not meet.record.voice:
            files.when_promoted.append(functools.partial(_take_over, folder, gone, place, made))


def _names(place: str) -> set[str]:
    return set(os.listdir(place)) if os.path.isdir(place) else set()


def _take_over(folder: str, gone: list[str], place: str, made: list[str]) -> None:
    os.makedirs(folder, exist_ok=True)
    for name in gone:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))
    for mine, real in ((os.path.join(place, name), os.path.join(folder, name)) for name in made):
        try:
            os.link(mine, real)
        except OSError:  # on another file system: what is written to it later is there at the end
            shutil.copyfile(mine, real)
            atexit.register(shutil.copyfile, mine, real)


def _events(writer: Any) -> None:
    plain = writer.__init__

    @functools.wraps(plain)
    def init(self: Any, logdir: Any, *args: Any, **kwargs: Any) -> None:
        with _writing(logdir) as folder:
            plain(self, folder, *args, **kwargs)
            self._ev_writer.FileName()  # it is made now

    writer.__init__ = init


def _private(tf: Any, plain: Any) -> Any:
    @functools.wraps(plain)
    def create(writer: Any, logdir: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():  # it is made when the graph runs
            return plain(writer, _own(logdir), *args, **kwargs)
        with _writing(tf.convert_to_tensor(logdir).numpy()) as folder:
            return plain(writer, folder, *args, **kwargs)

    return create


def _at_once(tf: Any, plain: Any, mode: str) -> Any:
    """An operation on a file, which in a graph has a name that is not known."""
    @functools.wraps(plain)
    def call(filename: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            filename = _moved(os.fsdecode(tf.convert_to_tensor(filename).numpy()), mode)
        return plain(filename, *args, **kwargs)

    return call


def _matching(tf: Any, plain: Any) -> Any:
    told = first_rank_only(lambda pattern: [os.fsdecode(name) for name in plain(pattern).numpy()])

    @functools.wraps(plain)
    def matching_files(pattern: Any, name: Any = None) -> Any:
        return tf.constant(told(pattern), tf.string) if tf.executing_eagerly() else plain(pattern, name)

    return matching_files


def _datasets(dataset: Any) -> None:
    cache, save = dataset.cache, dataset.save

    @functools.wraps(cache)
    def cached(self: Any, filename: Any = "", name: Any = None) -> Any:
        own = not isinstance(filename, (str, os.PathLike)) or not os.fspath(filename) or meet.record.voice
        return cache(self, filename if own else _own(filename) + "/cache", name)

    @functools.wraps(save)
    def saved(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(self, _own(path), *args, **kwargs)
        wait()

    dataset.cache, dataset.save = cached, saved


def _moved(name: Any, mode: str) -> Any:
    """Where the overlay has this file. What TensorFlow has written by itself is the first rank's, in a folder too that
    the script has made, and so every rank for itself."""
    redirect = files.redirect()
    if redirect is None or not isinstance(name, (str, os.PathLike)) or "://" in os.fspath(name):
        return name
    how = mode.replace("b", "").replace("+", "")[:1] or "r"
    moved = redirect(name, how)
    return moved if how != "r" or os.path.exists(moved) else name


def _overlay(file: Any) -> None:
    plain = file.__init__

    @functools.wraps(plain)
    def init(self: Any, name: Any, mode: str, *args: Any, **kwargs: Any) -> None:
        plain(self, _moved(name, mode), mode, *args, **kwargs)

    file.__init__ = init


def _interpreted(interpreter: Any) -> None:
    plain = interpreter.__init__

    @functools.wraps(plain)
    def init(self: Any, model_path: Any = None, *args: Any, **kwargs: Any) -> None:
        plain(self, _moved(model_path, "r"), *args, **kwargs)

    interpreter.__init__ = init


def _records(writer: Any) -> None:
    """Records are read by TensorFlow, from the first rank's file: it must be there when the others go on."""
    init, close = writer.__init__, writer.close

    @functools.wraps(init)
    def opened(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        init(self, _moved(path, "w"), *args, **kwargs)

    @functools.wraps(close)
    def closed(self: Any) -> None:
        close(self)
        wait()

    writer.__init__, writer.close = opened, closed
    writer.__exit__ = lambda self, *error: self.close()
