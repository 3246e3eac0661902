"""Budgets for what one step costs the host in each mode: counts, compared with the plain optimizer on the same model.

The model has as many parameters as ResNet-50, in six buckets, and computes next to nothing. Counts are the same on
every machine with Python 3.11 and torch 2.13. ``python -m tests.conformance.host_counts MODE`` prints them, and
``python -m tests.conformance.keras_host_counts MODE`` prints those of Keras.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from tests.conformance import keras_host_counts
from tests.conformance.fake_gpu import FakeGpu
from tests.conformance.host_counts import Calls, Operators, highest, mean_counts, measure, plain
from tests.conftest import LONG_RUN


class Budget(NamedTuple):
    """The most that a step may cost, on average over ``STEPS`` steps, on the rank where it costs most.

    Attributes:
        aten: number of operators over plain, views not counted.
        calls: number of calls of Python and C functions by the training thread, over plain.
        waits: number of times the training thread would wait for a device if the tensors were on one. (On CPUs each
            bucket is checked for NaN before it leaves.)
        copies: number of copies of all gradients or weights.
        messages: number of messages to the coordinator, with an engine so fast that each bucket has its own message.
        wakes: number of times the engine wakes up, under the same condition.
    """

    aten: float
    calls: float
    waits: float
    copies: float
    messages: float
    wakes: float


BUDGETS = {
    ("all", 1): Budget(18, 920, 6, 1.1, 7, 20),
    ("all", 2): Budget(24, 925, 6, 1.1, 7, 19),
    ("solo", 1): Budget(18, 920, 6, 1.1, 7, 20),
    ("solo", 2): Budget(29, 985, 6, 2.1, 7, 20),
    ("majority", 2): Budget(29, 975, 6, 2.1, 7, 20),
    ("sgp", 1): Budget(4, 310, 1, 2, 0, 0),
    ("sgp", 2): Budget(6, 460, 1, 2, 3, 6),
    ("dpsgd", 1): Budget(4, 310, 1, 2, 0, 0),
    ("dpsgd", 2): Budget(6, 430, 1, 2, 3, 6),
    ("adpsgd", 1): Budget(7, 300, 1, 2, 0, 1),
    ("adpsgd", 2): Budget(7, 340, 1, 2, 2, 3),  # (from 303 calls: how many vectors the engine holds depends on time)
    ("local", 1): Budget(6, 280, 1, 2.5, 1, 1),
    ("local", 2): Budget(6, 300, 1, 2.5, 1, 1),
    ("lsgd", 1): Budget(5, 390, 2, 2, 2, 2),
    ("lsgd", 2): Budget(9, 570, 3, 2, 2, 2),
    ("easgd", 1): Budget(6, 370, 2, 2, 2, 2),
    ("easgd", 2): Budget(6, 380, 2, 2, 2, 2),
}
"""Budgets by mode and number of ranks."""
ON_GPU = {
    "all": (33, 1150),
    "solo": (38, 1190),
    "sgp": (12, 518),
    "adpsgd": (8, 348),
    "lsgd": (11, 600),
    "easgd": (8, 430),
}
"""Operators and calls over plain where the tensors are on a fake GPU, with two ranks."""
ENGINES = 0.25
"""Tolerance for messages and wake-ups: a rank's engine also works while another rank trains, so some of its messages
may fall before or after the steps that are counted."""


measured = functools.cache(measure)


@pytest.fixture(scope="module")
def base():
    return plain().host


@pytest.mark.parametrize(("mode", "ranks"), BUDGETS)
def test_a_step_stays_within_its_budget(base, mode, ranks):
    host, messages, wakes = highest(measured(mode, ranks))
    budget = BUDGETS[mode, ranks]
    calls = host.python_calls + host.c_calls - base.python_calls - base.c_calls
    found = (host.aten_calls - base.aten_calls, calls, host.host_waits, host.copies, messages, wakes)
    limits = (*budget[:4], budget.messages + ENGINES, budget.wakes + ENGINES)
    over = [
        f"{name}: {value:.2f}, budget {limit:g}"
        for name, value, limit in zip(Budget._fields, found, limits, strict=False)
        if value > limit
    ]
    assert not over, "; ".join(over)


@pytest.mark.parametrize("mode", ON_GPU)
def test_a_step_on_a_gpu_stays_within_its_budget(base, mode):
    with FakeGpu().installed():
        host, *_ = highest(measure(mode, 2))
    calls = host.python_calls + host.c_calls - base.python_calls - base.c_calls
    operators, most_calls = ON_GPU[mode]
    assert host.aten_calls - base.aten_calls <= operators
    assert calls <= most_calls


def test_counts_are_the_same_each_time():
    assert highest(measure("solo", 2))[0] == highest(measured("solo", 2))[0]


def test_what_is_counted():
    weights = torch.ones(2576)

    def step():
        weights.view(-1).add_(1)
        weights.clone()
        torch._foreach_copy_([weights[:1288]], [weights[1288:]])
        [bool(weights[0] > 1), weights.tolist(), torch.equal(weights, weights)]

    with (operators := Operators()):
        step()
    (calls := Calls()).measure(step)
    counts = mean_counts([(operators, calls)])
    assert operators.calls == {"aten::add_": 1, "aten::clone": 1, "aten::_foreach_copy_": 1, "aten::gt": 1} | {
        "aten::_local_scalar_dense": 1, "aten::equal": 1
    }  # fmt: skip
    assert (counts.host_waits, counts.copies, counts.python_calls) == (3, 3, 1)
    assert calls.c.keys() >= {"view", "add_", "clone", "_foreach_copy_", "tolist"}
    assert calls.c["setprofile"] == 0


class KerasBudget(NamedTuple):
    """The most that a training step of Keras may have in its graph, which has 40 variables in five buckets.

    Attributes:
        operators: number over plain Keras' 962, those of functions in the graph included. Tracing time grows with it.
        crossings: number of calls from the graph into Python.
    """

    operators: int
    crossings: int


KERAS_BUDGETS = {
    ("all", 2): KerasBudget(309, 6),
    ("solo", 1): KerasBudget(309, 6),
    ("solo", 2): KerasBudget(749, 6),
    ("majority", 2): KerasBudget(749, 6),
    ("sgp", 2): KerasBudget(812, 2),
    ("dpsgd", 2): KerasBudget(812, 2),
    ("adpsgd", 2): KerasBudget(812, 2),
    ("local", 2): KerasBudget(812, 2),
    ("lsgd", 2): KerasBudget(344, 3),
    ("easgd", 2): KerasBudget(344, 3),
}
"""Budgets by mode and number of ranks, with TensorFlow 2.21 and Keras 3."""
KERAS_FEW = [("solo", 2), ("sgp", 2), ("lsgd", 2)]
"""One of each kind of step, for an ordinary run: tracing takes long."""


@pytest.fixture(scope="module")
def keras_base():
    return keras_host_counts.plain()


@pytest.mark.parametrize(("mode", "ranks"), KERAS_BUDGETS if LONG_RUN else KERAS_FEW)
def test_a_keras_step_stays_within_its_budget(keras_base, mode, ranks):
    budget, cost = KERAS_BUDGETS[mode, ranks], keras_host_counts.measure(mode, ranks)
    assert cost.operators.total() - keras_base.operators.total() <= budget.operators
    assert cost.py_functions <= budget.crossings
    assert cost.crossings <= budget.crossings
