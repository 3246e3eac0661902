"""EASGD's equations (Zhang, Choromanska and LeCun, NeurIPS 2015; c the center variable, P ranks).

    equation (5), without the gradient's part:   x_i <- x_i - alpha (x_i - c)
    equation (6):                                c <- (1 - beta) c + beta (1/P) sum_i x_i

Both use the weights x_i before the pull. With alpha = beta / P the sum of all x_i and c does not change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvd_async.algorithms.leader.selection import ALL_RANKS, Rule, Strengths, Vector


class State(NamedTuple):
    """State of EASGD on a rank.

    Attributes:
        center: the center variable, shape (n,), equal on all ranks after the same pulls.
        force: alpha (c - x_i), summed over the pulls since the last step, to be added by the next step; None if there
            was no pull.
    """

    center: Vector
    force: Vector = None


@dataclass(frozen=True)
class EASGD(Rule):
    """EASGD on one rank.

    Attributes:
        strengths: strengths of the pulls.
        size: number of ranks that share the optimizer.
    """

    strengths: Strengths
    size: int

    def begin(self, weights: Vector) -> State:
        """Return the state before the first pull: the center equals the weights of all ranks."""
        return State(weights)

    def on_pull(self, state: State, group: int, own: Vector, result: Vector) -> tuple[State, tuple[Vector, ...]]:
        """Return the center after a pull with the force of this pull alone, and c - x before it."""
        difference = state.center - own
        center = state.center + (result * (1.0 / self.size) - state.center) * self.strengths.beta
        return State(center, difference * self.strengths.alpha), (difference,)

    def merge(self, state: State, pulled: State) -> State:
        """Return the new center, with the force of a pull added to that of earlier pulls."""
        return pulled if state.force is None else State(pulled.center, state.force + pulled.force)

    def on_step(self, state: State, x: Vector, step: int, fresh: Collection[int]) -> tuple[Vector, tuple[Vector, ...]]:
        """Return the weights after a step: the force of the pulls since the previous step is added."""
        return self.position(state, x), ()

    def position(self, state: State, x: Vector) -> Vector:
        """Return the weights from which a pull starts: the force counts at once, even while the rank computes."""
        return x if state.force is None else x + state.force

    def after_step(self, state: State) -> State:
        return state._replace(force=None)

    def consensus(self, state: State) -> Vector:
        return state.center

    def save(self, state: State) -> tuple[dict[int, Vector], Vector]:
        """Return the center as the target of all ranks, and the force that no step has added yet."""
        return {ALL_RANKS: state.center}, state.force

    def restore(self, targets: Mapping[int, Vector], force: Vector) -> State:
        return State(targets[ALL_RANKS], force)
