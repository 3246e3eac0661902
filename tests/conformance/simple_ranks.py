"""One rank of any optimizer in either binding: two weights, whose gradient pulls them to the rank's own point."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from hvd_async.algorithms.gossip.config import ALGORITHMS as GOSSIP
from tests.conformance.reference import Array

ALGORITHMS: list[tuple[str, dict[str, Any]]] = [
    *(("GossipOptimizer", {"algorithm": name}) for name in GOSSIP),
    ("LeaderOptimizer", {"algorithm": "lsgd", "group": 1}),
    ("LeaderOptimizer", {"algorithm": "easgd"}),
    ("EagerOptimizer", {"quorum": "solo"}),
    ("EagerOptimizer", {"quorum": "all"}),
]
every_algorithm = pytest.mark.parametrize(
    ("wrapper", "options"), ALGORITHMS, ids=["-".join(map(str, options.values())) for _, options in ALGORITHMS]
)


class TorchRank:
    """A rank in torch; ``opt`` is its optimizer."""

    def __init__(self, wrapper: str, options: dict[str, Any], rank: int = 0) -> None:
        self.target, self.leads = float(rank), wrapper == "LeaderOptimizer"
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.opt: Any = getattr(hvd_torch, wrapper)(torch.optim.SGD([self.parameter], lr=0.01), **options)

    def step(self) -> None:
        """Take one."""
        if self.leads:
            self.opt.record_loss(1.0)
        self.opt.zero_grad()
        (self.parameter - self.target).pow(2).sum().backward()
        self.opt.step()

    def weights(self) -> Array:
        """Return those of the model."""
        return self.parameter.detach().numpy().copy()


class KerasRank:
    """A rank in Keras.

    Args:
        graph: whether a step is a ``tf.function``.
    """

    def __init__(self, wrapper: str, options: dict[str, Any], rank: int = 0, graph: bool = False) -> None:
        self.target, self.leads = float(rank), wrapper == "LeaderOptimizer"
        self.variable = keras.Variable(np.ones(2, np.float32))
        self.opt: Any = getattr(hvd_keras, wrapper)(keras.optimizers.SGD(0.01), **options)
        self.opt.build([self.variable])
        self.step = tf.function(self._step) if graph else self._step

    def _step(self) -> None:
        if self.leads:
            self.opt.record_loss(1.0)
        self.opt.apply([2.0 * (tf.convert_to_tensor(self.variable) - self.target)], [self.variable])

    def weights(self) -> Array:
        """Return those of the model."""
        return np.asarray(self.variable).copy()


both = pytest.mark.parametrize("made", [TorchRank, KerasRank], ids=["torch", "keras"])
