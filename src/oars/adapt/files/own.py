"""A rank that is not the voice, as Python sees it: where its mirror is, and what it has changed.

The changes themselves are made below Python (``native/overlay.c``). What is here is for the moments when a rank's files
are taken as a whole: when it becomes the voice, joins a run, or a resumed run reaches the place of its snapshot.
"""

from __future__ import annotations

import os
import shutil
import stat
from time import time

from oars.adapt.files import library
from oars.adapt.files.library import GONE, HERE, NEW


class Own:
    """This rank's overlay. ``token``: its name as a voice."""

    def __init__(self, token: str, root: str, shared: str) -> None:
        self.token, self.root, self.shared = token, root, shared
        self.tree = root + "/tree"
        self.start = time()
        self.pid = os.getpid()
        os.mkdir(self.tree)

    def touched(self) -> set[str]:
        """Every path that a voice or this rank has changed, and all that is in the mirror."""
        paths = {*library.before(self.shared), *library.mine(self.root)}
        with library.plain():
            for folder, folders, files in os.walk(self.tree):
                paths.update(f"{folder}/{name}"[len(self.tree):] for name in (*folders, *files))
        return paths

    def adopt(self) -> None:
        """This rank joins a run that is going: what the voice has made of files so far is taken for its own doing."""
        for path in sorted(library.before(self.shared)):
            if library.find(path, follow=False)[2] != library.PURE:  # else it came with its folder
                self._adopt(path)

    def forget(self) -> None:
        """Nothing has been changed by this rank."""
        for path in library.mine(self.root):
            library.mark(path, 0)

    def keep(self, yes: bool = True) -> None:
        """Let the overlay outlive this process, or no longer."""
        try:
            os.symlink("journal", self.root + "/keep") if yes else os.unlink(self.root + "/keep")
        except OSError:
            pass

    def _adopt(self, where: str) -> None:
        """Have here what really stands at ``where``; a file that is here already, and open, in place."""
        place = self.tree + where
        with library.plain():
            try:
                there = os.lstat(where)
            except OSError:
                library.mark(where, GONE)
                return
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if stat.S_ISDIR(there.st_mode):
                os.makedirs(place, exist_ok=True)
                for name in os.listdir(where):
                    self._adopt(f"{where}/{name}")
            elif stat.S_ISLNK(there.st_mode):
                os.symlink(os.readlink(where), place)
            elif stat.S_ISREG(there.st_mode):
                shutil.copyfile(where, place)  # truncates: an open one goes on
                shutil.copystat(where, place)
        library.mark(where, NEW if stat.S_ISDIR(there.st_mode) else HERE)
