"""Averages over all ranks that have not finished, taken at steps of the same number."""

from __future__ import annotations

from typing import NamedTuple

from hvd_async.algorithms.gossip.message_exchange import NAMES_IN_RING, MessageFormat
from hvd_async.algorithms.gossip.messages import AverageEntered, StartAverage
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector


class _Summed(NamedTuple):
    """A completed average: the sum of x over so many ranks, and those of their push-sum weights."""

    x: Vector
    weights: list[float]
    ranks: int


class GlobalAverages:
    """One optimizer's averages over all ranks.

    Args:
        engine: this rank's.
        post: the format of vectors.
    """

    def __init__(self, engine: Engine, post: MessageFormat) -> None:
        self._engine, self._post = engine, post
        self._contributed: dict[int, Vector] = {}
        """This rank's x for averages that have not started yet (engine thread)."""
        self._sums: dict[int, _Summed] = {}
        self._index = 0
        """Averages since the last drain or cut."""

    def contribute(self, optimizer: int, x: Vector, weights: list[float]) -> int:
        """Join the next average with x, which is given away; return its number (training thread, as the rest)."""
        self._index += 1
        index = self._index

        def send() -> None:
            self._contributed[index] = x
            self._engine.send(AverageEntered(optimizer, index, weights))

        self._engine.call_soon(send)
        return index

    def is_complete(self, index: int) -> bool:
        """Return whether ``result`` is available."""
        return index in self._sums

    def result(self, index: int) -> tuple[Vector, list[float]]:
        """Return the mean of x, and of the push-sum weights."""
        total = self._sums.pop(index)
        return self._post.times(total.x, 1.0 / total.ranks), [weight / total.ranks for weight in total.weights]

    def restart(self) -> None:
        """Count from 1 again."""
        self._index = 0

    def submit(self, command: StartAverage) -> None:
        """Submit this rank's part, or zeros if it has finished (engine thread)."""
        name = f"hvd_async.average.{command.optimizer}.{command.index % NAMES_IN_RING}"
        own = self._contributed.pop(command.index, None)
        own = own if self._engine.rank in command.ranks else None  # its optimizer may have been deleted while it waited
        vector = self._post.zeros() if own is None else own

        def on_complete(total: Vector) -> None:
            with self._engine.changed:
                if own is not None:
                    self._sums[command.index] = _Summed(total, command.weights, len(command.ranks))

        self._engine.submit(
            lambda: self._engine.collectives.allreduce_sum(vector, name, self._post.process_set, keep=own is None),
            on_complete,
        )
