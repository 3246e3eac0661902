"""Base of the equations of a leader-pull algorithm."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from typing import Any

Vector = Any


class Rule(abc.ABC):
    """Equations of an algorithm over its immutable state, a ``NamedTuple``. Both threads of a rank call them; the
    worker does no arithmetic on weights."""

    @abc.abstractmethod
    def begin(self, weights: Vector) -> Any:
        """Return the state before the first pull; ``weights`` are equal on all ranks."""

    @abc.abstractmethod
    def on_pull(self, state: Any, group: int, own: Vector, result: Vector) -> tuple[Any, tuple[Vector, ...]]:
        """Return a pull's result for ``merge``, and differences to the target, whose lengths are counted.

        The parts of the state that this reads change only by pulls, one after the other; a step may run meanwhile.

        Args:
            state: state before the pull.
            group: group that was pulled; ``ALL_RANKS`` for all.
            own: this rank's weights when the pull was submitted, shape (n,).
            result: the leader's weights, None if this rank leads; with a center, the sum of all ranks' weights.
        """

    def merge(self, state: Any, pulled: Any) -> Any:
        """Return the current state with the result of ``on_pull``."""
        return pulled

    @abc.abstractmethod
    def on_step(self, state: Any, x: Vector, step: int, fresh: Collection[int]) -> tuple[Vector, tuple[Vector, ...]]:
        """Return the weights after a step, and differences, whose lengths are counted.

        Args:
            state: state when the step took the results of pulls.
            x: weights after the optimizer's update, shape (n,); they may be changed in place.
            step: number of this rank's step, from 1.
            fresh: groups pulled since the previous step.
        """

    def position(self, state: Any, x: Vector) -> Vector:
        """Return the weights from which a pull starts; ``x`` are the weights after the last step."""
        return x

    def after_step(self, state: Any) -> Any:
        """Return the state after a step has taken the parts that are applied only once."""
        return state

    def consensus(self, state: Any) -> Vector:
        """Return the consensus; None if it is the leader's weights, which only the leader has."""
        return None

    @abc.abstractmethod
    def save(self, state: Any) -> tuple[dict[int, Vector], Vector]:
        """Return, for a checkpoint, targets by group, and the force that is not applied yet or None."""

    @abc.abstractmethod
    def restore(self, targets: Mapping[int, Vector], force: Vector) -> Any:
        """Return the state from the values that ``save`` returned."""
