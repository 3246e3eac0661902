"""What the coordinator's state machines have in common: ranks open, fit together or not, and are done.

A machine takes events and ``now`` in and gives commands out; no clock, no I/O. What comes between opening and the end
is its subclass's: partial allreduce (``rounds``), gossip (``exchanges``), leaders (``pulls``).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from hvd_async.agreement import disagreement
from hvd_async.errors import ProtocolError
from hvd_async.events import Agreed, Command, Done, Drained, Opened, OptimizerEvent, Refused, Standing

C = TypeVar("C")


class Machine(abc.ABC, Generic[C]):
    """One optimizer, as the coordinator sees it.

    Args:
        optimizer: the number all its messages carry.
        ranks: that share it.
    """

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        self._optimizer, self.ranks = optimizer, tuple(ranks)
        self._opened: dict[int, Opened] = {}
        self._config: C | None = None
        self._refused = False
        self._done: set[int] = set()
        self._flush = False
        self._produced: dict[int, list[int]] = {}

    # -- what the coordinator calls ---------------------------------------------------------------------------

    def handle(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Take in one event of ``rank`` at time ``now`` (s, any origin).

        Returns:
            Commands, each for every rank that shares the optimizer, in the order in which they must be sent.

        Raises:
            ProtocolError: the event is not allowed now; nothing has changed.
        """
        if rank not in self.ranks:
            raise ProtocolError(f"rank {rank} does not share optimizer {self._optimizer} of {self.ranks}")
        if isinstance(event, Opened):
            return self._open(rank, event, now)
        if rank not in self._opened:
            raise ProtocolError(f"rank {rank} sent {type(event).__name__} before it opened optimizer {self._optimizer}")
        if self._refused:
            return []
        if isinstance(event, Done):
            return self._finish(rank, event, now)
        return self._hear(rank, event, now)

    @abc.abstractmethod
    def tick(self, now: float) -> list[Command]:
        """Send what only waited for time to pass."""

    @abc.abstractmethod
    def deadline(self) -> float | None:
        """When ``tick`` should be called next, None if there is nothing to wait for."""

    def news(self) -> str | None:
        """What people should know and were not told yet."""
        return None

    def lacks(self, rank: int) -> bool:
        """Whether ranks wait for ``rank`` to open."""
        return bool(self._opened) and rank in self.ranks and rank not in self._opened

    def waiting_for(self) -> tuple[str, frozenset[int]] | None:
        """What ranks are waiting for, and the ranks it takes; None if nobody waits."""
        everyone = frozenset(self.ranks)
        if self._refused or not self._opened:
            return None
        if self._config is None:
            return "the first step or drain", everyone - frozenset(self._opened)
        inside = self._waiting()
        if inside is None and self._done:
            return "drain", everyone - self._done
        return inside

    # -- what a subclass supplies -----------------------------------------------------------------------------

    @abc.abstractmethod
    def _begin(self, config: Any) -> C:
        """All ranks fit together; returns the configuration as the subclass knows it."""

    @abc.abstractmethod
    def _hear(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """An event that is neither ``Opened`` nor ``Done``."""

    @abc.abstractmethod
    def _waiting(self) -> tuple[str, frozenset[int]] | None:
        """As ``waiting_for``, between opening and the end."""

    def _check_done(self, rank: int) -> None:
        """Raise ProtocolError, if ``rank`` cannot be done now."""

    @abc.abstractmethod
    def _retire(self, rank: int, now: float) -> list[Command]:
        """``rank`` is done, others are not; also called before all have opened."""

    @abc.abstractmethod
    def _conclude(self, rank: int, now: float) -> tuple[list[Command], int]:
        """All are done, ``rank`` last: what is left to send, and the number of the last round; then start afresh."""

    def _standing(self) -> Standing | None:
        """How it stands when all are done, where ranks follow a leader."""
        return None

    # -- opening and ends -------------------------------------------------------------------------------------

    def _open(self, rank: int, event: Opened, now: float) -> list[Command]:
        if rank in self._opened:
            raise ProtocolError(f"rank {rank} opened optimizer {self._optimizer} twice")
        self._opened[rank] = event
        if len(self._opened) < len(self.ranks):
            return []
        problem = disagreement(self._opened)
        if problem is not None:
            self._refused = True
            return [Refused(self._optimizer, problem)]
        self._config = self._begin(event.config)
        finished = self._drain(rank, now) if len(self._done) == len(self.ranks) else []
        return [Agreed(self._optimizer), *finished]

    def _running(self, rank: int, event: OptimizerEvent) -> C:
        if self._config is None:
            raise ProtocolError(f"rank {rank} sent {type(event).__name__} before all ranks had opened")
        if rank in self._done:
            raise ProtocolError(f"rank {rank} sent {type(event).__name__} although it is done")
        return self._config

    def _active(self) -> set[int]:
        return set(self.ranks) - self._done

    def _finish(self, rank: int, event: Done, now: float) -> list[Command]:
        if rank in self._done:
            raise ProtocolError(f"rank {rank} sent Done although it is done")
        self._check_done(rank)
        counts = self._opened[rank].config.counts
        before = self._produced.get(rank, [0] * counts)
        if len(event.produced) != counts or any(a < b for a, b in zip(event.produced, before, strict=True)):
            raise ProtocolError(f"rank {rank} has produced {event.produced} gradients a bucket, earlier {before}")
        self._done.add(rank)
        self._flush = self._flush or event.flush
        self._produced[rank] = event.produced
        if len(self._done) < len(self.ranks) or self._config is None:
            return self._retire(rank, now)
        return self._drain(rank, now)

    def _drain(self, rank: int, now: float) -> list[Command]:
        commands, last = self._conclude(rank, now)
        self._done.clear()
        produced = [sum(counts) for counts in zip(*self._produced.values(), strict=True)]
        commands.append(Drained(self._optimizer, last, produced, rank, self._flush, self._standing()))
        self._flush = False
        return commands
