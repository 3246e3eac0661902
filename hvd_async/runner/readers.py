"""Parsers of flags' values; a wrong value is an argparse.ArgumentTypeError that says what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def count(least: int) -> Callable[[str], int]:
    """A whole number, not below ``least``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: give {least} or more")
        return value

    return read


def number(least: float, *, below: float = math.inf, open_: bool = False) -> Callable[[str], float]:
    """A finite number in [least, below), or in (least, below) if `open_`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value) or not least <= value < below or (open_ and value == least):
            bounds = f"{'above' if open_ else 'at least'} {least:g}" + (
                f" and below {below:g}" if below < math.inf else ""
            )
            raise argparse.ArgumentTypeError(f"{text} must be {bounds}")
        return value

    return read


def marks(text: str) -> tuple[float, ...]:
    """Epochs, rising."""
    try:
        marks = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of epochs: write 30,60,80") from None
    if any(not math.isfinite(mark) or mark <= 0 for mark in marks) or list(marks) != sorted(set(marks)):
        raise argparse.ArgumentTypeError(f"{text!r}: the epochs must be above 0 and rise")
    return marks


def peers(text: str) -> int | dict[int, int]:
    """A number of ranks, or numbers by epoch."""
    one = count(1)
    if ":" not in text:
        return one(text)
    found = _by_epoch(text, "0:1,30:2", one)
    if 0 not in found:
        raise argparse.ArgumentTypeError(f"{text!r} does not say how many from the start: begin with 0:, as 0:1,30:2")
    return found


def switches(names: Iterable[str]) -> Callable[[str], dict[int, str]]:
    """Some of these names, by the epoch from which they hold."""
    return lambda text: _by_epoch(text, "0:allreduce,5:sgp", _one_of(names))


def _by_epoch(text: str, example: str, read: Callable[[str], T]) -> dict[int, T]:
    """Reads EPOCH:VALUE,EPOCH:VALUE."""
    found: dict[int, T] = {}
    for part in text.split(","):
        epoch, colon, value = part.partition(":")
        if not (colon and epoch.strip().isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of EPOCH:VALUE: write it as {example}")
        if found and int(epoch) <= max(found):
            raise argparse.ArgumentTypeError(f"{text!r}: the epochs must rise, as in {example}")
        found[int(epoch)] = read(value.strip())
    return found


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read


def group(text: str) -> str | int:
    """``host``, or how many ranks are a group."""
    return text if text == "host" else count(1)(text)
