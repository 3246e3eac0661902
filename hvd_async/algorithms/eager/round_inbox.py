"""Rounds that wait to be applied, beside what every optimizer's training thread is told."""

from __future__ import annotations

import threading
from collections import deque

from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.runtime.inbox import Inbox


class RoundInbox(Inbox):
    """One optimizer's.

    Attributes:
        ready: rounds that wait to be applied, in order.
        whole: how many steps of this rank's host, since the last drain or cut, all its ranks have handed over, as far
            as it was told; 0 where ranks do not step host by host.
        ends_at: the version with which the last of them ends.
    """

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__(changed)
        self.ready: deque[ReducedRound] = deque()
        self._discards = False
        self.whole = self.ends_at = 0

    # -- engine thread ----------------------------------------------------------------------------------------

    def deliver(self, rounds: list[ReducedRound]) -> None:
        """Rounds, in order."""
        with self._changed:
            if not self._discards:
                self.ready.extend(rounds)
            for round_ in rounds:
                self._end_step(round_.whole, round_.index)
            self._changed.notify_all()

    def end_step(self, whole: int, version: int) -> None:
        """A late step of the host ends when this rank's weights are at ``version``."""
        with self._changed:
            self._end_step(whole, version)
            self._changed.notify_all()

    def _end_step(self, whole: int, version: int) -> None:
        if whole > self.whole:
            self.whole, self.ends_at = whole, version

    def end(self, rounds: int) -> None:
        """All ranks have ended, after so many rounds."""
        with self._changed:
            self.whole, self.ends_at = 0, rounds

    def discard(self) -> None:
        """Keep nothing from now on: nobody takes it (engine thread, as ``deliver``, so without the lock)."""
        self._discards = True
        self.ready.clear()

    # -- training thread --------------------------------------------------------------------------------------

    def _last(self) -> float:
        """The last round to take. In a drain: a rank that is out of it already may have fired rounds since, and they
        belong to the next step."""
        return float("inf") if self.drained is None else self.drained.rounds

    def has_round(self) -> bool:
        """Whether ``waiting`` would return one."""
        return bool(self.ready) and self.ready[0].index <= self._last()

    def waiting(self, most: int | None = None) -> list[ReducedRound]:
        """Rounds that are to be applied, ``most`` at the most. They stay here until they are: who is interrupted before
        finds them again."""
        with self._changed:
            rounds = [round_ for round_ in self.ready if round_.index <= self._last()]
        return rounds if most is None else rounds[:most]

    def take(self) -> ReducedRound:
        """The first round, which has been applied."""
        with self._changed:
            return self.ready.popleft()

    def complete(self, version: int) -> bool:
        """Whether all ranks are done, and ``version`` has seen all rounds."""
        return self.drained is not None and version >= self.drained.rounds
