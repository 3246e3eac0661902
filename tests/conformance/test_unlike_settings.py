"""Hyperparameters that differ between ranks: rank 0 names the first, once, whichever family and framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hvd_async.runtime.coordinator
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.weight_ranks import KerasRank, Rank, TorchRank

WRAPPERS: dict[str, dict[str, Any]] = {
    "EagerOptimizer": {"quorum": "solo"},
    "GossipOptimizer": {"algorithm": "dpsgd"},
    "LeaderOptimizer": {"algorithm": "easgd", "global_period": 2},
}
CASE = Case("sgd", "sgd", 0.5)


def alike(one: Rank, first: float = 0.5, steps: int = 3) -> None:
    for step in range(steps):
        one.set_rate(first * 0.5**step)
        one.train(1)


def another_at_the_start(one: Rank) -> None:
    alike(one, 0.25 if one.rank else 0.5)


def a_schedule_on_one_rank(one: Rank) -> None:
    one.train(1).opt.drain()
    one.set_rate(0.25 if one.rank else 0.5)
    one.train(1)


def frozen_on_one_rank(one: Rank) -> None:
    one.train(1).freeze(0, bool(one.rank))
    one.train(1)


def by_step_with_uneven_data(one: Rank) -> None:
    alike(one, steps=3 + one.rank)


RATE = "{} of parameter group 0 is {} on rank 0 and {} on rank 1"
CASES: list[tuple[Any, Callable[[Rank], None], tuple[str, Any, Any] | None]] = [
    (TorchRank, alike, None),
    (TorchRank, another_at_the_start, ("lr", 0.5, 0.25)),
    (TorchRank, a_schedule_on_one_rank, ("lr", 0.5, 0.25)),
    (TorchRank, frozen_on_one_rank, ("frozen parameters", [], [0])),
    (TorchRank, by_step_with_uneven_data, None),
    (KerasRank, alike, None),
    (KerasRank, a_schedule_on_one_rank, ("learning_rate", 0.5, 0.25)),
    (KerasRank, frozen_on_one_rank, ("frozen", [], [0])),
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("binding", "train", "found"), CASES)
def test_settings_that_differ_between_ranks_are_reported_once(binding, train, found, wrapper, monkeypatch):
    def work(rank: int) -> None:
        one = binding(binding.least_squares(2, CASE), rank, wrapper=wrapper, **WRAPPERS[wrapper])
        train(one)
        one.opt.drain()

    said: list[str] = []
    monkeypatch.setattr(hvd_async.runtime.coordinator, "warn", said.append)
    Cluster(2).run(work)
    texts = [text for text in said if "ranks have different settings: " in text]
    assert len(texts) == (found is not None)
    assert all(RATE.format(*found) in text for text in texts if found)
