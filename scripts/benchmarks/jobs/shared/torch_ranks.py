"""Ranks of a torch job: how a job's program begins and ends, and how ranks wait for each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import torch

import hvd_async.torch as hvd

from .rank import Job

POLL = 0.0005
"""Seconds between two looks at what Horovod has done: its own waiting keeps a core busy, which others need here."""


def run(work: Callable[[Job], None]) -> None:
    """Run a job's program: ``work`` on this rank, between Horovod's start and its end."""
    hvd.init()
    torch.set_num_threads(1)
    job = Job(hvd, barrier)
    work(job)
    job.finish()
    hvd.shutdown()


def barrier() -> None:
    """Wait for all ranks."""
    handle = hvd.allreduce_async(torch.zeros(1), name="bench.barrier")
    sleep_until_done([handle])
    hvd.synchronize(handle)


def share_cores(ranks: int) -> bool:
    """Return whether there are fewer cores than ranks."""
    return ranks > len(os.sched_getaffinity(0))


def sleep_until_done(handles: Iterable[int]) -> None:
    """Wait for Horovod's collectives. Its ``synchronize()`` does so by asking without end whether they are done; where
    ranks share cores this takes them from ranks that still compute, and from the threads that send."""
    for handle in handles:
        while not hvd.poll(handle):
            time.sleep(POLL)
