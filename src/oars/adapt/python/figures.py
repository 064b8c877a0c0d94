"""A figure that a script shows (``plt.show()``) is a window of the first rank's, not one of every rank.

The others wait until the user has looked, and get the answer where he gives one (``waitforbuttonpress``, ``ginput``).
"""

from __future__ import annotations

import functools
import os
from typing import Any

from oars.adapt.python.imports import when_imported
from oars.adapt.replay.tape import tape


def install(world: Any) -> None:
    """To be called before the script imports matplotlib."""
    if world.rank:
        os.environ["MPLBACKEND"] = "Agg"  # interactive mode opens windows without show()
    when_imported("matplotlib.pyplot", lambda pyplot: _patch(pyplot, world))


def _patch(pyplot: Any, world: Any) -> None:
    for owner, name in ((pyplot, "show"), (pyplot.Figure, "waitforbuttonpress"), (pyplot.Figure, "ginput")):
        setattr(owner, name, _once(getattr(owner, name), world))


def _once(plain: Any, world: Any) -> Any:
    @functools.wraps(plain)
    def shown(*args: Any, **kw: Any) -> Any:
        def look() -> Any:
            world.board.enter("input")  # a user who takes his time is no stall
            return plain(*args, **kw)

        return None if tape.playing else world.broadcast(look)

    return shown
