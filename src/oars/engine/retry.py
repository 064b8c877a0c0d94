"""Messages that are repeated by the ranks that are left, until none is lost in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from oars.engine.world import RankLost

Result = TypeVar("Result")


def until_none_is_lost(message: Callable[[], Result], adopt: Callable[[], None]) -> Result:
    """What ``message`` gives; whenever a rank is lost in it, ``adopt`` the ranks that are left and ask again."""
    while True:
        try:
            return message()
        except RankLost:
            adopt()
