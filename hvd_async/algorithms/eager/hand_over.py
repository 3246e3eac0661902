"""Gradients on their way from a rank's training thread to its engine: those of the step that is under way, counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hvd_async.algorithms.eager.counters import Counters, GradientLedger
from hvd_async.algorithms.eager.messages import GradientReady, StepEntered
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Hyper


class HandedOver(NamedTuple):
    """One bucket of a step's gradient (None: an empty one), the version it was computed at, the step's number, and
    whether it comes with ``step()``, which says so first; else before it."""

    bucket: int
    vector: Vector | None
    version: int
    step: int
    in_step: bool


def ready(number: int, taken: Sequence[HandedOver], landed: int) -> GradientReady:
    """Return the event that buckets of one step are with the engine of optimizer ``number``."""
    empty = [one.bucket for one in taken if one.vector is None]
    return GradientReady(number, [one.bucket for one in taken], taken[0].step, landed, empty)


def entered(number: int, step: int, hyper: Hyper | None, taken: Sequence[HandedOver], landed: int) -> StepEntered:
    """Return the event that this rank is in ``step()``, and what came with it is with the engine."""
    empty = [one.bucket for one in taken if one.vector is None]
    return StepEntered(number, step, hyper, [one.bucket for one in taken], landed if taken else 0, empty)


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

    def give(self, bucket: int, vector: Vector | None, version: int, step: int, in_step: bool = False) -> None:
        """Hand a bucket over; the engine comes for it by ``take``, in order."""
        if bucket in self.brought:
            vector = None
        else:
            self.ledger.hand_over(bucket, vector is None)
        if vector is not None:
            self._counters.add_held_bytes(self._nbytes[bucket])
        self.handed.add(bucket)
        self._leaving.append(HandedOver(bucket, vector, version, step, in_step))

    def end_step(self) -> None:
        """All buckets of the step were handed over."""
        self.ledger.end_step()
        self.handed.clear()
        self.brought = frozenset()

    # -- engine thread ----------------------------------------------------------------------------------------

    def take(self, step: int, in_step: bool) -> list[HandedOver]:
        """Return those of a step that are on their way, so that one event tells of all.

        Args:
            in_step: whether the coordinator was told that this rank is in ``step()``. Until then those are left here
                that come with it; and if there are any, all: the training thread is about to say so.
        """
        count = 0
        while count < len(self._leaving) and self._leaving[count].step == step:  # (others may come meanwhile, behind)
            if self._leaving[count].in_step and not in_step:
                return []
            count += 1
        return [self._leaving.popleft() for _ in range(count)]

    def take_rest(self) -> list[tuple[int, Vector | None, int]]:
        """Return all that are on their way (bucket, vector, version), after the engine's end."""
        rest = [(bucket, vector, version) for bucket, vector, version, *_ in self._leaving]
        self._leaving.clear()
        return rest
