"""Memory that vectors share with parameters, variables and gradients: what a user has read or kept does not change."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.eager_ranks import UNIT
from tests.conformance.torch_ranks import TINY, TorchVectors

ALIGNED = 32
"""Elements of a variable that kernels take as it lies in memory."""


@pytest.mark.parametrize(
    ("algorithm", "graph"), [("sgp", True), ("osgp", False), ("dpsgd", False), ("adpsgd", False), ("local", False)]
)
def test_weights_that_a_user_has_read_do_not_change_in_later_steps(algorithm, graph):
    """A tensor read from a variable is a value, any rank that has the memory."""

    def train(rank: int) -> list[list[float]]:
        weight = keras.Variable(np.zeros(ALIGNED, np.float32))
        opt = hvd.GossipOptimizer(keras.optimizers.SGD(1.0), algorithm=algorithm)
        opt.build([weight])
        step = tf.function(lambda g: opt.apply([g], [weight])) if graph else lambda g: opt.apply([g], [weight])
        seen, kept = [], []
        for number in range(12):
            step(tf.fill([ALIGNED], 1.0 + rank + number))
            seen.append(weight.value.read_value())
            kept.append(weight.numpy().tolist())
        opt.drain()
        return [one.numpy().tolist() for one in seen] == kept

    assert Cluster(2).run(train) == [True, True]


@pytest.mark.parametrize("quorum", ["solo", "all"])
def test_gradients_that_a_user_keeps_do_not_change_in_later_steps(quorum):
    """Those of rounds, from a ``round_transform``, and the rank's own, views among them."""

    def train(rank: int) -> bool:
        kept: list[tuple[torch.Tensor, list[float]]] = []

        def keep(parameters: list[torch.nn.Parameter]) -> None:
            for gradient in (parameter.grad for parameter in parameters):
                assert gradient is not None
                kept.extend((one, one.tolist()) for one in (gradient, gradient[2:5]))

        one = TorchVectors([64, 48], UNIT, quorum=quorum, bucket_cap_mb=TINY, round_transform=keep)
        for number in range(8):
            one.take(torch.arange(64.0) + number + rank, torch.ones(48) * number)
            keep(one.parameters)
        one.opt.drain()
        return len(kept) >= 32 and all(tensor.tolist() == values for tensor, values in kept)

    assert Cluster(2).run(train) == [True, True]
