"""A hub without a network, for a coordinator alone."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import Command, Event


class Hub:
    """The coordinator's end of the control plane: tests say what comes, and may look at what is sent."""

    has_more = False

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        """Return what ranks say next; None: nothing yet."""
        raise NotImplementedError

    def send(self, ranks: Sequence[int], command: Command) -> None:
        """No rank listens."""

    def flush(self) -> None:
        """Nothing is queued."""

    def wake(self) -> None:
        """No rank waits."""

    def close(self) -> None:
        """Nothing is open."""
