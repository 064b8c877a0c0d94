"""The replacements themselves, and how they are put in place of Python's own (the table is in ``oars.adapt.files``).

``install_voice`` and ``install_overlay`` build one replacement per function. ``replace`` then puts each wherever
the original is held: in ``os``, ``io`` and ``builtins``, under other names in modules already imported
(``from builtins import open as bltn_open``), in class bodies and in default arguments (``tempfile``).

A rank that becomes the voice keeps its replacements, since the script may hold any of them; from then on each does
what ``_then`` has for its original: the voice's function, or else the original itself.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from types import FunctionType
from typing import Any

from oars.adapt.files import real
from oars.adapt.files.overlay import Overlay, full
from oars.adapt.files.view import TEMPORARY, Entries, Entry
from oars.adapt.files.voice import Voice

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MAY_WRITE = frozenset("wxa+")
_ONLY_READ = frozenset(("r", "rb", "rt"))
_MODES = {"".join(sorted(kind + plus + b)) for kind in "rwxa" for plus in ("", "+") for b in ("", "b", "t")}
_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")
_READERS = ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr")
_then: dict[Any, Any] = {}  # empty while this process is not a voice that was another rank before
_ADJUSTERS = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr")


def install_voice(voice: Voice) -> None:
    """Let every function that changes files tell ``voice`` first."""
    _remove_by_name()
    replace(_voice_functions(voice))


def switch_to_voice(voice: Voice) -> None:
    """Let what ``install_overlay`` has put in place act as ``install_voice`` would."""
    _then.update(_voice_functions(voice))


def _voice_functions(voice: Voice) -> dict[Any, Any]:
    def first(name: str, tell: Callable[..., None], paths: int = 1) -> None:
        original = getattr(real, name)

        @functools.wraps(original)
        def call(*args: Any, **kw: Any) -> Any:
            if not _by_descriptor(kw):
                given = [*args, *(kw[key] for key in ("path", "src", "dst") if key in kw)]
                with voice.turn():
                    tell(*given[:paths])
                    return original(*args, **kw)
            return original(*args, **kw)

        swaps[original] = call

    swaps: dict[Any, Any] = {}
    first("mkdir", voice.making)
    first("rmdir", voice.removing)
    first("unlink", voice.removing)
    first("remove", voice.removing)
    first("rename", voice.renaming, 2)
    first("replace", voice.renaming, 2)
    first("link", lambda source, target: voice.making(target), 2)
    first("symlink", lambda source, target: voice.making(target), 2)
    first("truncate", lambda path: voice.writing(path, empty=False, create=0))

    @functools.wraps(real.open)
    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & _WRITING and dir_fd is None:
            with voice.turn():
                voice.opening(path, flags)
                return real.open(path, flags, mode)
        return real.open(path, flags, mode, dir_fd=dir_fd)

    @functools.wraps(real.open_file)
    def open_file(file: Any, mode: str = "r", *args: Any, **kw: Any) -> Any:
        # "r" alone, "rb" and "rt" never write; an opener of the script's own calls os.open.
        if mode != "r" and mode != "rb" and not isinstance(file, int) and kw.get("opener") is None and len(args) < 6:
            if not _MAY_WRITE.isdisjoint(mode):
                kw["opener"] = opener  # called once open has found nothing wrong with its arguments
        return real.open_file(file, mode, *args, **kw)

    def opener(path: Any, flags: int) -> int:
        return os_open(path, flags, 0o666)

    @functools.wraps(real.listdir)
    def listdir(path: Any = None) -> Any:
        names = real.listdir(path)
        if isinstance(path, int):
            return names
        listed = voice.listed("." if path is None else path, list(map(os.fsdecode, names)))
        return list(map(os.fsencode, listed)) if isinstance(path, bytes) else listed

    @functools.wraps(real.scandir)
    def scandir(path: Any = None) -> Any:
        if isinstance(path, int):
            return real.scandir(path)
        with real.scandir(path) as entries:
            found = {os.fsdecode(entry.name): entry for entry in entries}
        return Entries(found[name] for name in voice.listed("." if path is None else path, list(found)))

    swaps.update({real.open: os_open, real.open_file: open_file, real.listdir: listdir, real.scandir: scandir})
    return swaps


def install_overlay(overlay: Overlay) -> None:
    """Let every file function act in this rank's view and overlay."""
    swaps: dict[Any, Any] = {}
    for name in _READERS:
        if hasattr(os, name):
            swaps[getattr(os, name)] = _reader(getattr(os, name), overlay, follow=name not in ("lstat", "readlink"))
    for name in _ADJUSTERS:
        if hasattr(os, name):
            original = getattr(os, name)
            swaps[original] = _on_paths(original, functools.partial(overlay.adjust, original), overlay)
    for original, ours in (
        (os.mkdir, overlay.mkdir),
        (os.rmdir, overlay.rmdir),
        (os.unlink, overlay.unlink),
        (os.remove, overlay.unlink),
        (os.rename, overlay.rename),
        (os.replace, overlay.rename),
        (os.link, overlay.link),
        (os.symlink, overlay.symlink),
    ):
        swaps[original] = _on_paths(original, ours, overlay)
    swaps.update(_listers(overlay))
    swaps.update(_openers(overlay))
    swaps[os.chdir] = functools.wraps(os.chdir)(lambda path: (real.chdir if _then else overlay.chdir)(path))
    swaps[os.fchdir] = functools.wraps(os.fchdir)(lambda fd: (real.fchdir if _then else overlay.chdir)(fd))
    swaps[os.getcwd] = functools.wraps(os.getcwd)(lambda: (real.getcwd if _then else overlay.getcwd)())
    swaps[os.getcwdb] = functools.wraps(os.getcwdb)(lambda: os.fsencode(os.getcwd()))
    _remove_by_name()
    replace(swaps)
    _temporaries(overlay)
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]  # copies end in our write, which names a full overlay
    sys.meta_path.insert(0, _OwnModules(overlay))


