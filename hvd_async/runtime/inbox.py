"""State that the engine thread sets for the training thread, under the engine's lock."""

from __future__ import annotations

from typing import Any

from hvd_async.runtime.interfaces import Changed
from hvd_async.runtime.protocol import Drained


class Inbox:
    """One optimizer's; a family whose ranks are sent more than this has its own.

    Args:
        changed: the engine's condition: held and notified with each change.

    Attributes:
        agreed: whether the ranks fit together.
        refused: how they do not; None if they do, or as long as it is not known.
        drained: set when all ranks are done, until the training thread has seen it.
    """

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
        self.agreed = False
        self.refused: str | None = None
        self.drained: Drained[Any] | None = None

    def tell(self, agreed: bool = False, refused: str | None = None, drained: Drained[Any] | None = None) -> None:
        """Set what the coordinator has said (engine thread)."""
        with self._changed:
            self.agreed = self.agreed or agreed
            self.refused = refused or self.refused
            self.drained = drained or self.drained
            self._changed.notify_all()

    def take_drained(self) -> Drained[Any]:
        """Return and forget the command that ended the drain (training thread)."""
        with self._changed:
            drained, self.drained = self.drained, None
        assert drained is not None
        return drained
