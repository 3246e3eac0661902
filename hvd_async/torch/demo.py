"""The training of ``hvd_async demo``: one rank is late in some steps, under each of three modes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import hvd_async.torch as hvd

COMPUTES, LATE, SHARE = 0.03, 0.05, 0.5
"""Seconds of a step, slept; seconds by which one random rank is late in this share of the steps."""
MODES: Mapping[str, Callable[..., Any]] = {
    'EagerOptimizer(opt, quorum="all")': lambda opt, **names: hvd.EagerOptimizer(opt, quorum="all", **names),
    'EagerOptimizer(opt, quorum="majority")': lambda opt, **names: hvd.EagerOptimizer(opt, quorum="majority", **names),
    'GossipOptimizer(opt, algorithm="local", average_every=4)': lambda opt, **names: hvd.GossipOptimizer(
        opt, algorithm="local", average_every=4, **names
    ),
}
"""Wrappers by the line to write; the first one waits for all ranks in every step."""


def train(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Train under each mode and record it; yield on every rank its results in JSON values.

    Args:
        folder: for a trace of each mode.
        steps: of each training.
    """
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    unseen = torch.randn(1000, 32)
    is_late = torch.rand(steps) < SHARE
    late_rank = torch.randint(hvd.size(), (steps,))
    for number, (line, wrap) in enumerate(MODES.items()):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        optimizer = wrap(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
        )
        recorder = hvd.record(optimizer, folder / str(number))
        torch.manual_seed(2 + hvd.rank())
        hvd.barrier()
        began = time.monotonic()
        for step in range(steps):
            inputs = torch.randn(32, 32)
            time.sleep(COMPUTES + LATE * bool(is_late[step] and late_rank[step] == hvd.rank()))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1)).backward()
            optimizer.step()
        optimizer.drain()
        seconds = time.monotonic() - began
        recorder.close()
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(unseen), teacher(unseen).argmax(1))
        yield {
            "line": line,
            "seconds": seconds,
            "wait_s": optimizer.stats().wait_s,
            "loss": float(loss),
            "distance": float(optimizer.consensus_distance()),
            "stats": str(optimizer.stats()),
        }
