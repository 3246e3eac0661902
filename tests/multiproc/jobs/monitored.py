"""Partial allreduce with a monitor that is attached; one rank is slow."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import torch
from common import Report, begin_last
from torch_common import Batches, mlp

import hvd_async.torch as hvd

SLOW, STEPS, SECONDS = 2, 70, 0.02
"""The slow rank; steps; seconds that it computes longer in each."""


def main() -> None:
    """Train, and read what the monitor serves."""
    hvd.init()
    report, batches, model = Report(hvd.rank()), Batches(hvd.rank()), mlp(seed=1)
    files = Path(os.environ["HVD_ASYNC_TEST_OUT"])
    optimizer = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), quorum="all")
    monitor = hvd.attach_monitor(
        optimizer, every=5, window=10, tensorboard=files / "events", prometheus=files / "keep.m.prom",
        prometheus_port=0, all_ranks=True,
    )  # fmt: skip
    for step in range(STEPS):
        batches.backward(model)
        begin_last(str(step), hvd.rank(), hvd.size(), SLOW, SECONDS)
        optimizer.step()
    optimizer.drain()
    monitor.sample()
    with urllib.request.urlopen(f"http://127.0.0.1:{monitor.port}/metrics", timeout=10) as answer:
        served = answer.read().decode()
    monitor.close()
    events = sorted(str(path.relative_to(files)) for path in files.glob("events/**/events.out.tfevents.*"))
    report.put("eager", served=served, events=events, held=list(optimizer.stats().held_s))
    hvd.shutdown()


if __name__ == "__main__":
    main()
