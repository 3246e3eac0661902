"""Drains and cuts of all optimizers of a process at once.

A rank is done with all of them or with none, and serves all at once. If it waited in the first one's drain for ranks
that are busy with both, its second would keep those waiting, and pile up rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hvd_async.runtime.messages import OptimizerCommand


class Participant(Protocol):
    """One optimizer's engine-side half.

    Attributes:
        last_done: the rank that was last to be done in the last drain, -1 before there was one.
        deleted: whether the optimizer was deleted; only its engine-side half is left, and serves the other ranks.
    """

    last_done: int
    deleted: bool

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command for this optimizer (engine thread)."""

    def delete(self) -> None:
        """The optimizer was deleted (any thread)."""

    def check_finished(self, flush: bool) -> None:
        """Raise, if this rank cannot finish now, with a drain (``flush``) or a cut (training thread)."""

    def announce_finished(self, flush: bool) -> None:
        """Say that this rank is done with this optimizer, to drain (``flush``) or to cut it (training thread)."""

    def apply_available(self) -> bool:
        """Apply what was received, without waiting; return whether that is all (training thread, as the rest)."""

    @property
    def has_available(self) -> bool:
        """Whether ``apply_available`` would do something, or has done all."""

    def complete_drain(self) -> None:
        """All was received: end the drain or cut."""


class DrainingEngine(Protocol):
    """The part of the engine that a drain uses.

    Attributes:
        asked: optimizers that other ranks have opened, and that this rank is asked for while it waits in a drain.
    """

    asked: list[Any]

    def take_asked(self) -> list[Participant]:
        """Open the optimizers that other ranks have asked for, as far as this process has them; return these."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``."""


def drain(engine: DrainingEngine, live: list[Participant], flush: bool, leaving: bool) -> None:
    """Drain (or, without ``flush``, cut) optimizers, and those that other ranks open meanwhile.

    Args:
        engine: theirs.
        live: the optimizers, in one order on all ranks: ends communicate.
        flush: drain; else cut.
        leaving: the process is ending: what a step would still have completed goes as it is, with a warning.
    """
    if not leaving:
        for participant in live:
            participant.check_finished(flush)
    for participant in live:
        participant.announce_finished(flush)
    left = list(live)

    def may_go_on() -> bool:
        return bool(engine.asked) or any(one.has_available or one.deleted for one in left)

    while True:
        found = engine.take_asked()
        for participant in found:
            participant.announce_finished(flush)
        live, left = live + found, left + found
        left = [participant for participant in left if not (participant.deleted or participant.apply_available())]
        if not (left or engine.asked):  # what is asked for comes before the end that it belongs to
            break
        engine.wait(may_go_on)
    for participant in live:
        if not participant.deleted:
            participant.complete_drain()
