"""What the promises' jobs share: whole-number training, and the order of the cases. No framework here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from common import Report, Straggler, arguments, staleness, whole_expected
from table import QUORUMS, Promise, Quorum, conservation, possible, uneven, uneven_steps


class WholeTraining(Protocol):
    """One rank's parameters and optimizer (SGD with learning rate 1)."""

    optimizer: Any

    def step(self, rank: int, step: int) -> None:
        """A step with that rank's gradient of that step."""

    def weights(self) -> list[list[float]]:
        """The weights now."""


Make = Callable[..., WholeTraining]


def train(whole: WholeTraining, straggler: Straggler, rank: int, first: int, steps: int) -> None:
    """Steps ``first`` + 1 to ``first`` + ``steps``."""
    for step in range(first + 1, first + steps + 1):
        straggler.compute()
        whole.step(rank, step)


def conserve(report: Report, rank: int, size: int, make: Make, quorum: Quorum, steps: int) -> None:
    """With stragglers."""
    whole = make(quorum=quorum, max_staleness=5)
    train(whole, Straggler("random:1:0.02", rank, size, seed=5), rank, 0, steps)
    whole.optimizer.drain()
    report.put(
        conservation(quorum),
        weights=whole.weights(),
        expected=whole_expected([steps] * size),
        late=sum(n for s, n in whole.optimizer.stats().staleness.items() if s > 0),
    )


def run_uneven(report: Report, rank: int, size: int, make: Make, quorum: Quorum) -> None:
    """Every phase ends in a drain; in each there is a rank without any step."""
    whole = make(quorum=quorum, max_staleness=4)
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


def counts(optimizer: Any) -> dict[str, Any]:
    """What a case of real training reports of its gradients."""
    stats = optimizer.stats()
    return {
        "distance": optimizer.consensus_distance(),
        "produced": stats.gradients_produced,
        "applied": stats.gradients_applied,
        "total": stats.total_produced,
        "staleness": staleness(stats),
    }


def run(
    hvd: Any,
    promise: Callable[[Report, Promise], None],
    make: Make,
    cases: tuple[Sequence[Promise], Sequence[Promise]],
    steps: int,
) -> None:
    """A promises job.

    Args:
        hvd: our module of the framework.
        promise: real training of a case.
        make: whole-number training.
        cases: of real training: all, and those for ``--cases few``.
        steps: of whole-number training.
    """
    few = arguments().cases == "few"
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    report = Report(rank)
    for case in cases[few]:
        if possible(case.quorum, size):
            promise(report, case)
    for quorum in (quorum for quorum in QUORUMS if possible(quorum, size)):
        conserve(report, rank, size, make, quorum, steps)
        if not few:
            run_uneven(report, rank, size, make, quorum)
    hvd.shutdown()
    report.put("end")
