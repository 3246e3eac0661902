"""Collectives among ranks of one process, apart from how the ranks meet: in threads, or in simulated time."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hvd_async.runtime.interfaces import Handle, Rows, Vector


class Sent(NamedTuple):
    """A rank's contribution to a collective.

    Attributes:
        vector: the vector; messages are rows.
        splits, coming: of an exchange, the number of rows to each rank and from each.
    """

    vector: Vector
    splits: Sequence[int] = ()
    coming: Sequence[int] = ()


Combine: TypeAlias = Callable[[Sequence[Sent]], Sequence[Any]]
"""Each rank's own copy of a collective's result, given all contributions; both in the order of its ranks."""


class InMemoryCollectives(abc.ABC):
    """Data plane of one rank, for arrays of any framework. Sums are in rank order.

    A process set is a sequence of ranks, or Horovod's object, which has them as ``ranks``.
    """

    failure: type[Exception] = RuntimeError
    in_order = False
    on_gpu = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.host = rank, size, f"host{rank}"
        self._everyone: Sequence[int] = tuple(range(size))

    @abc.abstractmethod
    def _join(self, name: str, members: Sequence[int], sent: Sent, kind: str, combine: Combine) -> Handle:
        """Submit this rank's part of a collective of these ranks, and return its handle.

        Args:
            kind: "sum", "broadcast" or "exchange".
        """

    def _members(self, process_set: Any) -> Sequence[int]:
        return self._everyone if process_set is None else tuple(getattr(process_set, "ranks", process_set))

    def allreduce_sum(
        self, vector: Vector, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        """See ``Collectives.allreduce_sum``."""

        def add(parts: Sequence[Sent]) -> Sequence[Vector]:
            total = parts[0].vector + 0
            for part in parts[1:]:
                total = total + part.vector
            total = total if scale == 1.0 else total * scale
            return [total + 0 for _ in parts]

        return self._join(name, self._members(process_set), Sent(vector), "sum", add)

    def allreduce_extreme(self, vector: Vector, name: str, largest: bool) -> Handle:
        """See ``Collectives.allreduce_extreme``."""

        def pick(parts: Sequence[Sent]) -> Sequence[Vector]:
            found = (np.max if largest else np.min)([np.asarray(part.vector) for part in parts], axis=0)
            return [found + 0 for _ in parts]

        return self._join(name, self._everyone, Sent(vector), "sum", pick)

    def broadcast(self, vector: Vector, root: int, name: str, process_set: Any = None) -> Handle:
        """See ``Collectives.broadcast``."""
        members = self._members(process_set)
        at = members.index(root)
        return self._join(name, members, Sent(vector), "broadcast", lambda parts: [parts[at].vector + 0 for _ in parts])

    def alltoall(
        self,
        rows: Rows,
        splits: list[int],
        coming: list[int],
        name: str,
        process_set: Any = None,
        into: Rows | None = None,
    ) -> Handle:
        """See ``Collectives.alltoall``."""

        def deal(parts: Sequence[Sent]) -> Sequence[list[Any]]:
            received: list[list[Any]] = [[] for _ in parts]
            for place, part in enumerate(parts):
                start = 0
                for to, count in enumerate(part.splits):
                    if parts[to].coming[place] != count:
                        raise self.failure(f"{name}: place {to} expects {parts[to].coming} rows, {place} sends {count}")
                    received[to] += [part.vector[at] + 0 for at in range(start, start + count)]
                    start += count
            return received

        return self._join(name, self._members(process_set), Sent(rows, splits, coming), "exchange", deal)

    def describe(self, vector: Vector) -> tuple[int, str]:
        """See ``Collectives.describe``."""
        return len(vector), str(vector.dtype)

    def zeros(self, length: int, kind: str) -> Vector:
        """Return a zero, which can be added to the arrays of any framework."""
        return 0.0

    def empty_like(self, vector: Vector) -> Vector:
        """Return NaN, so that its use shows."""
        return vector * float("nan")

    def process_set_of(self, groups: Sequence[Sequence[int]], make: bool) -> Any:
        """See ``Collectives.process_set_of``."""
        return next((tuple(group) for group in groups if self.rank in group), None)

    def release(self, optimizer: int) -> None:  # noqa: B027  nothing is kept by optimizer
        """Do nothing."""

    def start(self, wake: Callable[[], None]) -> None:  # noqa: B027  some need no wake-up
        """Do nothing."""

    def stop(self) -> None:  # noqa: B027  some have nothing to end
        """Do nothing."""
