"""Blocks of code that must finish once they have begun, although an interrupt may arrive between any two lines."""

from __future__ import annotations

from types import TracebackType

from hvd_async.errors import ReplicaStateError


class Uninterrupted:
    """Critical sections of one optimizer on one rank, which poison its replica if they do not finish.

    A gradient that is half handed over, or a round that is half applied, can be neither undone nor repeated.

    Attributes:
        broken: the section that did not finish, and why; None if all have finished.
    """

    def __init__(self) -> None:
        self.broken: str | None = None
        self._begun: str | None = None

    @property
    def fine(self) -> bool:
        """Whether ``check`` would not raise."""
        return self.broken is None and self._begun is None

    def __call__(self, what: str) -> Uninterrupted:
        """Begin a section that must finish, and return its context.

        Args:
            what: description of the problem if it does not finish.
        """
        if not (self.broken is None and self._begun is None):
            self.check()
        self._begun = what
        return self

    def __enter__(self) -> None:
        """Do nothing: the section has begun in ``__call__``."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._begun = None
        else:
            self.fail(error)

    def begin(self, what: str) -> None:
        """Begin a section that is not a ``with`` block; call ``end`` at its end."""
        self(what)

    def end(self) -> None:
        """Mark the section as finished."""
        self._begun = None

    def fail(self, error: BaseException) -> None:
        """Mark the section as broken."""
        self.broken = f"{self._begun}: {type(error).__name__}: {error}"

    def check(self) -> None:
        """Raise if a section has not finished.

        Raises:
            ReplicaStateError: the replica is poisoned: restart from a checkpoint.
        """
        if self.broken is None and self._begun is not None:
            self.broken = f"{self._begun}: it was interrupted"
        if self.broken is not None:
            raise ReplicaStateError(
                f"{self.broken}. This rank's weights are no longer what the other ranks take them for: restart from a "
                f"checkpoint."
            )
