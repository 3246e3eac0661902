"""What is only in ``EagerOptimizer``, on real ranks, in torch: process sets."""

from __future__ import annotations

from typing import Any

import torch
from common import Part, Report, integers, whole_expected
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch_common import Whole

import hvd_async.torch as hvd

SETS = ((0, 2), (1, 3))


def whole_steps(optimizer: Any, whole: Whole, first: int, steps: int) -> None:
    """Steps ``first`` + 1 to ``first`` + ``steps`` with whole-number gradients."""
    for step in range(first + 1, first + steps + 1):
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
    for step in range(6):
        whole_steps(mine, own, step, 1)
        whole_steps(all_, every, step, 1)
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
    whole_steps(optimizer, alone, 0, 3)
    ends = {"last": optimizer.drain(), "rounds": optimizer.rounds, "distance": optimizer.consensus_distance()}
    report.put("process set of others", own=alone.weights(), own_expected=set_expected((rank,), 3), **ends)


def resumed(report: Report) -> None:
    """Rank 0's state after a drain, sent to all; and a state dict that rank 0 alone takes in between."""

    def make() -> tuple[Whole, Any]:
        whole = Whole()
        return whole, hvd.GossipOptimizer(whole.sgd(), algorithm="slowmo", average_every=2, outer_momentum=0.5)

    whole, optimizer = make()
    whole_steps(optimizer, whole, 0, 5)
    optimizer.drain()
    state, weights, rounds = optimizer.state_dict(), [p.detach().clone() for p in whole.parameters], optimizer.rounds
    whole_steps(optimizer, whole, 5, 5)
    optimizer.drain()
    again, other = make()
    with torch.no_grad():
        for parameter, value in zip(again.parameters, weights, strict=True):
            parameter.copy_(value)
    if hvd.rank() == 0:
        other.load_state_dict(state)
        other.zero_grad()
        get_optimizer_state_dict(torch.nn.ParameterList(again.parameters), other)
    hvd.broadcast_optimizer_state(other, root_rank=0)
    began = other.rounds
    whole_steps(other, again, 5, 5)
    other.drain()
    report.put("resumed", whole=whole.weights(), again=again.weights(), rounds=rounds, began=began)


def run(_: Any, report: Report, part: Part) -> None:
    """All cases."""
    sets = [hvd.add_process_set(list(ranks)) for ranks in SETS]
    process_sets(report, sets)
    resumed(report)
