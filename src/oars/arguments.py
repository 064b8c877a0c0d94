"""What all commands share in reading their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"oars: {message}; see {self.prog} --help\n")


def count_of(things: str) -> Callable[[str], int]:
    """The type of an argument that counts: 1 or more."""
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is no number of {things}: 1 or more")
        return int(text)
    return count


def number(text: str) -> int:
    """The type of an argument that is 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number: 0 or more")
    return int(text)
