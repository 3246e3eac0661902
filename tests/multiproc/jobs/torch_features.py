"""What is only in ``EagerOptimizer``, on real ranks, in torch: process sets."""

from __future__ import annotations

from typing import Any

from common import Part, Report, whole_expected
from torch_common import WholeTraining

import hvd_async.torch as hvd

SETS = ((0, 2), (1, 3))


def process_sets(report: Report, sets: list[Any]) -> None:
    """Two ranks share an optimizer, two another, and all a third."""
    rank = hvd.rank()
    number = rank % 2
    options = {"compression": hvd.Compression.bf16, "max_staleness": 4}
    own = WholeTraining(process_set=sets[number], **options)
    every = WholeTraining(quorum="majority", **options)
    for step in range(1, 7):
        own.step(rank, step)
        every.step(rank, step)
    every.optimizer.drain()
    own.optimizer.drain()
    report.put(
        "process sets",
        own=own.weights(),
        own_expected=whole_expected([6] * 2, SETS[number]),
        every=every.weights(),
        every_expected=whole_expected([6] * hvd.size()),
        distance=own.optimizer.consensus_distance(),
        held=len(own.optimizer.stats().held_s),
    )
    alone = WholeTraining(quorum="majority", process_set=sets[1 - number])
    optimizer = alone.optimizer
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(1, 4):
        alone.step(rank, step)
    ends = {"last": optimizer.drain(), "rounds": optimizer.rounds, "distance": optimizer.consensus_distance()}
    report.put("process set of others", own=alone.weights(), own_expected=whole_expected([3], [rank]), **ends)


def run(_: Any, report: Report, part: Part) -> None:
    """All cases."""
    process_sets(report, [hvd.add_process_set(list(ranks)) for ranks in SETS])
