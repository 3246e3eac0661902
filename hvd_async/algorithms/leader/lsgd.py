"""LSGD's equations: Teng et al., NeurIPS 2019, with leaders x_l of the group and x_g of all ranks.

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
from typing import TYPE_CHECKING, NamedTuple

from hvd_async.algorithms.leader.selection import ALL_RANKS, Rule, Strengths, Vector

if TYPE_CHECKING:
    from hvd_async.algorithms.leader.config import LeaderConfig


class State(NamedTuple):
    """Last known weights of this rank's leaders, shape (n,); None if they are unknown or this rank leads.

    Attributes:
        local: weights of the leader of this rank's group.
        world: weights of the leader of all ranks.
    """

    local: Vector = None
    world: Vector = None


@dataclass(frozen=True)
class LSGD(Rule):
    """LSGD on one rank. Steps do not change its state.

    Attributes:
        config: configuration, the same on all ranks.
        strengths: strengths of the pulls, numbers or functions of this rank's step.
        group: number of this rank's group.
    """

    config: LeaderConfig
    strengths: Strengths
    group: int

    def begin(self, weights: Vector) -> State:
        return State()

    def on_pull(self, state: State, group: int, own: Vector, result: Vector) -> tuple[State, tuple[Vector, ...]]:
        """Return the state after a pull, and no differences to count: they are known only in the next step."""
        return state._replace(**{"world" if group == ALL_RANKS else "local": result}), ()

    def on_step(self, state: State, x: Vector, step: int, fresh: Collection[int]) -> tuple[Vector, tuple[Vector, ...]]:
        """Return the weights after a step, and the difference to each leader before its pull.

        The first step since pulls follows the group's leader, then that of all ranks; other steps move towards both
        known leaders at once.
        """
        strengths, config, differences = self.strengths.at(step), self.config, []
        for group, leader, pull in ((self.group, state.local, "local_pull"), (ALL_RANKS, state.world, "global_pull")):
            if group in fresh and leader is not None:
                difference = leader - x
                differences.append(difference)
                x = x + difference * strengths[pull]
        if not fresh:
            parts = strengths["local_prox"] / config.local_period, strengths["global_prox"] / config.global_period
            known = [(leader, part) for leader, part in zip(state, parts, strict=True) if part and leader is not None]
            for change in [(leader - x) * part for leader, part in known]:
                x += change
        return x, tuple(differences)

    def save(self, state: State) -> tuple[dict[int, Vector], Vector]:
        """Return the known leaders' weights by group, and no force."""
        known = {self.group: state.local, ALL_RANKS: state.world}
        return {group: leader for group, leader in known.items() if leader is not None}, None

    def restore(self, targets: Mapping[int, Vector], force: Vector) -> State:
        return State(targets.get(self.group), targets.get(ALL_RANKS))
