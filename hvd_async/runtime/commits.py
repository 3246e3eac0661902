"""The commit at which all ranks of an elastic job stop, since hosts have come or gone. No rank waits for it.

Horovod tells rank 0 alone. All ranks have to stop at the same commit, or one that goes on would call a collective of
the user's that others never come to. Rank 0 tells the coordinator, the coordinator asks every rank how many commits it
has made, and names the one after the most. A rank that has answered waits at its next commit, while that takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_async.runtime.messages import Command, CommitsMade, CountCommits, StopAtCommit

if TYPE_CHECKING:
    from hvd_async.runtime.engine import Engine


class Commits:
    """A rank's, as long as its engine. Its fields change while the engine's ``changed`` is held.

    Attributes:
        made: since the engine was started, which all ranks do at the same place of their program.
        stop_at: the number of the one at which all stop; None while there is none.
    """

    def __init__(self) -> None:
        self.made = 0
        self.stop_at: int | None = None
        self._asked = False

    def answer(self) -> CommitsMade:
        """Return what the coordinator asks for (engine thread)."""
        self._asked = True
        return CommitsMade(self.made)

    def commit(self, engine: Engine) -> bool:
        """Count a commit; returns whether all ranks stop at it.

        Args:
            engine: this rank's.
        """
        with engine.changed:
            self.made += 1
            asked = self._asked
        if asked:
            engine.wait(lambda: self.stop_at is not None, lambda: "all ranks to say how many commits they have made")
        return self.stop_at is not None and self.made >= self.stop_at


class CommitCounts:
    """The coordinator's.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asked = False
        self._made: dict[int, int] = {}

    def ask(self) -> list[Command]:
        """Return what all ranks are asked once hosts have come or gone: nothing, if they were asked before."""
        if self._asked:
            return []
        self._asked = True
        return [CountCommits()]

    def count(self, rank: int, made: int) -> list[Command] | None:
        """Take in a rank's answer; returns what all are told then, and None if nobody has asked it."""
        if not self._asked or rank in self._made:
            return None
        self._made[rank] = made
        return [StopAtCommit(max(self._made.values()) + 1)] if len(self._made) == self._size else []
