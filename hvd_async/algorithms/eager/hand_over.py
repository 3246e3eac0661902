"""Gradients on their way from a rank's training thread to its engine: those of the step that is under way, counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from hvd_async.algorithms.eager.counters import Counters, GradientLedger
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.interfaces import Vector


class HandedOver(NamedTuple):
    """One bucket of a step's gradient (None: an empty one), and the version it was computed at."""

    bucket: int
    vector: Vector | None
    version: int


class HandOver:
    """One optimizer's.

    Args:
        nbytes: of each bucket's vector.
        counters: of the optimizer.

    Attributes:
        ledger: of what was handed over, and applied.
        handed: buckets of the step that is under way that were handed over.
        brought: buckets of this step whose gradient is pending since before a reset: what is given now is left out.
    """

    def __init__(self, nbytes: Collection[int], counters: Counters) -> None:
        self._nbytes, self._counters = tuple(nbytes), counters
        self.ledger = GradientLedger(len(self._nbytes))
        self.handed: set[int] = set()
        self.brought = frozenset[int]()
        self._leaving: deque[HandedOver] = deque()

    @property
    def all_brought(self) -> bool:
        """Whether all of the step's gradient is pending since before a reset."""
        return len(self.brought) == len(self._nbytes)

    # -- training thread --------------------------------------------------------------------------------------

    def check_new(self, bucket: int) -> None:
        """Raise ReplicaStateError, if a bucket of this step was handed over before."""
        if bucket in self.handed:
            raise ReplicaStateError(f"bucket {bucket} was handed over twice in one step: a bug in the binding")

    def check_whole(self, others: Collection[int]) -> None:
        """Raise ReplicaStateError, unless these buckets are all that is left of the step."""
        if sorted([*self.handed, *others]) != list(range(len(self._nbytes))):
            raise ReplicaStateError(f"step() lacks buckets: {sorted(self.handed)} and {sorted(others)} are there")

    def give(self, bucket: int, vector: Vector | None, version: int) -> None:
        """Hand a bucket over; the engine comes for it by ``take``, in order."""
        if bucket in self.brought:
            vector = None
        else:
            self.ledger.hand_over(bucket, vector is None)
        if vector is not None:
            self._counters.add_held_bytes(self._nbytes[bucket])
        self.handed.add(bucket)
        self._leaving.append(HandedOver(bucket, vector, version))

    def end_step(self) -> None:
        """All buckets of the step were handed over."""
        self.ledger.end_step()
        self.handed.clear()
        self.brought = frozenset()

    # -- engine thread ----------------------------------------------------------------------------------------

    def take(self) -> HandedOver:
        """Return the first of those that are on their way."""
        return self._leaving.popleft()

    def take_rest(self) -> list[HandedOver]:
        """Return all that are on their way, after the engine's end."""
        rest = list(self._leaving)
        self._leaving.clear()
        return rest
