"""What the engine thread leaves for the training thread, under the engine's lock."""

from __future__ import annotations

import threading
from collections import deque

from hvd_async.events import Drained
from hvd_async.wire import Round


class Inbox:
    """Of one optimizer.

    Args:
        changed: the engine's condition: held and notified with each change.

    Attributes:
        ready: rounds that wait to be applied.
        agreed: whether the ranks fit together.
        refused: how they do not; None if they do, or as long as it is not known.
        drained: set when all ranks are done, until the training thread has seen it.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.ready: deque[Round] = deque()
        self.agreed = False
        self.refused: str | None = None
        self.drained: Drained | None = None
        self._discards = False

    # -- engine thread ----------------------------------------------------------------------------------------

    def deliver(self, rounds: list[Round]) -> None:
        """Rounds, in order."""
        with self._changed:
            if not self._discards:
                self.ready.extend(rounds)
            self._changed.notify_all()

    def discard(self) -> None:
        """Keep nothing from now on: nobody takes it (engine thread, as ``deliver``, so without the lock)."""
        self._discards = True
        self.ready.clear()

    def tell(self, agreed: bool = False, refused: str | None = None, drained: Drained | None = None) -> None:
        """What the coordinator has said."""
        with self._changed:
            self.agreed = self.agreed or agreed
            self.refused = refused or self.refused
            self.drained = drained or self.drained
            self._changed.notify_all()

    # -- training thread --------------------------------------------------------------------------------------

    def _last(self) -> float:
        """The last round to take. In a drain: a rank that is out of it already may have fired rounds since, and they
        belong to the next step."""
        return float("inf") if self.drained is None else self.drained.rounds

    def has_round(self) -> bool:
        """Whether ``waiting`` would return one."""
        return bool(self.ready) and self.ready[0].index <= self._last()

    def waiting(self, most: int | None = None) -> list[Round]:
        """Rounds that are to be applied, ``most`` at the most. They stay here until they are: who is interrupted before
        finds them again."""
        with self._changed:
            rounds = [round_ for round_ in self.ready if round_.index <= self._last()]
        return rounds if most is None else rounds[:most]

    def take(self) -> Round:
        """The first round, which has been applied."""
        with self._changed:
            return self.ready.popleft()

    def complete(self, version: int) -> bool:
        """Whether all ranks are done, and ``version`` has seen all rounds."""
        return self.drained is not None and version >= self.drained.rounds

    def take_drained(self) -> Drained:
        """What was said when all ranks were done."""
        with self._changed:
            drained, self.drained = self.drained, None
        assert drained is not None
        return drained
