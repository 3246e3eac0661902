"""``EagerOptimizer(hierarchical=2)`` at 4 ranks, which are two hosts of two; whole-number gradients."""

from __future__ import annotations

from typing import Any

from common import Baton, Part, Report, Straggler, raised, staleness, whole_expected

STEPS = 12


def late_host(binding: Any, report: Report, rank: int) -> None:
    """Host 1 takes its first step when host 0 has taken three, and then two more; they go with the drain's round."""
    whole = binding.WholeTraining(quorum="solo", hierarchical=2)
    whole.optimizer.drain()  # all begin together
    ahead = Baton("host 0 is ahead")
    if rank >= 2:
        ahead.wait()
    for step in range(1, 4):
        whole.step(rank, step)
    if rank == 0:
        ahead.lay()
    whole.optimizer.drain()
    stats = whole.optimizer.stats()
    report.put(
        "late host",
        weights=whole.weights(),
        expected=whole_expected([3] * 4),
        contributors=sorted(stats.contributors.items()),
        staleness=staleness(stats),
        applied=stats.gradients_applied,
        distance=whole.optimizer.consensus_distance(),
    )


def uneven(binding: Any, report: Report, rank: int, quorum: Any, pace: str) -> None:
    """Stragglers, and ranks of a host that end at different times, twice."""
    whole = binding.WholeTraining(quorum=quorum, hierarchical=2, max_staleness=4, pace=pace)
    straggler = Straggler("random:1:0.02", rank, 4, seed=5)
    done = 0
    for steps in ((STEPS, STEPS - 3, STEPS - 5, STEPS), (3, 0, 4, 4)):
        for step in range(done + 1, done + steps[rank] + 1):
            straggler.compute()
            whole.step(rank, step)
        done += steps[rank]
        whole.optimizer.drain()
    stats = whole.optimizer.stats()
    report.put(
        f"hosts {quorum} {pace}",
        weights=whole.weights(),
        expected=whole_expected([STEPS + 3, STEPS - 3, STEPS - 1, STEPS + 4]),
        own=stats.steps,
        staleness=staleness(stats),
        applied=stats.gradients_applied,
        total=stats.total_produced,
    )


def run(binding: Any, report: Report, part: Part) -> None:
    """All cases."""
    rank = binding.hvd.rank()
    late_host(binding, report, rank)
    for quorum, pace in (("solo", "steps"), ("majority", "steps"), (2, "steps"), ("solo", "rounds")):
        uneven(binding, report, rank, quorum, pace)
    for hosts in ({"hierarchical": 3}, {"hierarchical": 2, "quorum": 3}):
        report.put(f"refused {len(hosts)}", **raised(lambda hosts=hosts: binding.WholeTraining(**hosts)))  # type: ignore[misc]
