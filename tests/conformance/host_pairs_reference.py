"""AD-PSGD of hosts in float64 NumPy: like ``gossip_reference``, whose shadow of a rank is here that of its host.

With n ranks of a host, y its shadow, p the parameters of all its ranks, U and g as there:
    step:       y <- y + sum_r (U(p, g_r(p)) - p) / n  of the ranks r that take it, then p <- y
    pair:       y <- y + (s_other - s_own) / 2, part by part: rank i of a host with rank i of the other
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.conformance.gossip_reference import Log, Outcome, Problem, Shadows
from tests.conformance.reference import Array, play


def adpsgd_of_hosts(problem: Problem, log: Log, local_size: int, steps: Sequence[int]) -> Outcome:
    """Replay what hit the parts of hosts' shadows, each rank's in its own order.

    Args:
        log: for each rank, of the part that it owns.
        local_size: ranks of a host.
        steps: of each rank.

    Raises:
        ValueError: the log is impossible; says what of which rank.
    """
    shadows = HostShadows(problem, log, local_size, steps)
    play(log, shadows.hit)
    return shadows.outcome()


class HostShadows(Shadows):
    """The shadow of each rank is its host's, of which only its own part is looked at until all parts are put together.

    A rank that has taken fewer steps than its host changes nothing in the steps that it lacks.
    """

    def __init__(self, problem: Problem, log: Log, local_size: int, steps: Sequence[int]) -> None:
        super().__init__(problem, log)
        self.local_size, self.steps = local_size, steps
        elements = problem.start.shape[1]
        part = -(-elements // local_size)
        self.parts = [slice(rank % local_size * part, (rank % local_size + 1) * part) for rank in range(len(log))]
        self.done = [0] * len(log)
        """Steps of the host that each rank has added to its part."""
        self.results: dict[tuple[int, int], Array] = {}
        """Each part after each step, by its owner and the step."""
        self.changes: dict[tuple[int, int], Array] = {}
        """By rank and step."""

    def members(self, rank: int) -> range:
        """The ranks of its host."""
        first = rank - rank % self.local_size
        return range(first, first + self.local_size)

    def hit(self, rank: int, entry: Sequence[Any]) -> bool:
        if entry[0] != "step":
            return super().hit(rank, entry)
        number, members = entry[1], self.members(rank)
        if number != self.done[rank] + 1:
            raise ValueError(f"impossible log: rank {rank} takes step {number} after step {self.done[rank]}")
        takers = [member for member in members if self.steps[member] >= number]
        if not takers:
            raise ValueError(f"impossible log: rank {rank} takes step {number}, which no rank of its host takes")
        if any(self.done[member] < number - 1 for member in members):
            return False
        part = self.parts[rank]
        moved = sum(self._change(member, number)[part] for member in takers)
        self.shadows[rank][part] += moved / self.local_size
        self.results[rank, number], self.done[rank] = self.shadows[rank][part].copy(), number
        if all(self.done[member] >= number for member in members):
            whole = np.concatenate([self.results[member, number] for member in members])
            for member in takers:
                self.params[member] = whole
                self.path[member].append(whole.copy())
        return True

    def _change(self, rank: int, number: int) -> Array:
        if (rank, number) not in self.changes:
            old = self.params[rank].copy()
            gradient = self.problem.gradient(old, rank, number)
            new, self.states[rank] = self.problem.update(old, gradient, self.states[rank])
            self.changes[rank, number] = new - old
        return self.changes[rank, number]

    def outcome(self) -> Outcome:
        """Return where hosts are: all ranks of one at its shadow, also one that has finished."""
        left = [rank for rank, steps in enumerate(self.steps) if len(self.path[rank]) != steps]
        if left:
            raise ValueError(f"the log has fewer steps than ranks {left} have taken")
        whole = [
            np.concatenate([self.shadows[member][self.parts[member]] for member in self.members(rank)])
            for rank in range(len(self.steps))
        ]
        return Outcome(np.array(whole), np.ones(len(whole)), self.path, tuple(self.states))