def _remove_by_name() -> None:
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # rmtree goes by names, which we see


def _by_descriptor(kw: dict[str, Any]) -> bool:
    """Whether a path is relative to an open folder, which the script (or shutil) knows better than we do."""
    return any(kw.get(key) is not None for key in _FOLDERS)


def _reader(original: Any, overlay: Overlay, follow: bool) -> Any:
    """``original``, which only looks at a path, in this rank's view."""
    seen, find, news = overlay.seen, overlay.find, overlay.news
    by_lstat = original in (real.stat, real.lstat)

    @functools.wraps(original)
    def call(path: Any, *args: Any, **kw: Any) -> Any:
        if args or kw or _then:
            if _then or kw.get("dir_fd") is not None or isinstance(path, int):
                return original(path, *args, **kw)
            return seen(original, path, follow and kw.get("follow_symlinks", True), *args, **kw)
        if by_lstat and type(path) is str:  # the beaten track of ``seen``: what is no link need not be followed
            try:
                result = real.lstat(find(path, False)[1])
            except OSError:
                pass
            else:
                if (not follow or result.st_mode & 0o170000 != stat.S_IFLNK) and not news():
                    return result
        elif isinstance(path, int):
            return original(path)
        return seen(original, path, follow)

    return call


def _on_paths(original: Any, ours: Callable[..., Any], overlay: Overlay) -> Any:
    """``ours`` in place of ``original``, unless it is about descriptors."""
    gate = overlay.gate

    @functools.wraps(original)
    def call(*args: Any, **kw: Any) -> Any:
        if _by_descriptor(kw) or args and isinstance(args[0], int):
            return original(*args, **kw)
        given = [kw[key] for key in ("path", "src", "dst") if key in kw]
        rest = {key: value for key, value in kw.items() if key not in ("path", "src", "dst", *_FOLDERS)}
        if not _then:
            with gate:
                if not _then:
                    return ours(*args, *given, **rest)
        return _then.get(original, original)(*args, **kw)

    return call


