"""Momentum and decay move nothing of a bucket in which a round carried no gradient, in either binding."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import torch

from hvd_async.testing import Cluster
from tests.conformance.eager_ranks import KERAS, KERAS_GRAPH, NAN, TINY, TORCH

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
EMPTY = [(), (0,), (1,), (0, 1), ()]
"""For each step, the buckets that are empty on all ranks. In the last one a bucket is empty on one rank only."""


@pytest.mark.parametrize(
    ("binding", "make", "synchronized"),
    [
        pytest.param(TORCH, lambda ps: torch.optim.SGD(ps, foreach=False, **SGD), False, id="torch-sgd"),
        pytest.param(TORCH, lambda ps: torch.optim.SGD(ps, foreach=True, **SGD), False, id="torch-foreach"),
        pytest.param(TORCH, lambda ps: torch.optim.SGD(ps, foreach=True, **SGD), True, id="torch-synchronize"),
        pytest.param(TORCH, lambda ps: torch.optim.SGD(ps, fused=True, **SGD), False, id="torch-fused"),
        pytest.param(TORCH, lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True), False, id="torch-adamw"),
        pytest.param(TORCH, lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True), False, id="torch-fused-adam"),
        pytest.param(KERAS, lambda _: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1), False, id="keras-sgd"),
        pytest.param(
            KERAS_GRAPH, lambda _: keras.optimizers.AdamW(0.1, weight_decay=0.1), False, id="keras-graph-adamw"
        ),
    ],
)
def test_an_empty_bucket_is_not_moved(binding, make, synchronized, monkeypatch):
    monkeypatch.setenv("HVD_ASYNC_AGREE", "0")  # (where ranks announce steps, the device alone empties buckets)

    def train(rank: int) -> list[Any]:
        one = binding.vectors([2, 2], make, start=1.0, quorum="all", bucket_cap_mb=TINY)
        seen = []
        for step, empty in enumerate(EMPTY):
            bad = {*empty, *([0] if rank == 1 and step + 1 == len(EMPTY) else [])}
            gradients = [[1.0, NAN if index in bad else 1.0 + rank] for index in range(2)]
            if synchronized:
                one.backward([gradients])
                one.opt.synchronize()
                with one.opt.skip_synchronize():
                    one.opt.step()
            else:
                one.take(*gradients)
            seen.append(one.state())
        one.opt.drain()
        assert one.state() == seen[-1]
        return seen

    first, other = Cluster(2).run(train)
    assert first == other
    for step in range(1, len(EMPTY)):
        moved = [first[step][index] != first[step - 1][index] for index in range(2)]
        assert moved == [index not in EMPTY[step] for index in range(2)], step
