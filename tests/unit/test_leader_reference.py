"""The reference of leader-pull: by hand where that can be done, and it refuses logs that cannot be."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tests.conformance.cases import Case
from tests.conformance.gossip_reference import Problem
from tests.conformance.leader_reference import Following, Outcome, replay, several

ALL, CENTRE = -1, -1
STILL = Case("still", "sgd", 0.0)
LSGD = Following("lsgd", ((0, 1), (2,)), 2, 4, 0.5, 0.25, 0.4, 0.8, loss_of=lambda x, rank, step: float(rank))
EASGD = Following("easgd", alpha=0.25, beta=0.5)


def resting(*start: float, lr: float = 0.0) -> Problem:
    """Ranks with one weight each, and gradient 1."""
    case = dataclasses.replace(STILL, lr=lr)
    return Problem(np.array(start)[:, None], lambda x, rank, step: np.ones_like(x), case)


def step(number: int, **fresh: tuple[int, int]) -> list[tuple]:
    """A rank's step, with pulls ``g0`` of group 0 and ``all`` of all taken up."""
    taken = {ALL if name == "all" else int(name[1:]): pull for name, pull in fresh.items()}
    return [("taken", number, taken), ("shown", number)]


def paths(outcome: Outcome) -> list[list[float]]:
    return [[float(x[0]) for x in own] for own in outcome.path]


def test_lsgd_by_hand():
    """First towards the group's leader, then towards that of all; between pulls towards both at once."""
    pull_1, pull_2 = [("sent", 1), ("landed", 1)], [("sent", 2), ("landed", 2)]
    logs = [
        [*step(1), *pull_1, *pull_2, *step(2, g0=(1, 1), all=(2, 2)), *step(3)],
        [*step(1), *pull_1, *pull_2, *step(2, g0=(1, 1), all=(2, 2)), *step(3)],
        [*step(1), *pull_2, *step(2, all=(2, 2)), *step(3)],
    ]
    outcome = replay(resting(0.0, 8.0, 16.0), LSGD, logs)
    zero = 0.0 + 0.5 * 8.0
    zero += 0.25 * (16.0 - zero)
    one = 8.0 + 0.25 * 8.0  # (leads its group itself)
    assert paths(outcome) == [
        [0.0, zero, zero + 0.4 / 2 * (8.0 - zero) + 0.8 / 4 * (16.0 - zero)],
        [8.0, one, one + 0.8 / 4 * (16.0 - one)],
        [16.0] * 3,
    ]
    assert outcome.distances == [[8.0, 12.0], [8.0], []]
    assert outcome.leaders(0, 0) == [(2, 1)]
    assert outcome.leaders(2, ALL) == [(2, 2)]


def test_easgd_by_hand():
    """Two pulls come before one step: the second starts from where the first will bring the rank; the centre follows
    the mean of these."""
    first, second = [("sent", 1), ("landed", 1)], [("sent", 2), ("landed", 2)]
    logs = [
        [*step(1), *first, *second, *step(2, all=(2, CENTRE))],
        [*step(1), *first, *step(2, all=(1, CENTRE)), *second],
    ]
    outcome = replay(resting(0.0, 0.0, lr=1.0), dataclasses.replace(EASGD, lr_spread="power"), logs)
    # shown: -1, -2; centre 0 at first
    centre = 0.0 + 0.5 * (-1.5 - 0.0)
    one = -2.0 - 2.0 + 0.25 * (0.0 - -2.0)
    moved = -1.0 + 0.25 * (0.0 - -1.0)
    zero = -1.0 - 1.0 + (moved - -1.0) + 0.25 * (centre - moved)
    assert paths(outcome) == [[-1.0, zero], [-2.0, one]]
    assert outcome.centre == centre + 0.5 * ((moved + one) / 2 - centre)
    alone = replay(resting(0.0, 0.0, lr=1.0), dataclasses.replace(EASGD, alpha=None), logs)
    assert alone.path[1][1] == -2.0 + 0.5 / 2 * 1.0


def test_a_drain_by_hand():
    """All hold what the rank with the lowest last losses held; targets are forgotten, a step's number is not."""
    end = [("sent", 1), ("landed", 1), ("drained",)]
    logs = [[*step(1), *end, *step(2)] for _ in range(3)]
    following = dataclasses.replace(
        LSGD, groups=several(3, 3), loss_of=lambda x, rank, step: [3.0, math.nan, 2.0][rank]
    )
    outcome = replay(resting(1.0, 2.0, 3.0, lr=1.0), following, logs)
    assert paths(outcome) == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert [float(x[0]) for x in outcome.drained] == [2.0]
    centre = replay(resting(1.0, 1.0, 1.0, lr=1.0), EASGD, logs)
    assert centre.drained == [1.0 + 0.5 * (0.0 - 1.0)]
