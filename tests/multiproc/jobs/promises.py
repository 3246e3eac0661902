"""The promises of docs/promises.md on real ranks: replicas, conservation, staleness, uneven batches."""

from __future__ import annotations

from typing import Any

from common import Part, Report, Straggler, staleness, whole_expected, whole_weighted
from table import Promise, Quorum, bounded, conservation, promises, quorums, uneven, uneven_steps

STEPS = 12
"""Of whole-number training."""


def train(whole: Any, straggler: Straggler, rank: int, first: int, steps: int) -> None:
    """Steps ``first`` + 1 to ``first`` + ``steps``."""
    for step in range(first + 1, first + steps + 1):
        straggler.compute()
        whole.step(rank, step)


def keep(binding: Any, report: Report, case: Promise) -> None:
    """Real training."""
    optimizer, checksums = binding.promise(case)
    stats = optimizer.stats()
    report.put(
        case.name,
        distance=optimizer.consensus_distance(),
        produced=stats.gradients_produced,
        applied=stats.gradients_applied,
        total=stats.total_produced,
        staleness=staleness(stats),
        **checksums,
    )


def conserve(binding: Any, report: Report, rank: int, size: int, quorum: Quorum) -> None:
    """Whole numbers, with stragglers."""
    whole = binding.WholeTraining(quorum=quorum, max_staleness=5)
    train(whole, Straggler("random:1:0.02", rank, size, seed=5), rank, 0, STEPS)
    whole.optimizer.drain()
    report.put(
        conservation(quorum),
        weights=whole.weights(),
        expected=whole_expected([STEPS] * size),
        late=sum(n for s, n in whole.optimizer.stats().staleness.items() if s > 0),
    )


def samples_of(rank: int, step: int) -> int:
    """Samples of a rank's step: other numbers on each, and empty batches among them."""
    return (step * (rank + 1)) % 5


def by_samples(binding: Any, report: Report, rank: int, size: int) -> None:
    """Whole numbers of batches of different sizes, all ranks in each round; and with stragglers as rounds come."""
    for quorum in ("all", "solo"):
        whole = binding.WholeTraining(quorum=quorum, max_staleness=4, weighting="samples")
        straggler = Straggler("random:1:0.01", rank, size, seed=9)
        for step in range(1, STEPS + 1):
            straggler.compute()
            whole.optimizer.record_samples(samples_of(rank, step))
            whole.step(rank, step)
        whole.optimizer.drain()
        stats = whole.optimizer.stats()
        expected = whole_weighted([[samples_of(each, step + 1) for each in range(size)] for step in range(STEPS)])
        report.put(
            f"samples-{quorum}",
            weights=whole.weights(),
            expected=expected,
            applied=stats.gradients_applied,
            total=stats.total_produced,
        )


def run_uneven(binding: Any, report: Report, rank: int, size: int, quorum: Quorum) -> None:
    """Every phase ends in a drain; in each there is a rank without any step."""
    whole = binding.WholeTraining(quorum=quorum, max_staleness=4)
    straggler = Straggler("random:1:0.01", rank, size, seed=7)
    done = [0] * size
    phases = []
    for phase in range(3):
        steps = [uneven_steps(phase, each, size) for each in range(size)]
        train(whole, straggler, rank, done[rank], steps[rank])
        whole.optimizer.drain()
        done = [a + b for a, b in zip(done, steps, strict=True)]
        phases.append({"weights": whole.weights(), "expected": whole_expected(done)})
    stats = whole.optimizer.stats()
    report.put(
        uneven(quorum),
        phases=phases,
        own=stats.steps,
        steps=done,
        applied=stats.gradients_applied,
        total=stats.total_produced,
        staleness=staleness(stats),
    )


def run(binding: Any, report: Report, part: Part) -> None:
    """All cases, or a few."""
    rank, size, share = binding.hvd.rank(), binding.hvd.size(), part.share
    for case in (*promises(share), *bounded(share)):
        keep(binding, report, case)
    by_samples(binding, report, rank, size)
    for quorum in quorums(share):
        conserve(binding, report, rank, size, quorum)
        if share != "few":
            run_uneven(binding, report, rank, size, quorum)
