"""Blocks that must come to their end once they are begun: an interrupt may come between any two lines."""

from __future__ import annotations

from types import TracebackType

from hvd_async.errors import ReplicaStateError


class Uninterrupted:
    """One optimizer's on one rank: a gradient half handed over, or a round half applied, can be neither taken back nor
    done again. So what is begun and does not end is the end of this rank's replica.

    Attributes:
        broken: what did not come to its end, and why; None if all is well.
    """

    def __init__(self) -> None:
        self.broken: str | None = None
        self._begun: str | None = None

    @property
    def fine(self) -> bool:
        """Whether ``check`` would not raise."""
        return self.broken is None and self._begun is None

    def __call__(self, what: str) -> Uninterrupted:
        """Begin something that must finish, and return the context around it.

        Args:
            what: describes what has happened if it does not finish.
        """
        if not (self.broken is None and self._begun is None):
            self.check()
        self._begun = what
        return self

    def __enter__(self) -> None:
        """Do nothing: it has begun in ``__call__``."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._begun = None
        else:
            self.fail(error)

    def begin(self, what: str) -> None:
        """Begin, where it is no block of code; ``end`` follows."""
        self(what)

    def end(self) -> None:
        """It has come to its end."""
        self._begun = None

    def fail(self, error: BaseException) -> None:
        """It will not come to its end."""
        self.broken = f"{self._begun}: {type(error).__name__}: {error}"

    def check(self) -> None:
        """Raise, if something has not come to its end.

        Raises:
            ReplicaStateError: restart from a checkpoint.
        """
        if self.broken is None and self._begun is not None:
            self.broken = f"{self._begun}: it was broken off"
        if self.broken is not None:
            raise ReplicaStateError(
                f"{self.broken}. This rank's weights are no longer what the other ranks take them for: restart from a "
                f"checkpoint."
            )
