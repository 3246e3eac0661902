"""Training losses that are recorded: which kinds, and what a rank is told that records none."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_async.testing import Cluster
from tests.conformance.leader_cases import PAIRS
from tests.conformance.leader_drive import TIMEOUT
from tests.conformance.leader_ranks import SGD, WITH_GRAPH, KerasRank, TorchRank
from tests.conformance.leader_reference import drawn, several

SILENT = dataclasses.replace(PAIRS, groups=((0,),), loss_window=4, told=lambda *_: None)
NONE_TOLD = r"this rank has recorded none: call opt.record_loss\(loss\) before each"


def of_torch() -> list[object]:
    return [1, 0.5, np.float32(3.0), torch.tensor([[4.0]]), torch.tensor(2.5, requires_grad=True) * 2]


def of_keras() -> list[object]:
    return [1, 0.5, np.float32(3.0), tf.constant([[4.0]]), tf.Variable(2.5) * 2.0, tf.constant([3.0], tf.float64)]


@pytest.mark.parametrize(
    ("binding", "losses", "mean"),
    [(TorchRank, of_torch, 12.5 / 4), (KerasRank, of_keras, 15.0 / 4)],
    ids=["torch", "keras"],
)
def test_what_a_loss_may_be(binding, losses, mean):
    """A number or a tensor of one; several since the last step all count, if they are among the last four."""

    def train(rank: int) -> None:
        one = binding(binding.least_squares(1, SGD), rank, SILENT)
        for shape in ((2,), (1, 2), (0,)):
            with pytest.raises(ValueError, match="takes one number, and this is a tensor of shape"):
                one.opt.record_loss(torch.ones(shape) if binding is TorchRank else tf.ones(shape))
        for loss in losses():
            one.opt.record_loss(loss)
        one.step()
        assert one.opt.stats().mean_loss == mean
        one.take(np.zeros(6), 7.0)
        assert one.opt.stats().mean_loss == mean + (7.0 - (3.0 if binding is KerasRank else 0.5)) / 4

    Cluster(1).run(train)


@WITH_GRAPH
def test_a_rank_that_tells_no_loss_hears_so_at_the_first_pull_and_cannot_end(binding):
    """Before any weight has changed; once losses are told, all goes on."""
    together = threading.Barrier(2)

    def train(rank: int) -> bytes:
        tells = [rank == 0]
        following = dataclasses.replace(
            PAIRS, groups=several(2, 2), told=lambda *step: drawn(*step) if tells[0] else None
        )
        one = binding(binding.least_squares(2, SGD), rank, following)
        one.worker()
        if rank == 1:
            with pytest.raises(binding.raised(ValueError), match=NONE_TOLD):
                one.train(10_000)
            assert one.weights().tobytes() == one.path[-1].tobytes()
            for end in (one.opt.drain, one.opt.cut, one.opt.consensus_distance):
                with pytest.raises(ValueError, match=NONE_TOLD):
                    end()
            assert one.weights().tobytes() == one.path[-1].tobytes()
        else:
            one.train(8)
        together.wait(TIMEOUT)
        tells[0] = True
        one.train(3).opt.drain()
        return one.bits()

    assert len(set(Cluster(2).run(train, timeout=40))) == 1
