"""The job of ``pull_cost``: pulls that are made to happen one at a time, beside plain collectives of the same size."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import hvd_async.torch as hvd
from hvd_async.simulation.names import LEADERS

from .shared import torch_ranks
from .shared.rank import Block, Job, traffic

LEAD = 0.02
"""Seconds ahead of which all ranks agree on a time to begin a plain collective at."""
SETTLE = 0.1
"""Seconds after which all is counted that was sent."""
WARM_UP = 2

Act = Callable[[int], float]
"""One pull, or collective, from a root: this rank's seconds of it."""


class Pulls:
    """A model without gradients of which each step of all ranks together makes one pull.

    Groups of one have no pulls of their own, so that there is no other than that of all.

    Args:
        algorithm: of LEADERS.
        job: this rank.
        elements: of the model, float32.
    """

    def __init__(self, algorithm: str, job: Job, elements: int) -> None:
        self._job = job
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(elements))], lr=0.001)
        own: dict[str, Any] = {"global_period": 1}
        if algorithm == "lsgd":
            own |= {"group": 1, "local_period": 1, "loss_window": 1}
        self._optimizer = hvd.LeaderOptimizer(optimizer, algorithm=algorithm, **own)
        self._optimizer.record_loss(0.0)
        self._optimizer.step()  # where the ranks meet
        self._wait(1)

    def __call__(self, root: int) -> float:
        """From its submission by the engine until it has landed there; ``root`` leads, if anybody does.

        It is due when the last rank, ``root``, ends its step: all other training threads are idle by then.
        """
        before = self._optimizer.stats()
        self._optimizer.record_loss(float((self._job.rank - root) % self._job.size))
        self._job.barrier()
        if self._job.rank != root:
            self._optimizer.step()
        self._job.barrier()
        if self._job.rank == root:
            self._optimizer.step()
        self._wait(before.pulls + 1)
        after = self._optimizer.stats()
        if after.pulls != before.pulls + 1 or after.history[-1][2] not in (root, -1):
            raise ValueError(f"rank {self._job.rank}: {after.pulls - before.pulls} pulls, the last {after.history[-1]}")
        return float(after.pull_s * after.pulls - before.pull_s * before.pulls)

    def _wait(self, pulls: int) -> None:
        while self._optimizer.rounds < pulls:
            time.sleep(torch_ranks.POLL)

    @property
    def received(self) -> int:
        """Bytes, by its own count."""
        return int(self._optimizer.stats().bytes_received)


class Plain:
    """A plain collective of Horovod's, from where all ranks begin until this one has its result.

    Args:
        kind: "broadcast", "in-place" (a broadcast into the vector itself) or "allreduce".
        job: this rank.
        elements: of the vector, float32.
    """

    def __init__(self, kind: str, job: Job, elements: int) -> None:
        self._job, self._kind, self._vector, self._calls = job, kind, torch.zeros(elements), 0

    def __call__(self, root: int) -> float:
        """Return the seconds that a collective took."""
        self._calls += 1
        self._vector[-1] = self._job.rank + self._calls
        expected = root + self._calls
        at = self._job.agree(time.monotonic() + LEAD)  # one clock for all: they are on one machine
        time.sleep(max(0.0, at - time.monotonic()))
        started, name = time.perf_counter(), f"bench.{self._kind}"
        if self._kind == "allreduce":
            handle = hvd.allreduce_async(self._vector, op=hvd.Sum, name=name)
            expected = sum(range(self._job.size)) + self._job.size * self._calls
        else:
            broadcast = hvd.broadcast_async if self._kind == "broadcast" else hvd.broadcast_async_
            handle = broadcast(self._vector, root, name=name)
        torch_ranks.sleep_until_done([handle])
        value = float(hvd.synchronize(handle)[-1])
        seconds = time.perf_counter() - started
        if value != expected:
            raise ValueError(f"{self._kind} on rank {self._job.rank}: {value} in place of {expected}")
        return seconds


def watched(job: Job, action: Callable[[], Any]) -> dict[str, float]:
    """Bytes and seconds of an action of all ranks."""
    job.barrier()
    started, (received, sent) = time.monotonic(), traffic()
    action()
    job.barrier()
    time.sleep(SETTLE)
    more_received, more_sent = traffic()
    return {
        "received": more_received - received,
        "sent": more_sent - sent,
        "seconds": time.monotonic() - started,
    }


def wire(job: Job, acts: dict[str, Act], block: Block) -> dict[str, Any]:
    """Count the bytes of some pulls of each arm in a row, and those that travel while nothing happens."""
    found: dict[str, Any] = {"idle": watched(job, lambda: time.sleep(block["idle"]))}
    for arm in block["arms"]:
        act = acts[arm]
        before = act.received if isinstance(act, Pulls) else 0

        def several(act: Act = act) -> None:
            for _ in range(block["rounds"]):
                act(block["root"])

        found[arm] = watched(job, several)
        if isinstance(act, Pulls):
            found[arm]["counted"] = act.received - before
    return found


def seconds(job: Job, acts: dict[str, Act], block: Block) -> dict[str, list[float]]:
    """How long each arm takes, one of each in a round."""
    found: dict[str, list[float]] = {arm: [] for arm in block["arms"]}
    for number in range(block["rounds"]):
        first = number % len(block["arms"])
        for arm in (*block["arms"][first:], *block["arms"][:first]):
            found[arm].append(acts[arm](block["root"]))
    return found


def work(job: Job) -> None:
    """Run the plan's blocks."""
    acts: dict[str, Act] = {}
    elements = round(job.plan["megabytes"] * 1e6 / 4)
    for arm in job.plan["arms"]:
        acts[arm] = Pulls(arm, job, elements) if arm in LEADERS else Plain(arm, job, elements)
        for _ in range(WARM_UP):
            acts[arm](0)

    def run_block(job: Job, block: Block) -> None:
        measure = wire if block["part"] == "wire" else seconds
        job.record(block, measure(job, acts, block))

    job.each_block(run_block)
