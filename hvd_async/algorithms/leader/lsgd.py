"""LSGD's equations as pure functions: Teng et al., NeurIPS 2019, with leaders x_l of the group and x_g of all ranks.

    a pull of the group, every local_period steps:   x <- (1 - c1) x + c1 x_l
    a pull of all, every global_period steps:        x <- (1 - c2) x + c2 x_g
    each step between pulls:    x <- x - p1/local_period (x - x_l) - p2/global_period (x - x_g)

c1, c2, p1 and p2 are named as in the authors' code (github.com/yunfei-teng/LSGD). It applies p2 and p1 one after the
other; applying both at once differs by their product, divided by both periods, times x - x_g.

The leader of a group, or of all, is the rank with the lowest recent training loss (``selection``); it is not pulled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_async.algorithms.leader.selection import ALL_RANKS, Strengths

if TYPE_CHECKING:
    from hvd_async.algorithms.leader.config import LeaderConfig

Vector = Any


class State(NamedTuple):
    """Last known weights of this rank's leaders, shape (n,); None if they are unknown or this rank leads.

    Attributes:
        local: weights of the leader of this rank's group.
        world: weights of the leader of all ranks.
    """

    local: Vector = None
    world: Vector = None


def pull_towards(x: Vector, *pulls: tuple[Vector, float]) -> Vector:
    """Return x + sum over (target, strength) of strength (target - x): a pull towards all targets at once."""
    moved = x
    for target, strength in pulls:
        moved = moved + (target - x) * strength
    return moved


def on_pull(state: State, of_all: bool, leader: Vector) -> State:
    """Return the state after a pull has completed.

    Args:
        state: state before the pull.
        of_all: whether all ranks were pulled, rather than this rank's group.
        leader: the leader's weights, shape (n,); None if this rank leads.
    """
    return state._replace(world=leader) if of_all else state._replace(local=leader)


def on_step(state: State, x: Vector, c1: float, c2: float) -> tuple[Vector, tuple[Vector, ...]]:
    """Return the weights after the first step since pulls, pulled towards the group's leader, then towards that of all
    ranks; and the difference to each leader before its pull.

    Args:
        state: leaders of the pulls that have completed since the previous step; None for the others.
        x: weights after the optimizer's update, shape (n,).
        c1, c2: strengths ``local_pull`` and ``global_pull``.
    """
    differences = []
    for leader, strength in ((state.local, c1), (state.world, c2)):
        if leader is not None:
            differences.append(leader - x)
            x = pull_towards(x, (leader, strength))
    return x, tuple(differences)


def between_pulls(state: State, x: Vector, local: float, world: float) -> Vector:
    """Return the weights after a step without a pull, moved towards both known leaders at once.

    Args:
        state: leaders known so far.
        x: weights after the optimizer's update, shape (n,); they may be changed in place.
        local, world: p1 / local_period and p2 / global_period.
    """
    pulls = ((state.local, local), (state.world, world))
    changes = [(leader - x) * part for leader, part in pulls if part and leader is not None]
    for change in changes:
        x += change
    return x


@dataclass(frozen=True)
class LSGD:
    """LSGD as a ``rank.Rule``.

    Attributes:
        config: configuration, the same on all ranks.
        strengths: strengths of the pulls, numbers or functions of this rank's step.
        group: number of this rank's group.
    """

    config: LeaderConfig
    strengths: Strengths
    group: int

    def begin(self, weights: Vector) -> State:
        """Return the state before the first pull."""
        return State()

    def on_pull(self, state: State, group: int, own: Vector, result: Vector) -> tuple[State, tuple[Vector, ...]]:
        """Return the state after a pull, and no differences to count: they are known only in the next step."""
        return on_pull(state, group == ALL_RANKS, result), ()

    def merge(self, state: State, pulled: State) -> State:
        """Return the state with a pull's result, which steps do not change."""
        return pulled

    def on_step(self, state: State, x: Vector, step: int, fresh: Collection[int]) -> tuple[Vector, tuple[Vector, ...]]:
        """Return the weights after a step, and differences to leaders, whose lengths are counted."""
        strengths, config = self.strengths.at(step), self.config
        if fresh:
            local = state.local if self.group in fresh else None
            world = state.world if ALL_RANKS in fresh else None
            return on_step(State(local, world), x, strengths["local_pull"], strengths["global_pull"])
        parts = strengths["local_prox"] / config.local_period, strengths["global_prox"] / config.global_period
        return between_pulls(state, x, *parts), ()

    def position(self, state: State, x: Vector) -> Vector:
        """Return the weights from which a pull starts: the weights after the last step."""
        return x

    def after_step(self, state: State) -> State:
        """Return the state after a step has applied it: leaders stay known."""
        return state

    def consensus(self, state: State) -> Vector:
        """Return None: the consensus is the leader's weights, which only the leader has."""
        return None

    def save(self, state: State) -> tuple[dict[int, Vector], Vector]:
        """Return the known leaders' weights by group, and no force."""
        known = {self.group: state.local, ALL_RANKS: state.world}
        return {group: leader for group, leader in known.items() if leader is not None}, None

    def restore(self, targets: Mapping[int, Vector], force: Vector) -> State:
        """Return the state from the values that ``save`` returned."""
        return State(targets.get(self.group), targets.get(ALL_RANKS))
