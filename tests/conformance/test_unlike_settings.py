"""Hyperparameters that differ between ranks: rank 0 names the first, once, whichever family and framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
import torch

import hvd_async.runtime.coordinator
import hvd_async.tensorflow.keras as keras_hvd
import hvd_async.torch as torch_hvd
from hvd_async.testing import Cluster

WRAPPERS: dict[str, dict[str, Any]] = {
    "EagerOptimizer": {"quorum": "solo"},
    "GossipOptimizer": {"algorithm": "dpsgd"},
    "LeaderOptimizer": {"algorithm": "easgd", "global_period": 2},
}
STEPS = 3


class TorchTraining:
    """A rank in torch.

    Args:
        wrapper: name of the wrapper.
        rate: the learning rate at the start.
    """

    def __init__(self, wrapper: str, rate: float) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.plain = torch.optim.SGD(self.parameters, lr=rate)
        self.opt = getattr(torch_hvd, wrapper)(self.plain, **WRAPPERS[wrapper])

    def step(self) -> None:
        self.opt.zero_grad()
        torch.stack([p for p in self.parameters if p.requires_grad]).sum().backward()
        self.opt.step()

    def lower_rate(self) -> None:
        self.opt.param_groups[0]["lr"] *= 0.5

    def freeze(self) -> None:
        self.parameters[0].requires_grad_(False)


class KerasTraining:
    """The same in Keras, where every rank has all weights."""

    def __init__(self, wrapper: str, rate: float) -> None:
        self.variable = keras.Variable(tf.ones(2))
        self.opt = getattr(keras_hvd, wrapper)(keras.optimizers.SGD(rate), **WRAPPERS[wrapper])
        self.opt.build([self.variable])

    def step(self) -> None:
        self.opt.apply([tf.ones(2)], [self.variable])

    def lower_rate(self) -> None:
        self.opt.learning_rate = float(self.opt.learning_rate) * 0.5

    def freeze(self) -> None:
        self.variable.trainable = False


def alike(one: Any, rank: int) -> None:
    for _ in range(STEPS):
        one.step()
        one.lower_rate()
    one.opt.drain()


def another_at_the_start(one: Any, rank: int) -> None:
    alike(one, rank)


def a_schedule_on_one_rank(one: Any, rank: int) -> None:
    for _ in range(2):
        one.step()
        if rank:
            one.lower_rate()
        one.opt.drain()


def frozen_on_one_rank(one: Any, rank: int) -> None:
    one.step()
    if rank:
        one.freeze()
    one.step()
    one.opt.drain()


def by_step_with_uneven_data(one: Any, rank: int) -> None:
    for _ in range(STEPS + rank):
        one.step()
        one.lower_rate()
    one.opt.drain()


RATE = "{} of parameter group 0 is {} on rank 0 and {} on rank 1"
CASES: list[tuple[Any, Callable[[Any, int], None], tuple[str, Any, Any] | None]] = [
    (TorchTraining, alike, None),
    (TorchTraining, another_at_the_start, ("lr", 1.0, 0.5)),
    (TorchTraining, a_schedule_on_one_rank, ("lr", 1.0, 0.5)),
    (TorchTraining, frozen_on_one_rank, ("frozen parameters", [], [0])),
    (TorchTraining, by_step_with_uneven_data, None),
    (KerasTraining, alike, None),
    (KerasTraining, a_schedule_on_one_rank, ("learning_rate", 1.0, 0.5)),
    (KerasTraining, frozen_on_one_rank, ("frozen", [], [0])),
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("made", "train", "found"), CASES)
def test_settings_that_differ_between_ranks_are_reported_once(made, train, found, wrapper, monkeypatch):
    def work(rank: int) -> None:
        train(made(wrapper, 0.5 if rank and train is another_at_the_start else 1.0), rank)

    said: list[str] = []
    monkeypatch.setattr(hvd_async.runtime.coordinator, "warn", said.append)
    Cluster(2).run(work)
    texts = [text for text in said if "ranks have different settings: " in text]
    assert len(texts) == (found is not None)
    assert all(RATE.format(*found) in text for text in texts if found)
