"""Converters of numbers on the command line: each is a ``type=`` of an argument."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def number(kind: type[Number], is_valid: Callable[[Number], bool], rule: str) -> Callable[[str], Number]:
    """Return a converter of text to a number; ``rule``: human-readable description of valid numbers."""

    def number(text: str) -> Number:
        value = kind(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
        return value

    return number


COUNT = number(int, lambda value: value >= 1, "at least 1")
RANKS = number(int, lambda value: value >= 2, "at least 2")
POSITIVE = number(float, lambda value: value > 0, "a number above 0")
NOT_NEGATIVE = number(float, lambda value: value >= 0, "a number of at least 0")
SHARE = number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
SECONDS = number(float, lambda value: 0 < value < 86400, "a number of seconds above 0 and below 86400")
