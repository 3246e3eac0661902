"""The reference of gossip: by hand where that can be done, else by what the equations promise."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async import mixing, topology
from tests.conformance import gossip_reference, reference
from tests.conformance.cases import CASES, Case
from tests.conformance.gossip_reference import Problem, adpsgd, dpsgd, least_squares, on_time, sgp
from tests.conftest import examples

STILL, PLAIN = Case("still", "sgd", 0.0), Case("plain", "sgd", 0.5)
SIZES = [1, 2, 3, 4, 5, 8]
GRAPHS = ["ring", "exponential", "star", "complete", "bipartite-exponential"]
HALVES = [np.full((2, 2), 0.5)]
SEEDS = st.integers(0, 2**32 - 1)


def uniform(name, size):
    return mixing.matrices(topology.named(name, size), "uniform")


def resting(start):  # only mixing moves these
    return Problem(np.array(start, np.float64), lambda z, rank, step: np.zeros_like(z), STILL)


def scattered(size, elements=3, seed=0):
    return resting(np.random.default_rng(seed).normal(size=(size, elements)))


def pushed(start, case=PLAIN):  # the gradient is the same everywhere
    return Problem(np.array(start, np.float64), push, case)


def push(z, rank, step):
    return np.random.default_rng([rank, step]).normal(size=z.shape)


def hauled(outcome):
    """Sums of weights and push-sum weights, with what is in flight."""
    late_x, late_w = (sum(part[i] for part in outcome.flying.values()) for i in (0, 1))
    return outcome.x.sum(axis=0) + late_x, outcome.w.sum() + late_w


def random_takes(matrices, steps, max_staleness, seed, lengths=None):
    """A log of ranks that take in each message at once or up to ``max_staleness`` steps late, as it happens."""
    draw, lengths = random.Random(seed), lengths or [steps] * len(matrices[0])
    takes = [[[] for _ in range(length)] for length in lengths]
    for own, sent in enumerate(on_time(matrices, steps)):
        for sender, step in itertools.chain(*sent):
            at = step + draw.randint(0, max_staleness)
            if step <= lengths[sender] and at <= lengths[own]:
                takes[own][at - 1].append((sender, step))
    return takes


# -- sgp, osgp and dpsgd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("algorithm", [sgp, dpsgd])
def test_mixing_keeps_the_mean_and_the_push_sum_weight(algorithm, name, size):
    problem, matrices = scattered(size), uniform(name, size)
    takes = random_takes(matrices, 20, 3, size)
    for outcome in (algorithm(problem, matrices, 20), algorithm(problem, matrices, 20, takes, max_staleness=3)):
        x, w = hauled(outcome)
        np.testing.assert_allclose(x, problem.start.sum(axis=0), atol=1e-12)
        assert w == pytest.approx(size, abs=1e-12)
        np.testing.assert_allclose(outcome.drained(), problem.start.mean(axis=0), atol=1e-12)
        assert (outcome.w > 0).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["ring", "exponential", "complete"])
def test_doubly_stochastic_matrices_only_mix(name, size):
    problem, matrices = least_squares(size, Case("sgd", "sgd", 0.1)), uniform(name, size)
    first = second = problem.start
    for step in range(1, 13):
        weights = matrices[(step - 1) % len(matrices)]
        first = weights @ (first - 0.1 * slopes(problem, first, step))
        second = weights @ second - 0.1 * slopes(problem, second, step)
    outcome = sgp(problem, matrices, 12)
    np.testing.assert_allclose(outcome.z, first, atol=1e-12)
    np.testing.assert_allclose(outcome.w, 1.0, atol=1e-12)
    np.testing.assert_array_equal([own[-1] for own in outcome.path], outcome.z)
    assert not outcome.flying
    np.testing.assert_allclose(dpsgd(problem, matrices, 12).z, second, atol=1e-12)


def slopes(problem, x, step):
    return np.array([problem.gradient(z, rank, step) for rank, z in enumerate(x)])


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


def test_one_peer_exponential_at_four_ranks_agrees_exactly_after_two_steps():
    outcome = sgp(resting([[1.0, 8.0], [2.0, -4.0], [3.0, 0.5], [6.0, 1.5]]), uniform("exponential", 4), 2)
    assert outcome.z.tolist() == [[3.0, 1.5]] * 4
    assert outcome.w.tolist() == [1.0] * 4


@pytest.mark.parametrize("size", SIZES)
def test_push_sum_finds_the_mean_on_a_star(size):
    problem = scattered(size)
    mean, outcome = problem.start.mean(axis=0), sgp(problem, uniform("star", size), 200)
    np.testing.assert_allclose(outcome.z, np.tile(mean, (size, 1)), atol=1e-9)
    if size > 2:
        assert outcome.w.max() > 1.1
        assert abs(outcome.x - mean).max() > 0.01  # without its weights it would be wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.parametrize("algorithm", [sgp, dpsgd])
def test_alone_a_rank_does_what_its_optimizer_does(algorithm, framework, case):
    problem = least_squares(1, case, framework)
    outcome = algorithm(problem, uniform("exponential", 1), 20)
    models = [problem.start[0], *outcome.path[0]]
    gradients = [np.append(problem.gradient(models[step - 1], 0, step), 1.0) for step in range(1, 21)]
    rounds = [reference.Applied(gradient, case.lr) for gradient in gradients]
    np.testing.assert_allclose(outcome.z[0], reference.replay(framework, case, problem.start[0], rounds, 1), atol=1e-12)
    alone = adpsgd(problem, [[("step", step) for step in range(1, 21)]])
    np.testing.assert_allclose(alone.z, outcome.z, atol=1e-12)


def test_momentum_stays_with_its_rank():
    case = Case("momentum", "sgd", 1.0, momentum=0.5)
    problem = Problem(np.zeros((2, 1)), lambda z, rank, step: np.array([1.0 - rank]), case)
    outcome = sgp(problem, [np.eye(2)[::-1]], 2)  # each rank gives all it has to the other one
    assert outcome.z.tolist() == [[-1.0], [-1.5]]  # rank 0's updates are -1 and -1.5
    assert [state.first.tolist() for state in outcome.states] == [[1.5], [0.0]]


@settings(max_examples=examples(30))
@given(st.sampled_from(GRAPHS), st.sampled_from(SIZES), SEEDS)
def test_osgp_of_any_log_moves_the_sum_by_the_updates_alone(name, size, seed):
    matrices = uniform(name, size)
    problem, lengths = pushed(np.zeros((size, 2))), [random.Random(seed + rank).randint(1, 12) for rank in range(size)]
    takes = random_takes(matrices, max(lengths), 2, seed, lengths)
    outcome = sgp(problem, matrices, max(lengths), takes)
    moved = -0.5 * sum(push(np.zeros(2), rank, k) for rank, length in enumerate(lengths) for k in range(1, length + 1))
    x, w = hauled(outcome)
    np.testing.assert_allclose(x, moved, atol=1e-12)
    assert w == pytest.approx(size)
    assert [len(own) for own in outcome.path] == lengths


def test_an_edge_that_is_left_out_keeps_its_weight():
    problem, matrices = resting([[1.0], [5.0], [9.0]]), uniform("ring-right", 3)
    takes = [[[(2, 1)], [(2, 2)]], [[(0, 1)]], [[(1, 1)], []]]  # rank 1 takes one step, then rank 0 has nobody
    outcome = sgp(problem, matrices, 2, takes, sends=[[[1], []], [[2]], [[0], [0]]], max_staleness=0)
    assert outcome.x.tolist() == [[5.0 + 3.5], [3.0], [3.5]]
    assert outcome.w.tolist() == [1.5, 1.0, 0.5]
    assert not outcome.flying


@pytest.mark.parametrize(
    ("takes", "hint"),
    [
        ([[[(1, 1)], [(1, 1)]], [[], []]], "rank 0 takes in at its step 2 what it has taken in before: rank 1's"),
        ([[[(1, 1), (1, 1)], []], [[], []]], "rank 0 takes in at its step 1 what it has taken in before"),
        ([[[(1, 2)], []], [[], []]], "takes in at its step 1 what it has not reached: rank 1's message of step 2"),
        ([[[], [(1, 2)]], [[]]], "rank 0 takes in at its step 2 what it was never sent: rank 1's message of step 2"),
        ([[[(0, 1)], []], [[], []]], "never sent: rank 0's message of step 1 to rank 0"),
        ([[[(1, 0)], []], [[], []]], "never sent: rank 1's message of step 0"),
        ([[[]], [[]]], "the longest must be steps=2"),
        ([[[], []]], r"are of \[1, 2\] ranks"),
    ],
)
def test_impossible_logs_are_refused(takes, hint):
    with pytest.raises(ValueError, match=hint):
        sgp(least_squares(2, PLAIN), HALVES, 2, takes)


def test_messages_over_no_edge_late_ones_and_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="never sent: rank 1's message of step 1 to rank 0"):
        sgp(scattered(3), uniform("ring-right", 3), 1, [[[(1, 1)]], [[]], [[]]])
    with pytest.raises(ValueError, match=r"rank 0 sends to \[2\] at step 1, with neighbours \[1\]"):
        sgp(scattered(3), uniform("ring-right", 3), 1, sends=[[[2]], [[2]], [[0]]])
    late = on_time(HALVES, 4, late=2)
    sgp(scattered(2), HALVES, 4, late, max_staleness=2)
    with pytest.raises(ValueError, match="message of step 1 to rank 1 is missing at step 2, max_staleness=1"):
        sgp(scattered(2), HALVES, 4, late, max_staleness=1)
    with pytest.raises(ValueError, match=r"are of \[4\] ranks or hosts, the problem has 2"):
        sgp(scattered(2), uniform("ring", 4), 1)
    with pytest.raises(ValueError, match="local_size=2: take 'sgp' or 'dpsgd', and equal hosts"):
        sgp(scattered(3), uniform("ring", 1), 1, local_size=2)


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


@pytest.mark.parametrize("late", [0, 2])
def test_an_average_makes_all_equal_and_leaves_the_sums(late):
    problem, matrices = scattered(5), uniform("star", 5)
    outcome = sgp(problem, matrices, 6, on_time(matrices, 6, late), average_every=3)
    assert np.ptp(outcome.z, axis=0).max() == 0 == np.ptp(outcome.w)
    assert np.ptp([own[2] for own in outcome.path], axis=0).max() == 0
    assert np.ptp([own[3] for own in outcome.path], axis=0).max() > 0 or late == 0
    x, w = hauled(outcome)
    np.testing.assert_allclose(x, problem.start.sum(axis=0), atol=1e-12)
    assert w == pytest.approx(5)
    assert bool(outcome.flying) == bool(late)


def test_an_average_is_of_the_ranks_that_are_left():
    outcome = sgp(resting([[0.0], [8.0]]), HALVES, 2, [[[(1, 1)], []], [[(0, 1)]]], average_every=2)
    assert outcome.x.tolist() == [[2.0], [4.0]]
    assert outcome.w.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("algorithm", [sgp, dpsgd])
def test_hosts_average_inside_and_gossip_as_one(algorithm):
    problem = Problem(np.array([[8.0], [8.0], [0.0], [0.0]]), lambda z, rank, step: z - 4 * rank, PLAIN)
    # updates: 4, 6 and 4, 6: 5 and 5; gossip of 5 with 5, or of 8 with 0 and then what the update adds, -3 and +5
    expected = {sgp: [5.0, 5.0, 5.0, 5.0], dpsgd: [1.0, 1.0, 9.0, 9.0]}[algorithm]
    assert algorithm(problem, HALVES, 1, local_size=2).z[:, 0].tolist() == expected


def test_hosts_of_a_star_keep_the_mean_and_of_one_rank_are_ranks():
    problem, matrices = scattered(6), uniform("star", 3)
    takes = random_takes(matrices, 9, 2, 5)
    outcome = sgp(problem, matrices, 9, takes, local_size=2)
    np.testing.assert_allclose(outcome.drained(), problem.start.mean(axis=0), atol=1e-12)
    assert hauled(outcome)[1] == pytest.approx(6)
    assert np.ptp(outcome.z.reshape(3, 2, 3), axis=1).max() == 0
    assert outcome.flying
    problem = pushed(np.zeros((3, 2)), Case("momentum", "sgd", 0.1, momentum=0.9))
    doubled = Problem(np.zeros((6, 2)), lambda z, rank, step: push(z, rank // 2, step), problem.case)
    hosts, ranks = sgp(doubled, matrices, 9, local_size=2), sgp(problem, matrices, 9)
    np.testing.assert_allclose(hosts.z[::2], ranks.z, atol=1e-12)


def test_after_a_drain_data_and_momentum_go_on():
    problem, full = least_squares(3, Case("momentum", "sgd", 0.05, momentum=0.9)), uniform("complete", 3)
    first = sgp(problem, full, 4)  # all agree after each step, so the drain changes nothing
    second = sgp(problem.after(first), full, 5)
    np.testing.assert_allclose(second.z, sgp(problem, full, 9).z, atol=1e-12)


# -- adpsgd ---------------------------------------------------------------------------------------------------


def random_log(size, seed, length=60):
    """Steps, pairings and their landings as they happen, some still in flight at the end."""
    draw, log, steps, open_ = random.Random(seed), [[] for _ in range(size)], [0] * size, []
    for number in range(1, length):
        rank = draw.randrange(size)
        steps[rank] += 1
        log[rank].append(("step", steps[rank]))
        if size > 1 and draw.random() < 0.5:
            a, b = draw.sample(range(size), 2)
            log[a].append(("sent", number, b))
            log[b].append(("sent", number, a))
            open_ += [(a, number, b), (b, number, a)]
        if open_ and draw.random() < 0.7:
            own, of, partner = open_.pop(draw.randrange(len(open_)))
            log[own].append(("landed", of, partner))
    return log, steps


@settings(max_examples=examples(40))
@given(st.sampled_from(SIZES), SEEDS)
def test_adpsgd_moves_its_mean_by_local_updates_alone(size, seed):
    log, steps = random_log(size, seed)
    problem = pushed(np.random.default_rng(seed).normal(size=(size, 2)))
    outcome = adpsgd(problem, log)
    moved = -0.5 * sum(push(np.zeros(2), rank, k) for rank, done in enumerate(steps) for k in range(1, done + 1))
    np.testing.assert_allclose(outcome.drained() * size, problem.start.sum(axis=0) + moved, atol=1e-12)
    assert [len(own) for own in outcome.path] == steps


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


def test_adpsgd_average_waits_for_all_and_reaches_the_parameters():
    problem = Problem(np.array([[8.0], [0.0]]), lambda z, rank, step: z - 4 * rank, PLAIN)
    both = [("step", 1), ("average", 1), ("step", 2)]
    outcome = adpsgd(problem, [both, both])  # 4 and 2, 3 and 3, then 1.5 and 3.5
    assert [[z.tolist() for z in own] for own in outcome.path] == [[[3.0], [1.5]], [[3.0], [3.5]]]
    for wrong in ([("average", 2)], [("average", 1), ("average", 1)]):
        with pytest.raises(ValueError, match="has average"):
            adpsgd(problem, [wrong, wrong])


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        ([[("sent", 1, 1), ("landed", 1, 1)], []], r"others would have to come first.*rank 0 at \('landed', 1, 1\)"),
        ([[("landed", 1, 1)], [("sent", 1, 0)]], "lands at rank 0 before rank 0 has sent its own"),
        ([[("sent", 1, 1), *[("landed", 1, 1)] * 2], [("sent", 1, 0)]], "rank 1's of round 1 lands at rank 0 twice"),
        ([[("sent", 1, 1), ("sent", 1, 1)], []], "rank 0 sends to rank 1 twice in round 1"),
        ([[("step", 2)], []], "rank 0 takes step 2 after step 0"),
        ([[("step", 1), ("step", 1)], []], "rank 0 takes step 1 after step 1"),
        (
            [[("sent", 1, 1), ("landed", 1, 1), ("sent", 2, 1)], [("sent", 2, 0), ("landed", 2, 0), ("sent", 1, 0)]],
            r"rank 0 at \('landed', 1, 1\); rank 1 at \('landed', 2, 0\)",
        ),
        ([[("jumped", 1)], []], "none of step, sent, landed, average"),
        ([[]], "the log is of 1 ranks, the problem of 2"),
    ],
)
def test_impossible_pairings_are_refused(log, hint):
    with pytest.raises(ValueError, match=hint):
        adpsgd(least_squares(2, PLAIN), log)
