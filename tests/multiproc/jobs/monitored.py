"""Training with a monitor: one rank is slow; partial allreduce, then gossip."""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path

import torch
from common import Baton, Report
from torch_common import Batches, mlp

import hvd_async.torch as hvd

SLOW, STEPS, SECONDS = 2, 70, 0.02
"""The slow rank; steps of a phase; seconds that it computes longer in each."""


def train(name, optimizer, model, batches, after=lambda: None) -> None:
    """Take STEPS steps; the slow rank computes on for a while when the others have come to their step."""
    for step in range(STEPS):
        batches.backward(model)
        ready = [Baton(f"{name}.{step}.{rank}") for rank in range(hvd.size())]
        ready[hvd.rank()].lay()
        if hvd.rank() == SLOW:
            for other in ready:
                other.wait()
            time.sleep(SECONDS)
        optimizer.step()
        after()
    optimizer.drain()


def main() -> None:
    """Watch partial allreduce by a hook and over HTTP, then gossip by calls, whose reports are compared."""
    hvd.init()
    report, batches = Report(hvd.rank()), Batches(hvd.rank())
    files = Path(os.environ["HVD_ASYNC_TEST_OUT"])
    model = mlp(seed=1)
    optimizer = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), quorum="all")
    monitor = hvd.attach_monitor(
        optimizer, every=5, window=10, tensorboard=files / "events", prometheus=files / "keep.m.prom",
        prometheus_port=0, all_ranks=True,
    )  # fmt: skip
    began = time.perf_counter()
    train("eager", optimizer, model, batches)
    seconds = time.perf_counter() - began
    monitor.sample()
    served = None
    if hvd.rank() == 0:
        with urllib.request.urlopen(f"http://127.0.0.1:{monitor.port}/metrics", timeout=10) as answer:
            served = answer.read().decode()
    held = list(optimizer.stats().held_s)
    monitor.close()
    events = sorted(str(path.relative_to(files)) for path in files.glob("events/**/events.out.tfevents.*"))
    report.put("eager", served=served, events=events, held=held, seconds=seconds, steps=optimizer.stats().steps)

    model = mlp(seed=1)
    gossip = hvd.GossipOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), algorithm="dpsgd", topology="ring"
    )
    with hvd.Monitor(gossip, every=10) as monitor:
        for phase in range(2):
            train(f"gossip{phase}", gossip, model, batches, monitor.step)
            monitor.compare(hvd.allgather_object(monitor.report()))
    report.put("gossip", waited=gossip.stats().wait_s)
    hvd.shutdown()


if __name__ == "__main__":
    main()
