"""One voice (clause 6): of N ranks that run the same script, one rank's files are real.

The *voice* writes where the script says. Every other rank writes into a private overlay, a temporary folder
removed at exit, and reads back what it wrote. What such a rank sees is the file system as it was for the run, plus
its own changes, minus the voice's: a rank that comes later must find no file that the voice, being faster, has
made, or it would take another branch.

One mechanism does this for whatever a rank's process does, and its children: a library below Python (``native/``, whose
``files.h`` leads through it), preloaded before libc, stands behind every call that names a file. On the voice it keeps
what was there before it is changed; elsewhere it acts in the rank's view and overlay. So Python, C++ and Rust writers,
``cp`` and ``echo >> log`` in a child are treated alike. ``library.py`` is Python's way to it.

**On one rank nothing is preloaded.** ``/dev``, ``/proc``, ``/sys``, descriptors, the caches of compilers and of
``oars.data``, MPI's own folder and the run folder are the same for all. Not caught: system calls without libc (static
binaries, Go), set-uid programs, memory-mapped changes of a file that the voice had open before the run; changes of mode
or time by the voice.

When the voice dies, ``promote`` makes the first survivor the voice: ``promotion.py`` makes its overlay real, and what
it has open goes on there (``native/held.c``).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import getpass
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from oars.adapt.files import library, promotion
from oars.adapt.files.own import Own
from oars.data import cache as data_cache

_own: Own | None = None  # this rank's overlay, also once it is the voice
_lock = -1
_shared = ""


def install(rank: int, voice: bool, shared_dir: Path, same_for_all: tuple[Path, ...] = ()) -> None:
    """Make this process's files the run's (``voice``) or its own; ``same_for_all``: folders real on every rank."""
    global _own, _lock, _shared
    os.makedirs(shared_dir / "kept", exist_ok=True)
    _shared = shared = os.path.realpath(shared_dir)
    through = _same_for_all([shared, str(shared_dir), *map(str, same_for_all)])
    config = {"side": "voice" if voice else "own", "token": str(rank), "pid": str(os.getpid()), "shared": shared}
    place = f"{shared}/voice-{rank}"
    if not voice:
        _remove_orphans()
        root = os.path.realpath(tempfile.mkdtemp(prefix=f"oars-{rank}-"))
        _own = Own(str(rank), root, shared)
        _lock = os.open(root + "/journal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(_lock, fcntl.LOCK_EX)  # who gets it knows that this process and its forks have ended
        atexit.register(close)
        config["root"], place = root, root + "/config"
        through.append(root + "/")
    text = "".join(f"{key} {value}\n" for key, value in config.items()) + "through " + "\n".join(through) + "\n"
    with open(place, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    library.begin(place)


def promote() -> None:
    """The voice has died: make real what this rank has written and be the voice. Does nothing on the voice itself.

    OSError (a full disk) names the file that could not be made real. Then the overlay stays, whole, also after the
    process has ended, and ``promote`` can be called again.
    """
    if _own is None or not overlaid():
        return
    folder = None
    with contextlib.suppress(OSError):  # this rank has removed it
        folder = os.getcwd()
    with library.alone():  # no thread and no loader worker changes files meanwhile
        try:
            library.speak()
            change = promotion.Promotion(_own)
            change.run()
            was_open = promotion.held(_own.tree)
            library.become_voice()
        except OSError as error:
            _own.keep()
            text = f"{error.strerror} (what this rank has written is kept in {_own.tree})"
            raise OSError(error.errno, text, error.filename) from error
        _own.keep(False)
        if folder is not None:
            with contextlib.suppress(OSError):  # it stays nowhere
                os.chdir(folder)
        if library.has_children():  # they may have files open in the mirror, until they hear of this
            change.catch_up()
        else:  # SQLite looks for its files under the names it was given
            promotion.clear(_own.tree, keep=was_open | change.led_to)


def overlaid() -> bool:
    """Whether this rank's changes go to an overlay."""
    return _own is not None and not library.is_voice()


def overlay() -> Own:
    """This rank's overlay."""
    assert _own is not None
    return _own


def made() -> tuple[set[str], dict[str, int]]:
    """What the run has made so far; the files that it appends to, and how long they were before."""
    return library.made(_shared) if _shared else (set(), {})


def changes() -> int:
    """Grows when this thread makes a file, changes one that it has not changed before, or removes one."""
    return library.changes()


def strangers() -> list[str]:
    """Programs that some rank has started and that the library cannot stand before."""
    if not _shared:
        return []
    with library.plain():
        return sorted(name.removeprefix("past-") for name in os.listdir(_shared) if name.startswith("past-"))


def explained(error: BaseException) -> str:
    """What a user should know of an error that only a rank with an overlay meets, or ``""``."""
    if overlaid() and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"what is full is this rank's private copy of files, {overlay().root}: set TMPDIR to a larger place"
    return ""


def _same_for_all(folders: list[str]) -> list[str]:
    """Folders, each with a slash at its end, that no rank overlays."""
    # Compilers' caches are made for many processes at once, and what MPI keeps in files its processes share.
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
        f"{home}/.nv",
        str(data_cache.folder()),
        *_folders_of_mpi(),
    ]
    spelled = [os.path.abspath(folder) for folder in folders]
    every = [*spelled, *map(os.path.realpath, spelled), "/dev", "/proc", "/sys"]
    return sorted({folder.rstrip("/") + "/" for folder in every})


def _folders_of_mpi() -> list[str]:
    """Where MPI's processes on this host meet in files; the environment names it, where we have hidden it."""
    try:
        started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(value) for name, _, value in (line.partition(b"=") for line in started_with)
            if name in (b"PMIX_SERVER_TMPDIR", b"PRTE_SESSION_DIR", b"OMPI_FILE_LOCATION") and value]


def close() -> None:
    """Remove this rank's overlay. Python's normal end does it; who ends by ``os._exit`` calls it first."""
    if _own is None or os.getpid() != _own.pid:  # the voice from the start, or a forked child
        return
    with library.plain():
        if not os.path.lexists(_own.root + "/keep"):
            shutil.rmtree(_own.root, ignore_errors=True)


def _remove_orphans() -> None:
    """Remove overlays whose rank was killed: nobody holds the lock on their journal any more.

    Anybody may make such a folder in a host's temporary one: only the user's own are opened, and no pipe is waited for.
    """
    for root in Path(tempfile.gettempdir()).glob("oars-*"):
        with contextlib.suppress(OSError):
            there = os.lstat(root)
            if there.st_uid != os.getuid() or not stat.S_ISDIR(there.st_mode):
                continue
            if time.time() - there.st_mtime < 60:  # perhaps just being made
                continue
            if os.path.lexists(root / "keep"):  # the last copy of what a run has written
                continue
            journal = os.open(root / "journal", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(journal)
