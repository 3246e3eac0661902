"""``GossipOptimizer`` on real ranks: every algorithm, ranks that are stuck."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from common import Baton, Part, Report, after_cut
from gossip_table import STEPS, Gossip, cases

Make = Callable[..., Any]
"""Makes one rank's model and optimizer: a binding's ``LeastSquares``."""
STUCK = 12
"""Steps that the others take under AD-PSGD while a rank is stuck."""
HELD = 3
"""The step that a rank is late for under SGP."""


def train(report: Report, rank: int, case: Gossip, make: Make) -> None:
    """A case, with what the test needs to replay it."""
    trainer = make(**case.options)
    optimizer = trainer.optimizer
    driver = optimizer._async
    register_worker = driver.register_worker
    log: list[Any] = []

    def recorded(worker: Any, number: int | None) -> None:
        worker.log = log  # before others know of it: they may be averaged with this rank at once
        register_worker(worker, number)

    driver.register_worker = recorded
    worker = driver.worker_now()
    for step in range(1, case.steps(rank) + 1):
        trainer.step(rank, step)
    before, weight, events = trainer.weights(), worker.weight, list(log)
    optimizer.cut()
    if case.algorithm == "adpsgd":
        events = list(log)  # (a rank is averaged with others after its last step too)
    ends = after_cut(trainer)
    stats = optimizer.stats()
    report.put(
        case.name,
        before=before,
        weight=weight,
        log=events,
        **ends,
        sent=stats.messages_sent,
        taken=stats.messages_taken + stats.messages_left,
        weight_after=stats.push_sum_weight,
    )


def stuck(report: Report, rank: int, size: int, make: Make) -> None:
    """AD-PSGD on a ring: rank 1 does not begin its second step before the others have taken ``STUCK``, each of which
    needs an averaging in time."""
    trainer = make(algorithm="adpsgd", topology="ring", max_local_steps=2)
    batons = [Baton(f"stuck.{other}") for other in range(size)]
    trainer.step(rank, 1)
    if rank == 1:
        for other in range(size):
            if other != rank:
                batons[other].wait()
    for step in range(2, STUCK + 1):
        trainer.step(rank, step)
    if rank != 1:
        batons[rank].lay()
    stats = trainer.optimizer.stats()
    trainer.optimizer.drain()
    report.put("stuck", averagings=stats.averagings, drained=trainer.weights())


def held(report: Report, rank: int, size: int, make: Make) -> None:
    """SGP on a one-way ring: rank 0 does not begin step ``HELD`` before each rank d has ended step ``HELD`` + d - 2,
    which is as far as the graph lets it come."""
    trainer = make(algorithm="sgp", topology="ring-right")
    batons = [Baton(f"held.{other}") for other in range(size)]
    waits = []
    for step in range(1, STEPS + 1):
        if rank == 0 and step == HELD:
            for other in range(1, size):
                batons[other].wait()
        trainer.step(rank, step)
        waits.append(trainer.optimizer.stats().wait_s)
        if rank and step == HELD + rank - 2:
            batons[rank].lay()
    trainer.optimizer.drain()
    report.put("held", waits=waits, waited_for=list(trainer.optimizer.stats().waited_for), drained=trainer.weights())


def run(binding: Any, report: Report, part: Part) -> None:
    """All cases, a few, or those of hosts."""
    rank, size = binding.hvd.rank(), binding.hvd.size()
    make = functools.partial(binding.LeastSquares, binding.hvd.GossipOptimizer)
    for case in cases(size, part.share):
        train(report, rank, case, make)
    if size != 4 and part.share != "few":
        stuck(report, rank, size, make)
        held(report, rank, size, make)
