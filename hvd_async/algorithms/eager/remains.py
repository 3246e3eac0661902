"""A rank's gradients when its job has lost other ranks, or gained some: what goes on with those that there are then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hvd_async.algorithms.eager.gradient_format import GradientFormat, PendingGradient, Tail
from hvd_async.runtime.interfaces import Vector


@dataclass(frozen=True)
class Remains:
    """The gradients of a rank that are in no round that its weights have seen, and how far it is.

    Attributes:
        version: rounds that its weights have seen.
        in_rounds: gradients that later rounds had taken, by round, then by bucket.
        pending: gradients that no round had taken, by bucket.
        begun: steps whose gradients were handed over.
        ended: steps that have come to their end.
        handed: buckets of the step after ``begun`` that were handed over.
        fit: whether others may go on from its weights; else a round was half applied.
        tail: the elements at the end of each vector that count.
    """

    version: int = 0
    in_rounds: Mapping[int, list[PendingGradient]] = field(default_factory=dict)
    pending: list[PendingGradient] = field(default_factory=list)
    begun: int = 0
    ended: int = 0
    handed: frozenset[int] = frozenset()
    fit: bool = True
    tail: Tail = field(default_factory=Tail)

    @property
    def brought(self) -> frozenset[int]:
        """Buckets whose gradient of the next step is there already."""
        return frozenset(range(len(self.pending))) if self.begun > self.ended else self.handed

    def after(self, version: int, ended: int) -> Remains:
        """Return what remains when all ranks go on from the same weights.

        A gradient in a round that these weights have seen is in them, whether this rank knows of that round or not. All
        others are pending. Of a step that this rank has begun, and none has ended, the gradient is there already.

        Args:
            version: rounds that these weights have seen.
            ended: steps that the rank which is furthest has ended; the next of all ranks is the one after.
        """
        back = [gradients for round_, gradients in sorted(self.in_rounds.items()) if round_ > version]
        return dataclasses.replace(
            self,
            version=version,
            in_rounds={},
            pending=[_sum(each) for each in zip(*back, self.pending, strict=True)],
            begun=max(self.begun, ended),
            ended=ended,
            handed=self.handed if self.begun == ended else frozenset(),
            fit=True,
        )

    def pending_in(self, wire: GradientFormat) -> list[PendingGradient]:
        """Return the pending gradients as vectors of another format, whose counting elements may be others."""
        if wire.tail == self.tail:
            return self.pending
        old = len(self.tail)

        def recounted(vector: Vector) -> Vector:
            return wire.recount(vector, old, wire.tail.moved(wire.peek(vector, old), self.tail))

        return [one if one.vector is None else one._replace(vector=recounted(one.vector)) for one in self.pending]

    def counted_from(self, rounds: int, steps: int) -> Remains:
        """Return it with rounds and steps counted from earlier ones; these have the numbers ``rounds`` and ``steps``
        then."""
        return dataclasses.replace(
            self,
            version=self.version + rounds,
            in_rounds={number + rounds: _moved(held, rounds) for number, held in self.in_rounds.items()},
            pending=_moved(self.pending, rounds),
            begun=self.begun + steps,
            ended=self.ended + steps,
        )


def _moved(gradients: list[PendingGradient], rounds: int) -> list[PendingGradient]:
    return [one._replace(versions=[version + rounds for version in one.versions]) for one in gradients]


def _sum(gradients: Iterable[PendingGradient]) -> PendingGradient:
    """Return the sum of pending gradients of one bucket."""
    vector, versions = None, list[int]()
    for one in gradients:
        if one.vector is not None:
            vector = one.vector if vector is None else vector + one.vector
            versions += one.versions
    return PendingGradient(vector, versions)
