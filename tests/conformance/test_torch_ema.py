"""torch: a moving average of the weights, updated once a round, is the same on all ranks."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.torch_ranks import batch, conv_model, flat


def test_a_moving_average_by_step_hook_is_the_same_on_all_ranks():
    late = threading.Event()

    def train(rank: int) -> Any:
        model = conv_model()
        opt = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        opt.register_step_post_hook(lambda *_: average.update_parameters(model))
        opt._async.worker_now()
        if rank == 2:
            assert late.wait(60)
        for step in range(6):
            opt.zero_grad()
            images, labels = batch(rank, step)
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            opt.step()
            if rank == 0 and step == 3:
                late.set()
        opt.drain()
        assert int(average.n_averaged) == opt.stats().rounds_applied
        return flat(average.parameters()), flat(model.parameters())

    ends = Cluster(3, jitter=0.001).run(train)
    for average, weights in ends:
        assert average.tobytes() == ends[0][0].tobytes()
        assert average.tobytes() != weights.tobytes()
