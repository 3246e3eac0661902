"""What is only in ``EagerOptimizer``, on real ranks, in torch: process sets, pace by rounds, cut and resume."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from common import Baton, Part, Report, integers, staleness, whole_expected
from torch_common import Batches, Whole, crc, mlp

import hvd_async.torch as hvd

SETS = ((0, 2), (1, 3))
ROUNDS, COMPUTE, STALENESS = 40, 0.04, 8
AHEAD = 4
"""Rounds of rank 0 that a slow rank's step takes."""
SMALL = 1e-4
"""MiB: about every parameter has a bucket of its own."""


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
    """Two ranks share an optimizer, two another, and all a third; every compression in each."""
    rank = hvd.rank()
    number = rank % 2
    for name, compression in (("none", "none"), ("fp16", "fp16"), ("bf16", "bf16")):
        own, every = Whole(), Whole()
        options = {"compression": getattr(hvd.Compression, compression), "max_staleness": 4}
        mine = hvd.EagerOptimizer(own.sgd(), process_set=sets[number], quorum="solo", **options)
        all_ = hvd.EagerOptimizer(every.sgd(), quorum="majority", **options)
        for step in range(6):
            whole_steps(mine, own, step, 1)
            whole_steps(all_, every, step, 1)
        all_.drain()
        mine.drain()
        report.put(
            f"process sets {name}",
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


def pace(report: Report, name: str, slow: int, rule: str) -> None:
    """Until a number of rounds; each step of rank ``slow`` (if it is one) takes as long as several rounds of rank 0."""
    rank = hvd.rank()
    model, batches = mlp(seed=4), Batches(rank)
    optimizer = hvd.EagerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        pace=rule,
        max_staleness=STALENESS,
        bucket_cap_mb=SMALL,
    )
    optimizer.drain()  # all begin together
    steps = told = 0
    while optimizer.rounds < ROUNDS:
        if rank == slow:
            may = min(optimizer.rounds + AHEAD, ROUNDS, *([steps + STALENESS] if rule == "steps" else []))
            Baton(f"{name}.{may}").wait()
        else:
            time.sleep(COMPUTE)
        batches.backward(model)
        optimizer.step()
        steps += 1
        while not rank and told < optimizer.rounds:
            told += 1
            Baton(f"{name}.{told}").lay()
    optimizer.drain()
    stats = optimizer.stats()
    report.put(
        name,
        steps=steps,
        rounds=optimizer.rounds,
        weights=crc(model.parameters()),
        produced=stats.gradients_produced,
        applied=stats.gradients_applied,
        total=stats.total_produced,
        staleness=staleness(stats),
    )


def own_file(name: str) -> Path:
    """This rank's checkpoint."""
    return Path(os.environ["HVD_ASYNC_TEST_OUT"]) / f"{name}.{hvd.rank()}.pt"


def cut_and_resume(report: Report) -> None:
    """Whole-number gradients; the last rank's are all late. A new optimizer takes over from each rank's file."""
    rank, size = hvd.rank(), hvd.size()
    whole = Whole()
    optimizer = hvd.EagerOptimizer(whole.sgd(), quorum="solo", max_staleness=16)
    optimizer.drain()
    ahead = Baton("cut")
    if rank == size - 1:
        ahead.wait()
        whole_steps(optimizer, whole, 0, 3)
    else:
        whole_steps(optimizer, whole, 0, 5)
        if rank == 0:
            ahead.lay()
    optimizer.cut()
    state = optimizer.state_dict()
    torch.save({"weights": [p.detach() for p in whole.parameters], "optimizer": state}, own_file("cut"))
    saved = torch.load(own_file("cut"), weights_only=True)
    again = Whole()
    with torch.no_grad():
        for parameter, values in zip(again.parameters, saved["weights"], strict=True):
            parameter.copy_(values)
    resumed = hvd.EagerOptimizer(again.sgd(), quorum="solo", max_staleness=16)
    resumed.load_state_dict(saved["optimizer"])
    whole_steps(resumed, again, 3 if rank == size - 1 else 5, 4)
    resumed.drain()
    optimizer.drain()
    report.put(
        "cut and resume",
        pending=max(len(versions) for versions in state["hvd_async"]["versions"]),
        at_cut=[p.double().reshape(-1).tolist() for p in saved["weights"]],
        weights=again.weights(),
        old=whole.weights(),
        expected=whole_expected([9] * (size - 1) + [7]),
        old_expected=whole_expected([5] * (size - 1) + [3]),
        rounds=resumed.rounds,
        before=state["hvd_async"]["rounds"],
        now=resumed.stats().rounds,
    )


def interrupted(report: Report, steps: tuple[int, ...], cap: float) -> None:
    """Synchronous training that is saved and resumed after each part, with buckets of ``cap`` MiB."""
    model, batches = mlp(seed=6), Batches(hvd.rank())
    for part, count in enumerate(steps):
        if part:
            model = mlp(seed=99)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.EagerOptimizer(adam, quorum="all", bucket_cap_mb=cap)
        if part:
            saved = torch.load(own_file("part"), weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for _ in range(count):
            batches.backward(model)
            optimizer.step()
        (optimizer.cut if part % 2 else optimizer.drain)()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, own_file("part"))
    report.put(f"resumed {len(steps)} {cap}", weights=crc(model.parameters()), rounds=optimizer.rounds)


def run(_: Any, report: Report, part: Part) -> None:
    """All cases."""
    sets = [hvd.add_process_set(list(ranks)) for ranks in SETS]
    process_sets(report, sets)
    pace(report, "pace even", -1, "rounds")
    pace(report, "pace rounds", 1, "rounds")
    pace(report, "pace steps", 1, "steps")
    cut_and_resume(report)
    for cap in (25.0, SMALL):
        interrupted(report, (12,), cap)
        interrupted(report, (5, 4, 3), cap)
