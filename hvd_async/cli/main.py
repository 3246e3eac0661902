"""Chooses the command. Each is a module of this package, which is imported when its command is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import hvd_async
from hvd_async.errors import HvdAsyncError

COMMANDS: dict[str, str] = {
    "doctor": "will Horovod and hvd_async work on this machine, and how quick is its network?",
    "record": "run a training script and record when each rank computes and when it waits",
    "advise": "learn from a recorded run who makes whom wait, and what each mode would bring",
    "simulate": "simulate a job of so many ranks under several modes",
    "plot": "draw a recorded run: who computed when, and who waited",
}
"""By the command's name, which is its module's, what it does: a line for ``--help``."""


class Command(Protocol):
    """A command's module; its docstring's first paragraph is what ``--help`` says of it.

    ``add_arguments`` adds its options to a parser, ``run`` does it and returns the exit status.
    """

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def module_of(command: str) -> Command:
    """Return a command's module."""
    return cast(Command, importlib.import_module(f"hvd_async.cli.{command}"))


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser, with the options of ``command``, or those of none."""
    about = "Optimizers on Horovod that do not wait: look at a machine, record a job, learn what would quicken it."
    parser = argparse.ArgumentParser("hvd_async", description=about)
    parser.add_argument("--version", action="version", version=f"hvd_async {hvd_async.__version__}")
    several = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        own = several.add_parser(name, help=line, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        if name == command:
            module = module_of(name)
            own.description = (module.__doc__ or "").split("\n\n")[0]
            module.add_arguments(own)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    named = next((word for word in given if not word.startswith("-")), None)
    parser = make_parser(named)
    parsed = parser.parse_args(given)
    try:
        return module_of(parsed.command).run(parsed)
    except (HvdAsyncError, ValueError, OSError) as error:
        parser.exit(2, f"hvd_async {parsed.command}: {error}\n")