def _listers(overlay: Overlay) -> dict[Any, Any]:
    @functools.wraps(os.listdir)
    def listdir(path: Any = None) -> Any:
        if _then or isinstance(path, int):
            return _then.get(real.listdir, real.listdir)(path)
        found = overlay.names("." if path is None else path)
        return [os.fsencode(name) for name in found] if isinstance(path, bytes) else list(found)

    @functools.wraps(os.scandir)
    def scandir(path: Any = None) -> Any:
        if _then or isinstance(path, int):
            return _then.get(real.scandir, real.scandir)(path)
        base = os.fspath("." if path is None else path)
        found = overlay.names(base)
        if isinstance(base, bytes):
            names = {os.fsencode(name): entry for name, entry in found.items()}
            return Entries(iter([Entry(name, os.path.join(base, name), entry) for name, entry in names.items()]))
        prefix = base if base.endswith("/") else base + "/"
        return Entries(Entry(name, prefix + name, entry) for name, entry in found.items())

    return {os.listdir: listdir, os.scandir: scandir}


def _openers(overlay: Overlay) -> dict[Any, Any]:
    find, news, gate = overlay.find, overlay.news, overlay.gate

    @functools.wraps(real.open)
    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            return real.open(path, flags, mode, dir_fd=dir_fd)
        if flags & _WRITING and not _then:
            with gate:
                if not _then:
                    return overlay.open(path, flags, mode)
        if _then:
            return _then[real.open](path, flags, mode)
        if flags & os.O_PATH:
            return overlay.open_seen(path, flags, mode, not flags & os.O_NOFOLLOW)
        try:  # the beaten track: no link at the end, no news
            fd = real.open(find(path, False)[1], flags | os.O_NOFOLLOW)
        except OSError:
            pass
        else:
            if not news():
                return fd
            real.close(fd)
        return overlay.open_seen(path, flags, mode, not flags & os.O_NOFOLLOW)

    def opener(path: Any, flags: int) -> int:
        return os_open(path, flags, 0o666)

    class OverlayFile(real.FileIO):
        """The raw file under every ``open`` for writing: a full disk is reported with the overlay's name."""

        def write(self, data: Any) -> int:
            try:
                return super().write(data)
            except OSError as error:
                private = error.errno in (errno.ENOSPC, errno.EDQUOT) and not _then
                raise (full(error, overlay.root) if private else error) from None

    @functools.wraps(real.open_file)
    def open_file(file: Any, mode: str = "r", *args: Any, **kw: Any) -> Any:
        if _then:
            return _then[real.open_file](file, mode, *args, **kw)
        if isinstance(file, int) or len(args) > 5 or kw.get("opener") is not None:
            return real.open_file(file, mode, *args, **kw)  # an opener of the script's own calls os.open
        kw["opener"] = opener
        return real.open_file(file, mode, *args, **kw) if mode in _ONLY_READ else to_write(file, mode, *args, **kw)

    def to_write(
        file: Any, mode: str, buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        letters = frozenset(mode)
        if "b" in letters:
            usual = encoding is None and errors is None and newline is None and buffering != 1
        else:
            usual = buffering != 0
        if letters.isdisjoint("wxa+") or not usual or not closefd or "".join(sorted(mode)) not in _MODES:
            return real.open_file(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = OverlayFile(file, mode.replace("b", "").replace("t", ""), opener=opener)
        return _layers(raw, mode, buffering, encoding, errors, newline)

    return {real.open: os_open, real.open_file: open_file}


def _layers(raw: Any, mode: str, buffering: int, encoding: Any, errors: Any, newline: Any) -> Any:
    """Buffer and text layer over a raw file, as ``open`` puts them."""
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else max(io.DEFAULT_BUFFER_SIZE, getattr(raw, "_blksize", 0))
    try:
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1 or raw.isatty())
        text.mode = mode  # type: ignore[misc]
        return text
    except BaseException:
        raw.close()
        raise


def _temporaries(overlay: Overlay) -> None:
    """Files whose names ``tempfile`` invents in the system's folder are real: no two ranks get the same name, and
    sockets (of multiprocessing) and other programs need them. What is left of them goes when the rank ends."""
    inner, mkdtemp = tempfile._mkstemp_inner, tempfile.mkdtemp  # type: ignore[attr-defined]

    def invent(make: Callable[[Any], Any], folder: Any, prefix: Any, suffix: Any) -> tuple[Any, Any]:
        names = tempfile._get_candidate_names()  # type: ignore[attr-defined]
        while True:
            name = next(names)
            path = os.path.join(folder, prefix + (os.fsencode(name) if isinstance(folder, bytes) else name) + suffix)
            try:
                made = make(path)
            except FileExistsError:
                continue
            overlay.mark(real.realpath(os.fsdecode(path)), TEMPORARY)
            return made, path

    @functools.wraps(inner)
    def mkstemp_inner(dir: Any, pre: Any, suf: Any, flags: int, output_type: type) -> Any:
        if _then or os.fsdecode(dir) != tempfile.gettempdir():
            return inner(dir, pre, suf, flags, output_type)
        return invent(lambda path: real.open(path, flags, 0o600), dir, pre, suf)

    @functools.wraps(mkdtemp)
    def our_mkdtemp(suffix: Any = None, prefix: Any = None, dir: Any = None) -> Any:
        prefix, suffix, dir, _ = tempfile._sanitize_params(prefix, suffix, dir)  # type: ignore[attr-defined]
        if _then or os.fsdecode(dir) != tempfile.gettempdir():
            return mkdtemp(suffix, prefix, dir)
        return invent(lambda path: real.mkdir(path, 0o700), dir, prefix, suffix)[1]

    tempfile._mkstemp_inner = mkstemp_inner  # type: ignore[attr-defined]
    tempfile.mkdtemp = our_mkdtemp


class _OwnModules:
    """Imports what this rank itself has written: a module in the mirror stands before the real one."""

    def __init__(self, overlay: Overlay) -> None:
        self._tree = overlay.tree

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if _then:
            return None
        places = [self._tree + os.path.abspath(place) for place in (path or sys.path)]
        places = [place for place in places if os.path.isdir(place)]
        if not places:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, places, target)
        return spec if spec is not None and spec.loader is not None else None  # a mere folder is no module


