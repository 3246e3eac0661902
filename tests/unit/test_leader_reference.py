"""The reference of leader-pull: by hand where that can be done, and it refuses logs that cannot be."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tests.conformance.cases import Case
from tests.conformance.gossip_reference import Problem
from tests.conformance.leader_reference import Following, Outcome, replay, several

ALL, CENTRE = -1, -1
STILL = Case("still", "sgd", 0.0)
LSGD = Following("lsgd", ((0, 1), (2,)), 2, 4, 0.5, 0.25, 0.4, 0.8, told=lambda x, rank, step: float(rank))
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


def test_a_snapshot_is_what_was_shown_last_and_a_later_pull_takes_its_place():
    """Rank 1 has sent its part of pull 1 within its step 2, and of pull 2 after it; then rank 0 leads itself."""
    pulls = [("sent", 1), ("landed", 1)], [("sent", 2), ("landed", 2)], [("sent", 3), ("landed", 3)]
    after = [
        (step(2, all=(1, 1)), 9.0),  # 1 before the step, so it moves from -2 to what rank 1 had shown
        (step(2, all=(2, 1)), 8.0),
        (step(2, all=(3, 0)), -2.0),
    ]
    following = dataclasses.replace(LSGD, groups=((0,), (1,)), global_pull=1.0, global_prox=0.0)
    for count, (entries, expected) in enumerate(after, 1):
        came = [entry for pull in pulls[:count] for entry in pull]
        logs = [
            [*step(1), *came, *entries, *step(3)],
            [*step(1), step(2)[0], *pulls[0], step(2)[1], *pulls[1], *pulls[2]],
        ]
        outcome = replay(resting(0.0, 10.0, lr=1.0), following, logs)
        assert paths(outcome) == [[-1.0, expected, expected - 1.0], [9.0, 8.0]]


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


def test_without_gradients_ranks_and_centre_move_by_as_much():
    """With alpha = beta / P what the centre gains is what the ranks lose: Zhang et al.'s elastic symmetry."""
    logs = []
    for _ in range(3):
        log = [*step(1)]
        for number in range(1, 6):
            log += [("sent", number), ("landed", number), *step(number + 1, all=(number, CENTRE))]
        logs.append(log)
    problem = resting(0.0, 0.0, 0.0, lr=1.0)
    push = dataclasses.replace(problem, gradient=lambda x, rank, at: np.full_like(x, (at == 1) * (rank - 2.0)))
    outcome = replay(push, dataclasses.replace(EASGD, alpha=None, beta=0.6), logs)
    assert outcome.x.sum() + outcome.centre[0] == pytest.approx(3.0, abs=1e-12)
    assert np.ptp(outcome.x) == pytest.approx(2.0 * 0.8**5)


def test_a_drain_by_hand():
    """All hold what the rank with the lowest last losses held; targets are forgotten, a step's number is not."""
    end = [("sent", 1), ("landed", 1), ("drained",)]
    logs = [[*step(1), *end, *step(2)] for _ in range(3)]
    following = dataclasses.replace(LSGD, groups=several(3, 3), told=lambda x, rank, step: [3.0, math.nan, 2.0][rank])
    outcome = replay(resting(1.0, 2.0, 3.0, lr=1.0), following, logs)
    assert paths(outcome) == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert [float(x[0]) for x in outcome.drained] == [2.0]
    centre = replay(resting(1.0, 1.0, 1.0, lr=1.0), EASGD, logs)
    assert centre.drained == [1.0 + 0.5 * (0.0 - 1.0)]


def test_means_are_of_the_last_losses():
    following = dataclasses.replace(
        LSGD, loss_window=2, told=lambda x, rank, step: {2: None, 4: math.inf}.get(step, float(step))
    )
    outcome = replay(
        resting(0.0),
        dataclasses.replace(following, groups=((0,),)),
        [[entry for n in range(1, 7) for entry in step(n)]],
    )
    assert outcome.means[0][:3] == [1.0, 1.0, 2.0]
    assert np.isnan(outcome.means[0][3:5]).all()
    assert outcome.means[0][5] == 5.5


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        (step(2), "takes step 2 after step 0"),
        ([step(1)[0], step(1)[0]], "takes step 1 after step 1"),
        ([step(1)[1]], "shows step 1 in step 0"),
        (step(1, all=(1, 0)), "takes pull 1 up before it has landed"),
        ([("sent", 1), ("sent", 1)], "sends its part of pull 1 twice"),
        ([("landed", 1)], "has pull 1 land twice, or has not sent its part"),
        ([("sent", 1), ("landed", 1), ("landed", 1)], "has pull 1 land twice"),
        ([("sent", 1), ("drained",)], "drained with something on its way"),
        ([("sent", 1), ("landed", 1), *step(1, all=(1, 1))], "never do: rank 0 at .'taken', 1"),
        ([("drained",)], "others would have to come first, but never do: rank 0 at"),
        ([("moved", 1)], "none of taken, shown"),
    ],
)
def test_impossible_logs(log, hint):
    with pytest.raises(ValueError, match=hint):
        replay(resting(0.0, 1.0), dataclasses.replace(LSGD, groups=((0, 1),)), [log, []])


def test_a_log_for_each_rank():
    with pytest.raises(ValueError, match="give a list for each"):
        replay(resting(0.0, 1.0), LSGD, [[]])
