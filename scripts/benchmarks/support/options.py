"""Options that several cases have, each with its own defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_numbers(parser: argparse.ArgumentParser, flag: str, default: Sequence[float], unit: str, text: str) -> None:
    """Add an option of one number or several."""
    parser.add_argument(flag, type=float, nargs="+", default=list(default), metavar=unit, help=text)


def add_compute(parser: argparse.ArgumentParser, default: float) -> None:
    """Add ``--compute`` of trainings whose ranks sleep beside their real work."""
    text = "slept in each step beside the work"
    parser.add_argument("--compute", type=float, default=default, metavar="S", help=text)


def add_fewer(parser: argparse.ArgumentParser) -> None:
    """Add ``--fewer``, for cases that run a second job of fewer ranks."""
    parser.add_argument("--fewer", type=int, default=4, metavar="N", help="ranks of a second job; 0: none")


def add_periods(parser: argparse.ArgumentParser, local: int, whole: int) -> None:
    """Add the options of ranks that follow leaders."""
    parser.add_argument("--groups", type=int, default=2, metavar="N", help="of ranks that have a leader each (lsgd)")
    text = "steps between a group's pulls (lsgd)"
    parser.add_argument("--local-period", type=int, default=local, metavar="N", help=text)
    text = "steps between pulls of all ranks"
    parser.add_argument("--global-period", type=int, default=whole, metavar="N", help=text)