def replace(swaps: dict[Any, Any]) -> None:
    """Put every replacement wherever its original is held by a module that is already imported."""
    by_id = {id(original): (original, ours) for original, ours in swaps.items()}
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        for original, ours in swaps.items():
            if original in known:
                known.add(ours)
    for name, module in list(sys.modules.items()):
        # posix and _io keep the originals: the import system runs on them.
        if name in ("posix", "_io", "_pyio") or name.startswith(("importlib", "_frozen_importlib", "oars.")):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in by_id:
                setattr(module, key, by_id[id(value)][1])
    for holder in ("pathlib", "tempfile", "glob"):
        for value in list(vars(sys.modules.get(holder, builtins)).values()):
            if isinstance(value, type) and value.__module__.partition(".")[0] == holder:
                _replace_in_class(value, by_id)
    openers = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
    for table in () if openers is None else filter(lambda value: isinstance(value, dict), vars(openers).values()):
        table.update({key: by_id[id(value)][1] for key, value in table.items() if id(value) in by_id})  # np.loadtxt


def _replace_in_class(kind: type, by_id: dict[int, Any]) -> None:
    """Functions that a class body or a default argument caught when its module was imported."""
    for key, value in list(vars(kind).items()):
        held = value.__func__ if isinstance(value, staticmethod) else value
        if id(held) in by_id:
            setattr(kind, key, staticmethod(by_id[id(held)][1]))
        elif isinstance(held, FunctionType) and held.__defaults__:
            held.__defaults__ = tuple(by_id.get(id(value), (0, value))[1] for value in held.__defaults__)
