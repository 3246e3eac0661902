"""The job of ``exchange_cost``: pairs of ranks are averaged by one alltoall of all, or by process sets of two."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvd_async.torch as hvd

from .shared import torch_ranks
from .shared.rank import Block, Job

LEAD = 0.05
"""Seconds ahead of which all ranks agree on a time to begin at."""
WARM_UP = 3
"""Untimed exchanges of each block. Those of aligned pairs in the first block of a size say how far apart unaligned ones
begin: within as long as one takes."""


class Pairs:
    """This rank's part in exchanges of vectors of one size.

    Args:
        job: this rank.
        own: the process set of this rank's pair.
        elements: of a vector, float32.
        chunk: elements of a piece of it, where it goes in pieces.
    """

    def __init__(self, job: Job, own: Any, elements: int, chunk: int) -> None:
        self._job, self._own, self._chunk = job, own, chunk
        self._vector = torch.full((elements,), float(job.rank))
        self._partner = job.rank ^ 1

    def pairs(self) -> float:
        """Averaged with the partner by an allreduce of two."""
        handle = hvd.allreduce_async(self._vector, name=f"bench.pair.{self._job.rank // 2}", process_set=self._own)
        return float(_wait(handle)[-1])

    def alltoall(self) -> float:
        """Averaged with the partner by what an alltoall of all brings."""
        return self._exchange([self._vector], self._partner)

    def chunked(self) -> float:
        """Averaged as by ``alltoall``, but piece by piece."""
        return self._exchange(self._vector.split(self._chunk), self._partner)

    def hop(self) -> float:
        """Averaged with what the rank before has sent."""
        return self._exchange([self._vector], (self._job.rank + 1) % self._job.size)

    def _exchange(self, pieces: Sequence[torch.Tensor], to: int) -> float:
        splits = torch.zeros(self._job.size, dtype=torch.int32)
        splits[to] = 1
        handles = [
            hvd.alltoall_async(piece.view(1, -1), splits, name=f"bench.exchange.{len(pieces)}.{number}")
            for number, piece in enumerate(pieces)
        ]
        received = [_wait(handle)[0][0] for handle in handles]
        averages = [torch.lerp(own, other, 0.5) for own, other in zip(pieces, received, strict=True)]
        return float(averages[-1][-1])

    def expected(self, how: str) -> float:
        """Return the average that each of them must give."""
        other = (self._job.rank - 1) % self._job.size if how == "hop" else self._partner
        return (self._job.rank + other) / 2


def _wait(handle: int) -> Any:
    torch_ranks.sleep_until_done([handle])
    return hvd.synchronize(handle)


def exchanges(job: Job, pairs: Pairs, block: Block, within: float) -> list[float]:
    """Some exchanges; returns this rank's seconds of each."""
    how = block["arm"].removesuffix("-unaligned")
    act: Callable[[], float] = getattr(pairs, how)
    draws = random.Random(1000 * block["seed"] + block["repetition"])
    seconds = []
    for number in range(WARM_UP + block["rounds"]):
        offsets = [draws.uniform(0.0, within) for _ in range(job.size // 2)]
        at = job.agree(time.monotonic() + LEAD)  # one clock for all: they are on one machine
        if block["arm"] != how:
            at += offsets[job.rank // 2]
        time.sleep(max(0.0, at - time.monotonic()))
        started = time.monotonic()
        value = act()
        if number >= WARM_UP:
            seconds.append(time.monotonic() - started)
        if value != pairs.expected(how):
            raise ValueError(f"{block['arm']} on rank {job.rank}: {value} in place of {pairs.expected(how)}")
    return seconds


def work(job: Job) -> None:
    """Run the plan's blocks; the first of each size is preceded by exchanges that tell how long one takes."""
    sets = [hvd.global_process_set]  # (Horovod refuses another set of all ranks)
    if job.size > 2:
        sets = [hvd.add_process_set([rank, rank + 1]) for rank in range(0, job.size, 2)]
    within: dict[float, float] = {}

    def run_block(job: Job, block: Block) -> None:
        size = block["megabytes"]
        pairs = Pairs(job, sets[job.rank // 2], round(size * 1e6 / 4), max(1, round(block["chunk"] * 1e6 / 4)))
        if size not in within:
            tried = exchanges(job, pairs, {**block, "arm": "pairs", "rounds": WARM_UP}, 0.0)
            within[size] = job.agree(statistics.median(tried))
        found = exchanges(job, pairs, block, within[size])
        job.record({**block, "within": within[size]}, {"seconds": found})

    job.each_block(run_block)
