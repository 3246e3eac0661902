"""The interface between a leader-pull worker and its algorithm's equations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from hvd_async.algorithms.leader.messages import LeaderConfig
from hvd_async.algorithms.leader.options import ALGORITHMS
from hvd_async.algorithms.leader.selection import Strengths

Vector = Any


class Rule(Protocol):
    """An algorithm's equations over its immutable state, a ``NamedTuple``. Both threads of a rank call them; the worker
    and the ``PullExecutor`` have no arithmetic of their own."""

    def begin(self, weights: Vector) -> Any:
        """Return the state before the first pull, ``weights`` the same on all ranks."""
        ...

    def on_pull(self, state: Any, group: int, own: Vector, result: Vector) -> tuple[Any, tuple[Vector, ...]]:
        """Return a pull's result for ``merge``, and differences to the target whose lengths are counted.

        Only one pull after the other changes what this reads of the state; a step may run meanwhile.

        Args:
            state: before the pull.
            group: that was pulled; ``ALL_RANKS`` for all.
            own: this rank's weights when the pull was submitted, shape (n,).
            result: the leader's weights, None if this rank leads; with a center the sum of all ranks' weights.
        """
        ...

    def merge(self, state: Any, pulled: Any) -> Any:
        """Return the state of now with the result of ``on_pull``."""
        ...

    def on_step(self, state: Any, x: Vector, step: int, fresh: Collection[int]) -> tuple[Vector, tuple[Vector, ...]]:
        """Return the weights after a step, and differences whose lengths are counted.

        Args:
            state: when the step took the pulls' results.
            x: weights after the optimizer's update, shape (n,).
            step: this rank's, from 1.
            fresh: groups pulled since the step before.
        """
        ...

    def position(self, state: Any, x: Vector) -> Vector:
        """Return the weights from which a pull starts, ``x`` those after the last step."""
        ...

    def after_step(self, state: Any) -> Any:
        """Return the state of which a step has taken what it applies once."""
        ...

    def consensus(self, state: Any) -> Vector:
        """Return the weights that stand for all ranks; None if they are the leader's own."""
        ...

    def save(self, state: Any) -> tuple[dict[int, Vector], Vector]:
        """Return targets by group, and the force not applied yet or None, for a checkpoint."""
        ...

    def restore(self, targets: Mapping[int, Vector], force: Vector) -> Any:
        """Return the state that ``save`` gave."""
        ...


def make_rule(config: LeaderConfig, strengths: Strengths, group: int, size: int) -> Rule:
    """Return the rule of an optimizer's algorithm.

    Args:
        config: the same on all ranks.
        strengths: of the pulls.
        group: this rank's.
        size: ranks that share the optimizer.
    """
    rule: Rule = ALGORITHMS[config.algorithm].rule(config, strengths, group, size)
    return rule
