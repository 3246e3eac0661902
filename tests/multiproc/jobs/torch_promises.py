"""DESIGN.md section 3 on real ranks, in torch: replicas, conservation, staleness, uneven batches."""

from __future__ import annotations

from typing import Any

import torch
from common import Report, Straggler, arguments, staleness, whole_expected
from table import BOUNDED, FEW_PROMISES, PROMISES, QUORUMS, Promise, Quorum, conservation, uneven, uneven_steps
from torch_common import Batches, Whole, crc, mlp, state_tensors

import hvd_async.torch as hvd

STEPS = 15


def promise(report: Report, case: Promise) -> None:
    """Momentum, decay and a schedule that steps on every rank's own count, with stragglers."""
    rank, size = hvd.rank(), hvd.size()
    model, batches = mlp(seed=1), Batches(rank)
    optimizer = hvd.EagerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        named_parameters=model.named_parameters(),
        quorum=case.quorum,
        max_staleness=case.max_staleness,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    straggler = Straggler(case.inject, rank, size, seed=3)
    history = []
    for _ in range(STEPS):
        batches.backward(model)
        straggler.compute()
        optimizer.step()
        schedule.step()
        history.append((optimizer.stats().rounds, crc([*model.parameters(), *state_tensors(optimizer)])))
    optimizer.drain()
    stats = optimizer.stats()
    report.put(
        case.name,
        history=history,
        weights=crc(model.parameters()),
        state=crc(state_tensors(optimizer)),
        lr=schedule.get_last_lr()[0],
        distance=optimizer.consensus_distance(),
        produced=stats.gradients_produced,
        applied=stats.gradients_applied,
        total=stats.total_produced,
        staleness=staleness(stats),
    )


def train_whole(optimizer: Any, whole: Whole, straggler: Straggler, first: int, steps: int) -> None:
    """Steps ``first`` + 1 to ``first`` + ``steps`` with whole-number gradients."""
    for step in range(first + 1, first + steps + 1):
        whole.set_gradients(hvd.rank(), step)
        straggler.compute()
        optimizer.step()


def conserve(report: Report, quorum: Quorum) -> None:
    """Whole-number gradients with stragglers."""
    whole = Whole()
    optimizer = hvd.EagerOptimizer(whole.sgd(), quorum=quorum, max_staleness=5)
    straggler = Straggler("random:1:0.02", hvd.rank(), hvd.size(), seed=5)
    train_whole(optimizer, whole, straggler, 0, 12)
    optimizer.drain()
    report.put(
        conservation(quorum),
        weights=whole.weights(),
        expected=whole_expected([12] * hvd.size()),
        late=sum(n for s, n in optimizer.stats().staleness.items() if s > 0),
    )


def run_uneven(report: Report, quorum: Quorum) -> None:
    """Every phase ends in a drain; in each there is a rank without any step."""
    whole, size = Whole(), hvd.size()
    optimizer = hvd.EagerOptimizer(whole.sgd(), quorum=quorum, max_staleness=4)
    straggler = Straggler("random:1:0.01", hvd.rank(), size, seed=7)
    done = [0] * size
    phases = []
    for phase in range(3):
        steps = [uneven_steps(phase, rank, size) for rank in range(size)]
        train_whole(optimizer, whole, straggler, done[hvd.rank()], steps[hvd.rank()])
        optimizer.drain()
        done = [a + b for a, b in zip(done, steps, strict=True)]
        phases.append({"weights": whole.weights(), "expected": whole_expected(done)})
    stats = optimizer.stats()
    report.put(
        uneven(quorum),
        phases=phases,
        own=stats.steps,
        steps=done,
        applied=stats.gradients_applied,
        total=stats.total_produced,
        staleness=staleness(stats),
    )


def main() -> None:
    few = arguments().cases == "few"
    hvd.init()
    report = Report(hvd.rank())
    for case in FEW_PROMISES if few else PROMISES + BOUNDED:
        promise(report, case)
    for quorum in QUORUMS:
        conserve(report, quorum)
        if not few:
            run_uneven(report, quorum)
    hvd.shutdown()
    report.put("end")


if __name__ == "__main__":
    main()
