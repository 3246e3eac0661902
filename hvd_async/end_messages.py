"""Messages about the end of an optimizer: collectives then, its deletion, and one that a rank has not opened yet.

The first three are events (rank to coordinator), the others commands. They are parts of ``events``' unions.
A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class CollectiveReady(msgspec.Struct, frozen=True, tag=True):
    """This rank waits in its collective number ``index`` (from 1) of this optimizer, outside of rounds and exchanges.

    Attributes:
        kind: "sum", "broadcast", or "compare" of ``names`` and ``checksums``, for which no tensor travels.
        what: for people; the same on all ranks.
        length, dtype: of the vector, as ``Collectives.describe`` tells them.
        root: the rank whose vector a broadcast sends, if it still has the optimizer; else the lowest that has.
    """

    optimizer: int
    index: int
    kind: str
    what: str
    length: int = 0
    dtype: str = ""
    root: int = -1
    names: list[str] = []
    checksums: list[int] = []


class OptimizerDeleted(msgspec.Struct, frozen=True, tag=True):
    """This rank has this optimizer no more; its engine serves it until no rank has it. ``produced`` as of ``Done``."""

    optimizer: int
    produced: list[int]


class NoSuchOptimizer(msgspec.Struct, frozen=True, tag=True):
    """This rank was asked to register an optimizer while it waits in a drain, and has wrapped none that it could be."""

    optimizer: int


class RunCollective(msgspec.Struct, frozen=True, tag=True):
    """Submit the collective that ``ranks`` wait in; all others take part with zeros. As of ``CollectiveReady``.

    ``problem``: why it cannot run, or what a comparison has found; then nobody submits anything.
    """

    optimizer: int
    kind: str
    what: str
    length: int
    dtype: str
    root: int
    ranks: list[int]
    problem: str | None = None


class RegisterOptimizer(msgspec.Struct, frozen=True, tag=True):
    """Others have opened this optimizer, and ``rank`` waits in a drain before it has: it is to open it now."""

    optimizer: int
    rank: int
    names: list[str]
    members: list[int] = []


class Unregister(msgspec.Struct, frozen=True, tag=True):
    """No rank has this optimizer any more: forget it."""

    optimizer: int


EndEvent: TypeAlias = CollectiveReady | OptimizerDeleted | NoSuchOptimizer
EndCommand: TypeAlias = RunCollective | Unregister
"""For an optimizer that the rank has registered."""
