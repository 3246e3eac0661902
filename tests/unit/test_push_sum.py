"""Push-sum's and AD-PSGD's equations, by hand and by the sums that they keep; the table of algorithms."""

from __future__ import annotations

import ast
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms import registry
from hvd_async.algorithms.gossip import adpsgd, push_sum
from hvd_async.algorithms.gossip.push_sum import Message, Sent, State

FLOATS = st.floats(-1e3, 1e3)
WEIGHTS = st.floats(0.05, 4.0)
PARTS = st.floats(0.0, 0.95)


def add(x: float, y: float, a: float) -> float:
    return x + a * y


def add_in_place(x: np.ndarray, y: np.ndarray, a: float) -> np.ndarray:
    """As NumPy's message format does."""
    x += y * a
    return x


def test_a_step_by_hand():
    state = push_sum.without(State(8.0, 1.0), Sent(Message(8.0, 1.0), 0.25), add)
    assert state == State(6.0, 0.75)
    state = push_sum.receive(state, [(Message(4.0, 0.5), 0.5), (Message(2.0, 2.0), 0.25)], add)
    assert state == State(6.0 + 2.0 + 0.5, 0.75 + 0.25 + 0.5)
    assert push_sum.model(state) == pytest.approx(8.5 / 1.5)
    assert push_sum.biased(3.0, 0.5) == State(1.5, 0.5)
    assert push_sum.divided(State(3.0, 1.5), 3) == State(1.0, 0.5)


@given(FLOATS, WEIGHTS, FLOATS, WEIGHTS, PARTS)
def test_a_share_that_is_sent_and_received_changes_no_sum(x, w, other_x, other_w, p):
    message = Message(x, w)
    one = push_sum.without(State(x, w), Sent(message, p), add)
    other = push_sum.receive(State(other_x, other_w), [(message, p)], add)
    assert one.x + other.x == pytest.approx(x + other_x, rel=1e-12, abs=1e-9)
    assert one.w + other.w == pytest.approx(w + other_w)


@given(FLOATS, WEIGHTS, FLOATS, PARTS)
def test_a_message_made_earlier_takes_away_what_it_carries(x, w, earlier, p):
    after = push_sum.without(State(x, w), Sent(Message(earlier, 1.0), p), add)
    assert after == State(pytest.approx(x - p * earlier), pytest.approx(w - p))


def test_a_message_that_waits_to_be_sent_does_not_change():
    x = np.array([1.0, 2.0])
    after = push_sum.without(State(x, 1.0), Sent(Message(x, 1.0), 0.5), add_in_place)
    assert (x.tolist(), after.x.tolist(), after.w) == ([1.0, 2.0], [0.5, 1.0], 0.5)


def test_a_rank_that_receives_less_than_it_sends_keeps_a_low_weight():
    assert push_sum.may_send(0.1, gets_less=False)
    assert push_sum.may_send(0.75, gets_less=True)
    assert not push_sum.may_send(0.74, gets_less=True)
    assert not push_sum.may_send(1.49, gets_less=True, ranks=2)


@given(FLOATS, FLOATS, FLOATS, FLOATS)
def test_a_pair_that_is_averaged_keeps_its_sum_and_the_ranks_changes_since(one, other, moved, step):
    first, second = adpsgd.State(one + moved, one), adpsgd.State(other, other)
    first = adpsgd.on_average(first, one, other, add)
    second = adpsgd.on_average(second, other, one, add)
    assert second.shadow == pytest.approx((one + other) / 2, abs=1e-9)
    assert first.shadow == pytest.approx((one + other) / 2 + moved, abs=1e-9)
    after = adpsgd.on_step(first, one + step, add)  # the model had ``one``, and its optimizer added ``step``
    assert after.shadow == pytest.approx(first.shadow + step, abs=1e-9)
    assert after.model == after.shadow


# -- the table of algorithms ----------------------------------------------------------------------------------


def test_each_algorithm_is_of_a_family():
    families = {family.name for family in registry.FAMILIES}
    assert {algorithm.family for algorithm in registry.ALGORITHMS.values()} == families
    assert all(name == algorithm.name for name, algorithm in registry.ALGORITHMS.items())


def test_no_algorithm_is_told_by_its_name():
    """Tables and rules answer: no source of the algorithms compares with a name."""
    folder = pathlib.Path(registry.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not constants & registry.ALGORITHMS.keys(), f"{path.name}, line {node.lineno}"
