"""A figure that a script shows (``plt.show()``) is a window of the first rank's, not one of every rank.

The others wait until the user has looked, and get the answer where he gives one (``waitforbuttonpress``, ``ginput``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from oars.adapt.replay.tape import tape

if TYPE_CHECKING:
    from collections.abc import Callable

    from oars.engine.world import World


def once(world: World) -> Any:
    """Around what shows a figure."""
    def layer(plain: Callable[..., Any]) -> Any:
        @functools.wraps(plain)
        def shown(*args: Any, **kw: Any) -> Any:
            def look() -> Any:
                world.board.enter("input")  # a user who takes his time is no stall
                return plain(*args, **kw)

            return None if tape.playing else world.broadcast(look)

        return shown

    return layer
