"""State that the engine thread sets and the training thread reads, under the engine's lock."""

from __future__ import annotations

from typing import Any

from hvd_async.runtime.interfaces import Changed
from hvd_async.runtime.protocol import Drained


class Inbox:
    """Replies of the coordinator about one optimizer. A family with further replies has a subclass.

    Args:
        changed: the engine's condition, held and notified with each change.

    Attributes:
        agreed: whether the ranks' optimizers match.
        refused: how they differ; None if they match, or before this is known.
        drained: the command that ended a drain or cut, until the training thread has consumed it; otherwise None.
    """

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
        self.agreed = False
        self.refused: str | None = None
        self.drained: Drained[Any] | None = None

    def tell(self, agreed: bool = False, refused: str | None = None, drained: Drained[Any] | None = None) -> None:
        """Record a reply of the coordinator (engine thread)."""
        with self._changed:
            self.agreed = self.agreed or agreed
            self.refused = refused or self.refused
            self.drained = drained or self.drained
            self._changed.notify_all()

    def take_drained(self) -> Drained[Any]:
        """Return and clear the command that ended the drain or cut (training thread)."""
        with self._changed:
            drained, self.drained = self.drained, None
        assert drained is not None
        return drained
