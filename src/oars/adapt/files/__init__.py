"""One voice (clause 6): of N ranks that run the same script, one rank's files are real.

The *voice* writes where the script says. Every other rank writes into a private overlay, a temporary folder
removed at exit, and reads back what it wrote. What such a rank sees is the file system as it was for the run, plus
its own changes, minus the voice's: a rank that comes later must find no file that the voice, being faster, has
made, or it would take another branch. ``voice.py`` keeps the originals, ``view.py`` looks past the voice's
changes, ``overlay.py`` makes the rank's own, ``patches.py`` puts it all under Python's file functions:

=============================================== ==================================== ===================================
patched                                         on the voice                         on the other ranks
=============================================== ==================================== ===================================
``open``, ``io.open``, ``os.open``              writes down what was there first     overlay if it may write, else view
``os.mkdir rmdir unlink remove rename replace   writes down what was there first     overlay
link symlink truncate``
``os.chmod chown lchown utime setxattr          -                                    overlay
removexattr``
``os.stat lstat access readlink statvfs         -                                    view
getxattr listxattr``
``os.listdir scandir``                          what the run has made comes last,    view
                                                by name: elsewhere it lies elsewhere
``os.chdir fchdir getcwd getcwdb``              -                                    can enter its folders
``tempfile`` (names it invents itself)          -                                    real files, removed at the end
``shutil.rmtree``                               goes by names, not descriptors       goes by names, not descriptors
``torch.save``, ``torch.jit.save/load``,        writes down what was there first     given the path in the overlay
``from_file``; ``sqlite3.connect``;
``h5py.File``
``import`` of a module the script wrote         -                                    finds the rank's own
=============================================== ==================================== ===================================

All of ``os.path``, ``pathlib``, ``shutil``, ``glob``, ``gzip``, ``zipfile``, ``logging``, NumPy, Pillow, matplotlib
and tensorboard rest on these. **On one rank nothing is installed.** ``/dev``, ``/proc``, ``/sys``, descriptors,
the caches of compilers and of ``oars.data``, and the run folder are the same for all. Not caught: files that other
programs write (they are seen as they are), C libraries not named above, ``dir_fd`` arguments, changes of mode or time
by the voice.

When the voice dies, ``promote`` makes the first survivor the voice: ``promotion.py`` makes its overlay real,
``held.py`` takes along what it has open, and the replacements above act as the voice's from then on.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import getpass
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from oars.adapt.files import held, ledger, outside, patches, real
from oars.adapt.files.ledger import Ledger
from oars.adapt.files.overlay import Overlay
from oars.adapt.files.promotion import Promotion
from oars.adapt.files.voice import Voice
from oars.adapt.python.imports import when_imported
from oars.data import cache as data_cache

_side: Voice | Overlay | None = None
when_promoted: list[Callable[[], None]] = []  # called when this rank has become the voice


def install(rank: int, voice: bool, shared_dir: Path, same_for_all: tuple[Path, ...] = ()) -> None:
    """Make this process's files the run's (``voice``) or its own; ``same_for_all``: folders real on every rank."""
    global _side
    real.makedirs(shared_dir, exist_ok=True)
    shared = real.realpath(shared_dir)
    told = Ledger(shared + "/ledger")
    through = _same_for_all([shared, str(shared_dir), *map(str, same_for_all)])
    if voice:
        _side = Voice(str(rank), shared, told, tuple(through), os.getpid())
        patches.install_voice(_side)
    else:
        _remove_orphans()
        root = real.realpath(tempfile.mkdtemp(prefix=f"oars-{rank}-"))
        _side = Overlay(str(rank), root, shared, told, [*through, root + "/"], _follow)
        atexit.register(close)
        patches.install_overlay(_side)
    sys.meta_path.insert(0, outside.WithoutTensorFlow())
    redirect = outside.redirect_for(_side)
    when_imported("sqlite3", lambda module: outside.patch_sqlite(module, redirect))
    when_imported("h5py", lambda module: outside.patch_h5py(module, redirect))


def promote() -> None:
    """The voice has died: make real what this rank has written and be the voice. Does nothing on the voice itself.

    OSError (a full disk) names the file that could not be made real. Then the overlay stays, whole, also after the
    process has ended, and ``promote`` can be called again.
    """
    overlay = _side
    if not isinstance(overlay, Overlay) or overlay.voice is not None:
        return
    with overlay.gate.alone():  # no thread and no loader worker changes files meanwhile
        voice = overlay.voice_to_be()
        try:
            voice.speak()
            promotion = Promotion(overlay, voice)
            promotion.run()
            was_open = held.paths(overlay.tree)
            _be(voice, overlay)
        except OSError as error:
            overlay.keep()
            text = f"{error.strerror} (what this rank has written is kept in {overlay.tree})"
            raise OSError(error.errno, text, error.filename) from error
        overlay.keep(False)
        if overlay.gate.forked:  # workers may have files open in the mirror, until they hear of this
            promotion.catch_up()
        else:  # SQLite looks for its files under the names it was given
            held.clear(overlay.tree, keep=was_open)
    for call in when_promoted:
        call()


def _follow() -> None:
    """In a process forked from a rank that has become the voice: be it too."""
    overlay = _side
    assert isinstance(overlay, Overlay)
    voice = overlay.voice_to_be()
    if overlay.speaker != overlay.token:  # and has died since
        real._exit(1)
    _be(voice, overlay)


def _be(voice: Voice, overlay: Overlay) -> None:
    held.follow(overlay.tree)
    overlay.act_as(voice)
    patches.switch_to_voice(voice)


def patch_torch(torch: ModuleType) -> None:
    """The functions of PyTorch that open files in C++; does nothing on one rank."""
    if _side is not None:
        outside.patch_torch(torch, outside.redirect_for(_side))


def redirect() -> outside.Redirect | None:
    """How a library that opens files by itself is handed the path that stands for the script's; None on one rank."""
    return outside.redirect_for(_side) if _side is not None else None


