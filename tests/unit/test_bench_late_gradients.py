"""The simulation behind ``bench.py late_gradients``: what each remedy does about late gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_async.simulation.schedule import gradients_of, play, replay, synchronous_seconds
from scripts.benchmarks.jobs.late_gradients import SMOOTHING, Learning, train
from scripts.benchmarks.support.remedies import REMEDIES, TASKS, times_of

MOMENTUM, DECAY, SIZE = 0.9, 0.01, 7


def quadratic(ranks, steps):
    """A model of one vector and of one matrix, and batches on which each loss is a quadratic one."""
    random = np.random.default_rng(5)
    matrices, targets = 0.3 * random.standard_normal((ranks, steps, 5, SIZE)), random.standard_normal((ranks, steps, 5))
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.b = torch.nn.Parameter(torch.full((2, 2), 0.5, dtype=torch.float64))

    def loss(rank, step):
        weights = torch.cat([model.a, model.b.reshape(-1)])
        wrong = torch.from_numpy(matrices[rank, step]) @ weights - torch.from_numpy(targets[rank, step])
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
    gradients = gradients_of(play(1.0 + 2.0 * np.random.default_rng(1).random((steps, ranks)), remedy.quorum))
    assert arm == "synchronous" or {each.staleness for each in gradients} >= {0, 1}
    train(Learning(model, loss, rate, MOMENTUM, DECAY), gradients, ranks, remedy)
    assert weights_of(model) == pytest.approx(reference(gradient, start, gradients, ranks, remedy), rel=1e-10)


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_ranks_differ_in_speed_as_it_says(name):
    block = {**TASKS[name]._asdict(), "seed": 3, "remedy": {}}
    times = times_of(block)
    assert times.shape == (block["steps"], block["ranks"])
    gain = synchronous_seconds(times) / replay(times, "solo").seconds
    data = name.removesuffix(f"-{TASKS[name].optimizer}")
    assert gain == pytest.approx({"digits": 1.01, "digits-late": 1.57, "clips4": 1.53, "clips8": 1.8}[data], abs=0.1)
