"""What is only in ``EagerOptimizer``, on real ranks, in torch: process sets."""

from __future__ import annotations

from typing import Any

from common import Part, Report, integers, whole_expected
from torch_common import Whole

import hvd_async.torch as hvd

SETS = ((0, 2), (1, 3))


def take_step(optimizer: Any, whole: Whole, step: int) -> None:
    """A step (1, 2, ...) with whole-number gradients."""
    whole.set_gradients(hvd.rank(), step)
    optimizer.step()


def set_expected(ranks: tuple[int, ...], steps: int) -> list[list[float]]:
    """As ``whole_expected``, over some of the ranks."""
    ends = []
    for index, parameter in enumerate(Whole().parameters):
        start = parameter.detach().double().cpu().numpy()
        grads = [integers(start.shape, r, s, index) for r in ranks for s in range(1, steps + 1)]
        ends.append((start - sum(grads) / len(ranks)).ravel().tolist())
    return ends


def process_sets(report: Report, sets: list[Any]) -> None:
    """Two ranks share an optimizer, two another, and all a third."""
    rank = hvd.rank()
    number = rank % 2
    own, every = Whole(), Whole()
    options = {"compression": hvd.Compression.bf16, "max_staleness": 4}
    mine = hvd.EagerOptimizer(own.sgd(), process_set=sets[number], quorum="solo", **options)
    all_ = hvd.EagerOptimizer(every.sgd(), quorum="majority", **options)
    for step in range(1, 7):
        take_step(mine, own, step)
        take_step(all_, every, step)
    all_.drain()
    mine.drain()
    report.put(
        "process sets",
        own=own.weights(),
        own_expected=set_expected(SETS[number], 6),
        every=every.weights(),
        every_expected=whole_expected([6] * hvd.size()),
        distance=mine.consensus_distance(),
        held=len(mine.stats().held_s),
    )
    alone = Whole()
    optimizer = hvd.EagerOptimizer(alone.sgd(), process_set=sets[1 - number])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(1, 4):
        take_step(optimizer, alone, step)
    ends = {"last": optimizer.drain(), "rounds": optimizer.rounds, "distance": optimizer.consensus_distance()}
    report.put("process set of others", own=alone.weights(), own_expected=set_expected((rank,), 3), **ends)


def run(_: Any, report: Report, part: Part) -> None:
    """All cases."""
    process_sets(report, [hvd.add_process_set(list(ranks)) for ranks in SETS])