def changes() -> int:
    """Grows when this thread makes a file, changes one that it has not changed before, or removes one."""
    return ledger.written()


def _same_for_all(folders: list[str]) -> list[str]:
    """Folders, each with a slash at its end, that no rank overlays."""
    # Compilers run as other programs and must see their sources; these caches are made for many processes at once.
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    home = os.path.expanduser("~")
    environ = os.environ.get
    folders += [
        environ("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{user}",
        environ("TRITON_CACHE_DIR") or f"{home}/.triton",
        environ("TORCH_EXTENSIONS_DIR") or f"{home}/.cache/torch_extensions",
        str(data_cache.folder()),
    ]
    spelled = [os.path.abspath(folder) for folder in folders]
    every = [*spelled, *map(real.realpath, spelled), "/dev", "/proc", "/sys"]
    return sorted({folder.rstrip("/") + "/" for folder in every})


def close() -> None:
    """Remove this rank's overlay. Python's normal end does it; who ends by ``os._exit`` calls it first."""
    overlay = _side
    if not isinstance(overlay, Overlay) or os.getpid() != overlay.pid:  # the voice, or a forked child
        return
    if os.path.lexists(overlay.root + "/keep"):
        return
    for path in overlay.temporaries():  # none once it is the voice: then they are the script's to remove
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            real.unlink(path)
    shutil.rmtree(overlay.root, ignore_errors=True)  # all below it; the folder itself stands in a real one
    with contextlib.suppress(OSError):
        real.rmdir(overlay.root)


def _remove_orphans() -> None:
    """Remove overlays whose rank was killed: nobody holds the lock on their journal any more."""
    for root in Path(tempfile.gettempdir()).glob("oars-*"):
        with contextlib.suppress(OSError):
            if time.time() - real.lstat(root).st_mtime < 60:  # perhaps just being made
                continue
            if os.path.lexists(root / "keep"):  # the last copy of what a run has written
                continue
            with real.open_file(root / "journal", "rb") as journal:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
