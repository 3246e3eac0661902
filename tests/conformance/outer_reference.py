"""Local steps and outer optimizers in float64 NumPy: what ranks do by their numbers of steps alone.

Ranks continue from an anchor a, the same on all. For each fragment due at a step (``due``), with x_i the weights
of the ranks that take this step, d = mean (a - x_i), and D steps later, by the outer optimizer:
    local:   a' = a - d
    slowmo:  u <- beta u + d / gamma,  a' = a - alpha gamma u
    diloco:  b <- mu b + d,            a' = a - lr (d + mu b)
and x_i <- a' + (x_i - sent x_i); a rank that is done follows, x_i <- a' + (x_i - a). A drain takes in all that is
under way, then all ranks and the anchor continue from the mean of x_i; u and b stay.

With hosts of n ranks, x_i is first the mean of U(x_j) over the ranks j of rank i's host that take this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_async.algorithms.gossip.config import GossipConfig
from tests.conformance.gossip_reference import Outcome, Problem
from tests.conformance.reference import Array, start

Compress = Callable[[dict[int, Array], int], Array]
"""(differences to the anchor of the ranks that take part; fragment) -> what all make of their mean."""


@dataclass
class Outer:
    """An outer optimizer's settings and state.

    Attributes:
        every: steps from one average of a fragment to the next.
        late: steps that an average is late.
        rate: the mean inner learning rate of the last ``every`` steps, by the step, from 1, since the last drain.
        momentum_of: u or b; empty at first.
    """

    algorithm: str
    every: int
    late: int = 0
    fragments: int = 1
    lr: float = 1.0
    momentum: float = 0.0
    rate: Callable[[int], float] = lambda step: 1.0
    momentum_of: Array | None = None

    def step(self, anchor: Array, where: slice, d: Array, gamma: float) -> Array:
        """Return a fragment's new anchor."""
        assert self.momentum_of is not None
        v = self.momentum_of
        if self.algorithm == "local":
            return np.asarray(anchor - d)
        if self.algorithm == "slowmo":
            v[where] = self.momentum * v[where] + d / gamma
            return np.asarray(anchor - self.lr * gamma * v[where])
        v[where] = self.momentum * v[where] + d
        return np.asarray(anchor - self.lr * (d + self.momentum * v[where]))


def of_config(config: GossipConfig) -> Outer:
    """Return the outer optimizer of a plan, without momentum yet."""
    rhythm = config.average_every, config.max_staleness, config.fragments
    return Outer(config.algorithm, *rhythm, config.outer_lr, config.outer_momentum)


def slices(elements: int, fragments: int, ranks: int) -> list[slice]:
    """Elements of each fragment, which has as many parts of one length as there are ranks."""
    length = -(-elements // (fragments * ranks)) * ranks
    return [slice(min(f * length, elements), min((f + 1) * length, elements)) for f in range(fragments)]


def due(outer: Outer, step: int) -> list[int]:
    """Fragments that are averaged at a step."""
    offsets = [f * outer.every // outer.fragments for f in range(outer.fragments)]
    return [f for f, offset in enumerate(offsets) if step % outer.every == offset]


def train(
    problem: Problem, counts: Sequence[int], outer: Outer, compress: Compress | None = None, local_size: int = 1
) -> Outcome:
    """Replay this many steps of each rank, with all that is under way taken in at the end.

    Args:
        local_size: ranks of a host, numbered host by host.
    """
    x, anchor = problem.start.copy(), problem.start[0].copy()
    states = list(problem.states) or [start(own) for own in x]
    path: list[list[Array]] = [[] for _ in x]
    parts = slices(x.shape[1], outer.fragments, len(x))
    if outer.momentum_of is None:
        outer.momentum_of = np.zeros(x.shape[1])
    flying: list[tuple[int, int, dict[int, Array]]] = []

    def take(due_at: float) -> None:
        while flying and flying[0][0] + outer.late <= due_at:
            step, fragment, sent = flying.pop(0)
            where, old = parts[fragment], anchor[parts[fragment]].copy()
            differences = {rank: old - own for rank, own in sorted(sent.items())}
            d = np.mean(list(differences.values()), axis=0) if compress is None else compress(differences, fragment)
            anchor[where] = outer.step(old, where, d, outer.rate(step))
            for rank, own in enumerate(x):
                own[where] = anchor[where] + (own[where] - sent.get(rank, old))

    for step in range(1, max(counts, default=0) + 1):
        active = [rank for rank, count in enumerate(counts) if count >= step]
        for rank in active:
            g = problem.gradient(x[rank], rank, step)
            x[rank], states[rank] = problem.update(x[rank], g, states[rank])
        for first in range(0, len(x), local_size):
            together = [rank for rank in active if first <= rank < first + local_size]
            x[together] = x[together].mean(axis=0) if together else 0.0
        for fragment in due(outer, step):
            flying.append((step, fragment, {rank: x[rank][parts[fragment]].copy() for rank in active}))
        take(step)
        for rank in active:
            path[rank].append(x[rank].copy())
    take(np.inf)
    return Outcome(x, np.ones(len(x)), path, tuple(states))


class TwoStages:
    """Averages whose messages are compressed, part by part: rank j adds up part j, and sends the mean to all. What the
    messages of a rank leave out is part of its next difference, as what rank j leaves out of a mean of A ranks is, A
    times; once rank j is done, of the next sum of part j.

    Args:
        encoded: what all decode of a part that a rank has sent.
    """

    def __init__(self, elements: int, fragments: int, ranks: int, encoded: Callable[[Array], Array]) -> None:
        self.parts, self.ranks, self.encoded = slices(elements, fragments, ranks), ranks, encoded
        self.length = -(-elements // (fragments * ranks))
        self.errors = np.zeros((ranks, elements))

    def __call__(self, differences: dict[int, Array], fragment: int) -> Array:
        where = self.parts[fragment]
        room = self.length * self.ranks - (where.stop - where.start)
        mean = np.zeros((self.ranks, self.length))
        left = np.zeros((self.ranks, self.ranks, self.length))
        for rank, difference in differences.items():
            own = np.pad(difference + self.errors[rank, where], (0, room)).reshape(self.ranks, self.length)
            sent = np.array([part if to == rank else self.encoded(part) for to, part in enumerate(own)])
            left[rank], mean = own - sent, mean + sent
        for rank in set(range(self.ranks)) - differences.keys():
            left[rank] = np.pad(self.errors[rank, where], (0, room)).reshape(self.ranks, self.length)
            mean[rank] += left[rank, rank]
            left[rank, rank] = 0.0
        mean /= len(differences)
        result = np.array([self.encoded(part) for part in mean])
        for rank in range(self.ranks):
            left[rank, rank] += (mean[rank] - result[rank]) * len(differences)
            self.errors[rank, where] = left[rank].reshape(-1)[: where.stop - where.start]
        return np.asarray(result.reshape(-1)[: where.stop - where.start])
