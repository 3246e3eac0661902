"""``optimizer.rounds``: it grows with the steps of every algorithm, so that a loop until so many rounds ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from hvd_async.algorithms.gossip.options import ALGORITHMS as GOSSIP
from hvd_async.testing import Cluster

ROUNDS = 6
STEPS = 400
"""More than any algorithm needs."""
ALGORITHMS = [
    *(("GossipOptimizer", {"algorithm": name}) for name in GOSSIP),
    ("GossipOptimizer", {"algorithm": "sgp", "gossip_every": 3, "average_every": 4}),
    ("LeaderOptimizer", {"algorithm": "lsgd", "group": 1}),
    ("LeaderOptimizer", {"algorithm": "easgd"}),
    ("EagerOptimizer", {"quorum": "solo"}),
    ("EagerOptimizer", {"quorum": "all"}),
]
every_algorithm = pytest.mark.parametrize(
    ("wrapper", "options"), ALGORITHMS, ids=["-".join(map(str, options.values())) for _, options in ALGORITHMS]
)


def torch_rank(wrapper: str, options: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """An optimizer, and its step."""
    parameter = torch.nn.Parameter(torch.ones(2))
    opt = getattr(hvd_torch, wrapper)(torch.optim.SGD([parameter], lr=0.01), **options)

    def step() -> None:
        if wrapper == "LeaderOptimizer":
            opt.record_loss(1.0)
        parameter.grad = parameter.detach().clone()
        opt.step()

    return opt, step


def keras_rank(wrapper: str, options: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """The same in Keras."""
    variable = keras.Variable(np.ones(2, np.float32))
    opt = getattr(hvd_keras, wrapper)(keras.optimizers.SGD(0.01), **options)
    opt.build([variable])

    def step() -> None:
        if wrapper == "LeaderOptimizer":
            opt.record_loss(1.0)
        opt.apply([tf.convert_to_tensor(variable)], [variable])

    return opt, step


both = pytest.mark.parametrize("made", [torch_rank, keras_rank], ids=["torch", "keras"])


@both
@every_algorithm
@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_until_so_many_rounds_ends(made, size, wrapper, options):
    def work(rank: int) -> tuple[int, int]:
        opt, step = made(wrapper, options)
        steps = 0
        while opt.rounds < ROUNDS and steps < STEPS:
            before = opt.rounds
            step()
            steps += 1
            assert opt.rounds >= before
        opt.drain()
        return steps, opt.rounds

    for steps, rounds in Cluster(size).run(work):
        assert steps < STEPS
        assert rounds >= ROUNDS


@both
@every_algorithm
def test_a_rank_that_is_left_alone_gets_to_its_rounds(made, wrapper, options):
    """The other rank has run out of data after two steps."""

    def work(rank: int) -> int:
        opt, step = made(wrapper, options)
        steps = 0
        while steps < (2 if rank else STEPS) and opt.rounds < 2 * ROUNDS:
            step()
            steps += 1
        opt.drain()
        return steps

    steps = Cluster(2).run(work)[0]
    assert steps < STEPS


@both
@pytest.mark.parametrize("algorithm", ["local", "sgp"])
def test_averages_of_drains_are_rounds(made, algorithm):
    """With a drain before each average is due, a loop until so many rounds ends as well."""

    def work(rank: int) -> int:
        opt, step = made("GossipOptimizer", {"algorithm": algorithm, "average_every": 8})
        for _ in range(3):
            before = opt.rounds
            step()
            opt.drain()
            assert opt.rounds > before
        before = opt.rounds
        opt.drain()  # nothing has moved: nothing is averaged
        assert opt.rounds == before
        return int(opt.rounds)

    counts = Cluster(2).run(work)
    assert counts[0] == counts[1] >= 3


def test_rounds_go_on_after_a_checkpoint():
    def work(rank: int) -> None:
        opt, step = torch_rank("GossipOptimizer", {"algorithm": "local", "average_every": 2})
        for _ in range(5):
            step()
        opt.drain()
        state, rounds = opt.state_dict(), opt.rounds
        resumed, step = torch_rank("GossipOptimizer", {"algorithm": "local", "average_every": 2})
        resumed.load_state_dict(state)
        assert resumed.rounds == rounds > 0
        for _ in range(2):
            step()
        resumed.drain()
        assert resumed.rounds > rounds

    Cluster(2).run(work)
