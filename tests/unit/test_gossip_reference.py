"""The reference of gossip, by hand: what production shares with it is compared in ``conformance`` and ``threads``."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance import gossip_reference, reference
from tests.conformance.cases import CASES, Case
from tests.conformance.gossip_reference import Problem, adpsgd, dpsgd, least_squares, on_time, sgp

STILL, PLAIN = Case("still", "sgd", 0.0), Case("plain", "sgd", 0.5)
HALVES = [np.full((2, 2), 0.5)]


def resting(start):  # only mixing moves these
    return Problem(np.array(start, np.float64), lambda z, rank, step: np.zeros_like(z), STILL)


# -- sgp, osgp and dpsgd --------------------------------------------------------------------------------------


def test_two_ranks_by_hand():
    problem = Problem(np.array([[8.0], [0.0]]), lambda z, rank, step: z - 4 * rank, PLAIN)  # x <- (x + 4 rank) / 2
    assert dpsgd(problem, HALVES, 1).z.tolist() == [[4 - 4], [4 + 2]]
    assert dpsgd(problem, HALVES, 2).z.tolist() == [[3 - 0], [3 - 1]]
    assert sgp(problem, HALVES, 1).z.tolist() == [[3], [3]]
    late = sgp(problem, HALVES, 2, on_time(HALVES, 2, late=1), max_staleness=1)
    # after step 1, x = 2 and 1, w = 1/2, and 2 and 1 fly; z = 4, 2, so x <- 2 - 4/2 = 0 and 1 - (2 - 4)/2 = 2
    assert late.x.tolist() == [[0 + 1], [1 + 2]]
    assert late.w.tolist() == [0.25 + 0.5] * 2
    assert late.flying == {(1, 0, 2): (0.0, 0.25), (0, 1, 2): (1.0, 0.25)}
    assert [[float(z[0]) for z in own] for own in late.path] == [[4, 1 / 0.75], [2, 3 / 0.75]]
    assert late.drained().tolist() == [2.5]


def test_momentum_stays_with_its_rank():
    case = Case("momentum", "sgd", 1.0, momentum=0.5)
    problem = Problem(np.zeros((2, 1)), lambda z, rank, step: np.array([1.0 - rank]), case)
    outcome = sgp(problem, [np.eye(2)[::-1]], 2)  # each rank gives all it has to the other one
    assert outcome.z.tolist() == [[-1.0], [-1.5]]  # rank 0's updates are -1 and -1.5
    assert [state.first.tolist() for state in outcome.states] == [[1.5], [0.0]]


# -- averages, hosts, what comes after a drain ----------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: case.name)
def test_averaged_weights_of_sgd_are_those_of_averaged_gradients(case):
    problem = least_squares(3, case)
    x, rounds = problem.start[0], []
    for step in range(1, 11):
        gradients = sum(problem.gradient(x, rank, step) for rank in range(3))
        rounds.append(reference.Applied(np.append(gradients, 1.0), case.lr))
        x = reference.replay("torch", case, problem.start[0], rounds, 3)
    np.testing.assert_allclose(gossip_reference.allreduce(problem, 10).z, np.tile(x, (3, 1)), atol=1e-12)


@pytest.mark.parametrize("algorithm", [sgp, dpsgd])
def test_hosts_average_inside_and_gossip_as_one(algorithm):
    problem = Problem(np.array([[8.0], [8.0], [0.0], [0.0]]), lambda z, rank, step: z - 4 * rank, PLAIN)
    # updates: 4, 6 and 4, 6: 5 and 5; gossip of 5 with 5, or of 8 with 0 and then what the update adds, -3 and +5
    expected = {sgp: [5.0, 5.0, 5.0, 5.0], dpsgd: [1.0, 1.0, 9.0, 9.0]}[algorithm]
    assert algorithm(problem, HALVES, 1, local_size=2).z[:, 0].tolist() == expected


# -- adpsgd ---------------------------------------------------------------------------------------------------


def test_adpsgd_by_hand():
    problem = Problem(np.array([[8.0], [0.0]]), lambda z, rank, step: z, PLAIN)  # each d is -p / 2
    log = [
        [("step", 1), ("sent", 1, 1), ("landed", 1, 1), ("step", 2), ("step", 3)],
        [("sent", 1, 0), ("step", 1), ("landed", 1, 0)],
    ]
    outcome = adpsgd(problem, log)
    # rank 0: 8 - 4 = 4; lands (0 - 4) / 2: y = 2, p = 4; step 2: d = -2, y = 0 = p; step 3: no change
    # rank 1: snapshot 0, d = 0, lands (4 - 0) / 2
    assert [[z.tolist() for z in own] for own in outcome.path] == [[[4.0], [0.0], [0.0]], [[0.0]]]
    assert outcome.z.tolist() == [[0.0], [2.0]]
