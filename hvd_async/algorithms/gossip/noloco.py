"""NoLoCo on one rank: DiLoCo's outer step with the average of a pair instead of all ranks.

Kolehmainen et al., 2025 (arXiv 2506.10911), with random pairs (topology "random-pairs"). Rank i has slow weights phi_i,
from which it takes H = ``gossip_every`` steps, to theta_i. Then, over the pair or the neighbours of the step with
weights w_ij, alpha = ``outer_momentum``, beta = ``outer_lr``, and gamma = beta as in the authors' code:

    delta_i <- alpha delta_i + beta sum_j w_ij (theta_j - phi_j) - gamma (phi_i - sum_j w_ij phi_j)
    phi_i   <- phi_i + delta_i,    theta_i <- phi_i

With gamma = beta all phi_j except rank i's own cancel, so only theta_j is sent: delta_i <- alpha delta_i + beta
(sum_j w_ij theta_j - phi_i). A rank whose neighbours have finished steps with its own theta_i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.push_sum import Add
from hvd_async.algorithms.gossip.rank import NeighbourAverageWorker
from hvd_async.algorithms.own_weights import Kept
from hvd_async.runtime.interfaces import Program, Vector

SLOW, MOMENTUM = "slow weights", "outer momentum"
"""Names of vectors in a checkpoint after ``cut()``."""


class State(NamedTuple):
    """State of a rank.

    Attributes:
        slow: phi, shape (n,).
        momentum: delta, shape (n,).
    """

    slow: Vector
    momentum: Vector


def outer_step(state: State, average: Vector, lr: float, momentum: float, add: Add) -> State:
    """Return the state after an outer step towards ``average``, the mean theta; may reuse the arguments' memory."""
    slow, delta = state
    delta = add(delta * momentum, add(average, slow, -1.0), lr)
    return State(add(slow, delta, 1.0), delta)


class NoLoCoWorker(NeighbourAverageWorker):
    """NoLoCo on one rank."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._state = State(None, None)
        self._kept: State | None = None
        """The state to start from, saved by an earlier run after a cut."""

    def begin(self, weights: Vector) -> None:
        super().begin(weights)
        self._state, self._kept = self._kept or self._begun(weights), None

    def _begun(self, weights: Vector) -> State:
        return State(weights + 0, weights * 0.0)

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        self.check_step()
        self._count_step()
        ends_period = (self._base + self._step) % self.config.period == 0
        weights = (yield from self._outer_step(after)) if ends_period else after
        self._note_received()
        return weights

    def _outer_step(self, weights: Vector) -> Program[Vector]:
        """End a period with these weights; return the weights to start the next period."""
        average = self._post.times(weights, 1.0)  # (theta must not change until it is sent)
        if self.plan.moves(self._base + self._step):
            own, others = yield from self._exchanged(weights)
            for place, weight in self._into(self._place, self._step):
                if place in others:
                    average = self._post.add(average, others[place] - own, weight)
        for part in self.frozen():  # (momentum must not move frozen parameters; the average still mixes them)
            self._state.momentum[part] = 0.0
        config = self.config
        self._state = outer_step(self._state, average, config.outer_lr, config.outer_momentum, self._post.add)
        return self._post.times(self._state.slow, 1.0)

    # -- ends -------------------------------------------------------------------------------------------------

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        weights = yield from super().gather_program(weights, flush)
        if flush:
            self._state = self._begun(weights)
        return weights

    def leave(self, weights: Vector) -> Kept:
        return Kept(weights, {SLOW: self._state.slow, MOMENTUM: self._state.momentum})

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _estimates(self) -> dict[str, Vector]:
        return super()._estimates() | {SLOW: self._state.slow + 0, MOMENTUM: self._state.momentum + 0}

    def restore(self, kept: SavedState) -> None:
        if SLOW in kept.copies:  # otherwise it was saved by another algorithm: start from its weights
            self._kept = State(kept.copies[SLOW] + 0, kept.copies[MOMENTUM] + 0)
        super().restore(kept)
