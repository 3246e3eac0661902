"""Leftovers of optimizers that have ended, of settings that were switched, of cycles of init and shutdown.

``lifetimes.py OPTIMIZERS SWITCHES CYCLES``: threads, descriptors and keys of the ranks' store, each time.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Report, meet

import hvd_async.torch as hvd
from hvd_async.torch.horovod_api import hvd as plane

ENDS_IN = 30.0
"""Seconds at most until what has ended is gone: the last rank's end has to reach the others."""
KINDS: dict[str, Callable[[Any], Any]] = {
    "solo": lambda optimizer: hvd.EagerOptimizer(optimizer, quorum="solo"),
    "all": lambda optimizer: hvd.EagerOptimizer(optimizer, quorum="all"),
    "gossip": hvd.GossipOptimizer,
    "leader": hvd.LeaderOptimizer,
}
Counts = tuple[int, int, int]


def counts() -> Counts:
    """Threads, descriptors, keys."""
    gc.collect()
    keys = 0
    if not plane.on_horovod and hvd.is_initialized():
        from hvd_async.torch.distributed import world

        keys = world.current().store.num_keys()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), keys


def settled(most: Counts | None) -> Counts:
    """The counts, once they are at most these on all ranks, or the time is over."""
    deadline = time.monotonic() + ENDS_IN
    while True:
        found = counts()
        over = most is None or all(a <= b for a, b in zip(found, most, strict=True)) or time.monotonic() > deadline
        if min(hvd.allgather_object(over)) if hvd.is_initialized() else over:
            return found


def steps(model: torch.nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        if hasattr(optimizer, "record_loss"):
            optimizer.record_loss(loss)
        optimizer.step()


def wrapped(kind: str) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, KINDS[kind](torch.optim.SGD(model.parameters(), lr=0.1))


def train(kind: str, end: str) -> None:
    model, optimizer = wrapped(kind)
    steps(model, optimizer)
    getattr(optimizer, end)()


def main() -> None:
    optimizers, switches, cycles = map(int, sys.argv[1:])
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    report = Report(rank)
    first: Counts | None = None
    for number in range(optimizers):
        train(list(KINDS)[number % len(KINDS)], "discard" if number % 3 == 2 else "drain")
        last = settled(first)
        first = first or last
    report.put("optimizers", first=first, last=last)
    model, optimizer = wrapped("gossip")
    first = None
    for number in range(switches):
        steps(model, optimizer)
        optimizer.switch(algorithm=("osgp", "sgp")[number % 2])
        last = settled(first)
        first = first or last
    report.put("switches", first=first, last=last)
    optimizer.discard()
    first = None
    for number in range(cycles):
        # (All have shut down before one counts, as rank 0 has a descriptor for each rank that is there; and before one
        # begins again, as Horovod's launcher keeps addresses of ranks until all have ended.)
        hvd.shutdown()
        meet(f"ended.{number}", rank, size)
        threads, descriptors, _ = settled(None if first is None else (first[0], first[1], 0))
        meet(f"counted.{number}", rank, size)
        hvd.init()
        last = threads, descriptors, settled(None if first is None else (1 << 30, 1 << 30, first[2]))[2]
        first = first or (last if number else None)  # (some descriptors are opened once)
        train("gossip", "drain")
    hvd.shutdown()
    report.put("cycles", first=first, last=last)


if __name__ == "__main__":
    main()
