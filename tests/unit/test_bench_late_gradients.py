"""The simulation behind ``bench.py late_gradients``: who is how late, and what each remedy does about it."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager.quorum import needed
from hvd_async.simulation.names import quorum_of
from hvd_async.simulation.schedule import Gradient, gradients_of, play, replay, synchronous_seconds
from scripts.benchmarks.jobs.shared.late_training import SMOOTHING, Learning, train
from scripts.benchmarks.support.remedies import REMEDIES, TASKS, Remedy, times_of

QUORUMS = ("solo", "k2", "0.5", "all")
MOMENTUM, DECAY, SIZE = 0.9, 0.01, 7


def drawn(steps, ranks, seed):
    return 1.0 + 2.0 * np.random.default_rng(seed).random((steps, ranks))


def by_events(times, quorum, bound):
    """(Gradients, seconds): the rules event by event, from who arrives next."""
    steps, ranks = times.shape
    wanted = {"solo": 1, "all": ranks}.get(quorum) or needed(quorum_of(quorum), ranks)
    coming = [(times[0, rank], rank) for rank in range(ranks)]
    heapq.heapify(coming)
    arrived, version, fired, ended = [0] * ranks, [0] * ranks, 0, 0.0
    pending, waits, found = [], set(), []
    while coming:
        ended, rank = heapq.heappop(coming)
        pending.append((rank, arrived[rank], version[rank]))
        arrived[rank] += 1
        waits.add(rank)
        while fired < steps and sum(count > fired for count in arrived) >= wanted and min(arrived) >= fired + 1 - bound:
            fired += 1
            found += [Gradient(*one, fired) for one in pending]
            pending = []
        for free in [one for one in waits if fired >= arrived[one]]:
            waits.remove(free)
            version[free] = fired
            if arrived[free] < steps:
                heapq.heappush(coming, (ended + times[arrived[free], free], free))
    return found + [Gradient(*one, steps + 1) for one in pending], ended


@given(
    steps=st.integers(1, 30),
    ranks=st.integers(2, 6),
    seed=st.integers(0, 99),
    quorum=st.sampled_from(QUORUMS),
    bound=st.sampled_from([0, 1, 2, 16]),
)
def test_gradients_are_as_late_as_the_rules_say_and_count_once(steps, ranks, seed, quorum, bound):
    times = drawn(steps, ranks, seed)
    times[:, 0] *= 1 + seed % 4
    played = play(times, quorum, max_staleness=bound)
    found = gradients_of(played)
    expected, seconds = by_events(times, quorum, bound)
    assert sorted(found) == sorted(expected)
    assert played.seconds == pytest.approx(seconds)
    assert played.seconds == replay(times, quorum, max_staleness=bound).seconds
    assert sorted((each.rank, each.step) for each in found) == [(r, s) for r in range(ranks) for s in range(steps)]
    assert all(each.staleness >= 0 and each.step < each.round <= each.step + 1 + bound for each in found)


def test_under_all_nobody_is_late():
    assert {(each.round, each.version) for each in gradients_of(play(drawn(5, 3, 0), "all"))} == {
        (number, number - 1) for number in range(1, 6)
    }


def quadratic(ranks, steps, dtype=torch.float64):
    """A model of one vector and of one matrix, and batches on which each loss is a quadratic one."""
    random = np.random.default_rng(5)
    matrices, targets = 0.3 * random.standard_normal((ranks, steps, 5, SIZE)), random.standard_normal((ranks, steps, 5))
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    model.b = torch.nn.Parameter(torch.full((2, 2), 0.5, dtype=dtype))

    def loss(rank, step):
        weights = torch.cat([model.a, model.b.reshape(-1)])
        wrong = torch.from_numpy(matrices[rank, step]).to(dtype) @ weights - torch.from_numpy(targets[rank, step]).to(
            dtype
        )
        return 0.5 * (wrong**2).sum()

    def gradient(rank, step, weights):
        return matrices[rank, step].T @ (matrices[rank, step] @ weights - targets[rank, step])

    return model, loss, gradient


def rate(number):
    return 0.01 / (1 + number)


def weights_of(model):
    return torch.cat([model.a, model.b.reshape(-1)]).detach().numpy()


def reference(gradient, start, gradients, ranks, remedy):
    """The equations in float64, round by round, with all weights of before at hand."""
    m = MOMENTUM if remedy.momentum is None else remedy.momentum
    ahead, predicted = (sum(m**j for j in range(1, int(t) + 1)) for t in (remedy.ahead, remedy.predicted))
    weights, velocity, means, last = start.copy(), np.zeros(SIZE), np.ones(ranks), np.zeros(SIZE)
    held = [start.copy()]
    for number in range(1, max(each.round for each in gradients) + 1):
        total, at_once = np.zeros(SIZE), np.zeros(SIZE)
        for each in sorted(each for each in gradients if each.round == number):
            late = each.staleness
            then = held[number - 1] if remedy.fresh else held[each.version]
            late = 0 if remedy.fresh else late
            g = gradient(each.rank, each.step, then)
            g = g + remedy.compensation * g * g * (held[-1] - then)
            weight = (1 + late) ** -remedy.power
            if remedy.power and not remedy.bare:
                means[each.rank] += SMOOTHING * (weight - means[each.rank])
                weight /= means[each.rank]
            if remedy.catch_up:
                at_once += g * sum(m**j for j in range(late)) / ranks
                weight = m**late
            total += weight * g / ranks
        lr = rate(number - 1) * (1 - m) / (1 - MOMENTUM)
        velocity = m * velocity + total + DECAY * weights
        before, update = weights, -lr * (velocity + at_once)
        weights, last = weights + update + ahead * (update - last), update
        held.append(weights + predicted * (weights - before))
    return weights


@pytest.mark.parametrize("arm", REMEDIES)
def test_a_training_follows_the_remedys_equations(arm):
    ranks, steps, remedy = 4, 12, REMEDIES[arm]
    model, loss, gradient = quadratic(ranks, steps)
    start = weights_of(model)
    gradients = gradients_of(play(drawn(steps, ranks, 1), remedy.quorum))
    assert arm == "synchronous" or {each.staleness for each in gradients} >= {0, 1}
    train(Learning(model, loss, rate, MOMENTUM, DECAY), gradients, ranks, remedy)
    assert weights_of(model) == pytest.approx(reference(gradient, start, gradients, ranks, remedy), rel=1e-10)


def test_all_ranks_and_no_prediction_are_plain_synchronous_sgd_bit_for_bit():
    ranks, steps = 4, 12
    ours, loss, _ = quadratic(ranks, steps, torch.float32)
    gradients = gradients_of(play(drawn(steps, ranks, 1), "all"))
    train(Learning(ours, loss, rate, MOMENTUM, DECAY), gradients, ranks, REMEDIES["synchronous"])
    plain, loss, _ = quadratic(ranks, steps, torch.float32)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=MOMENTUM, weight_decay=DECAY)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss(rank, step) / ranks).backward()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    assert np.array_equal(weights_of(ours), weights_of(plain))


@pytest.mark.parametrize("remedy", [Remedy(), Remedy(ahead=2), Remedy("k2"), Remedy(compensation=0.0, fresh=True)])
def test_each_gradient_moves_the_weights_once(remedy):
    """Steps on a loss that is linear in a weight of its own for each rank and step, and without momentum."""
    ranks, steps = 3, 9
    model = torch.nn.Module()
    model.own = torch.nn.Parameter(torch.zeros(ranks, steps))
    gradients = gradients_of(play(drawn(steps, ranks, 2), remedy.quorum))
    assert any(each.round > steps for each in gradients), "nothing is left to the drain"
    learning = Learning(model, lambda rank, step: model.own[rank, step] * ranks, lambda number: 1.0, 0.0, 0.0)
    train(learning, gradients, ranks, remedy)
    assert torch.equal(model.own.detach(), torch.full((ranks, steps), -1.0))


def test_weights_of_gradients_that_are_all_as_late_are_1():
    """With these over their mean a rank that is always late counts as much as others, in the long run."""
    ranks, steps = 2, 400
    model = torch.nn.Module()
    model.moved = torch.nn.Parameter(torch.zeros(ranks, dtype=torch.float64))
    gradients = [Gradient(rank, step, max(0, step - 2 * rank), step + 1) for step in range(steps) for rank in (0, 1)]
    learning = Learning(model, lambda rank, step: -model.moved[rank] * ranks, lambda number: 1 / steps, 0.0, 0.0)
    train(learning, gradients, ranks, Remedy(power=1.0))
    assert model.moved.detach().numpy() == pytest.approx([1.0, 1.0], abs=0.06)


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_ranks_differ_in_speed_as_it_says(name):
    block = {**TASKS[name]._asdict(), "seed": 3, "remedy": dataclasses.asdict(Remedy())}
    times = times_of(block)
    assert times.shape == (block["steps"], block["ranks"])
    assert np.array_equal(times, times_of(block))
    gain = synchronous_seconds(times) / replay(times, "solo").seconds
    data = name.removesuffix(f"-{TASKS[name].optimizer}")
    assert gain == pytest.approx({"digits": 1.01, "digits-late": 1.57, "clips4": 1.53, "clips8": 1.8}[data], abs=0.1)
