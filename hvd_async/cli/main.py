"""Entry point of the command line. A command is a module of this package, imported when the command is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import hvd_async
from hvd_async.errors import HvdAsyncError

COMMANDS: dict[str, str] = {
    "doctor": "will Horovod and hvd_async work on this machine, and how fast is its network?",
    "record": "run a training script and record when each rank computes and when it waits",
    "advise": "learn from a recorded run which ranks are stragglers, and what each mode would bring",
    "simulate": "simulate a job under several modes",
    "plot": "draw a recorded run: when each rank computed, and when it waited",
}
"""Line of ``--help`` per command.

A command is the module of its name: ``add_arguments(parser)`` adds its options, ``run(arguments)`` runs it and returns
the exit status. The first paragraph of its docstring is its description.
"""


def module_of(command: str) -> Any:
    """Return the module of a command."""
    return importlib.import_module(f"hvd_async.cli.{command}")


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of ``command`` only."""
    about = "Optimizers on Horovod that do not wait: check a machine, record a job, learn what would make it faster."
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
    """Run a command and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(next((word for word in given if not word.startswith("-")), None))
    parsed = parser.parse_args(given)
    try:
        return int(module_of(parsed.command).run(parsed))
    except (HvdAsyncError, ValueError, OSError) as error:
        parser.exit(2, f"hvd_async {parsed.command}: {error}\n")
