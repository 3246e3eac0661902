"""Counts of what a step of each mode costs the host, with ranks as threads in lockstep. On the command line,

``python -m tests.conformance.host_counts all solo --ranks 1 2`` prints a table, with ``--names`` also what is called.
"""

from __future__ import annotations

import argparse
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from scripts.benchmarks.jobs.arm import Arm
from scripts.benchmarks.jobs.host_counts import (
    BUCKET_MB,
    ELEMENTS,
    STEPS,
    Calls,
    HostCounts,
    Operators,
    SmallTensors,
    count_steps,
    mean_counts,
    momentum_sgd,
)
from scripts.benchmarks.support.arms import PLAIN, is_eager
from tests.conformance.lockstep import LockstepCluster

MODES = ("all", "solo", "majority", "sgp", "dpsgd", "adpsgd", "local", "lsgd", "easgd")
INPUTS = torch.ones(ELEMENTS)


class Cost(NamedTuple):
    """Average cost of a step for a rank, over ``STEPS`` steps.

    Attributes:
        host: the training thread's counts.
        messages: number of messages from its engine to the coordinator.
        wakes: number of times its engine wakes up.
        operators, calls: totals over all steps, by name.
    """

    host: HostCounts
    messages: float
    wakes: float
    operators: Counter[str]
    calls: Counter[str]


def loss(model: torch.nn.Module) -> torch.Tensor:
    """The loss of every step."""
    value: torch.Tensor = model(INPUTS)
    return value


def made(mode: str, rank: int, ranks: int) -> Arm:
    """Return a model with the optimizer of a mode, without a grace, so that rounds do not depend on time."""
    own: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB, "grace": 0.0} if is_eager(mode) else {}
    own |= {"group": [list(range(ranks))]} if mode == "lsgd" else {}
    model = SmallTensors()
    return Arm(mode, model, SimpleNamespace(rank=rank, size=ranks), momentum_sgd(model), **own)  # type: ignore[arg-type]


def plain() -> Cost:
    """Return what a step of the plain optimizer costs."""
    torch.set_num_threads(1)
    arm = made(PLAIN, 0, 1)
    for _ in range(STEPS):
        arm.train(loss)
    return _cost(
        count_steps(
            lambda: arm.train(loss),
        ),
        0,
        0,
    )


def measure(mode: str, ranks: int) -> list[Cost]:
    """Return what a step of a mode costs each rank."""
    torch.set_num_threads(1)
    cluster = LockstepCluster(ranks)

    def work(rank: int) -> Cost:
        arm = made(mode, rank, ranks)
        arm.optimizer._async.worker_now()  # (registration is not part of a step)
        channel = cluster.channels[rank]
        cluster.begin(rank)

        def step() -> None:
            arm.train(loss)
            cluster.pass_on(rank)

        for _ in range(STEPS):
            step()
        sent, wakes = channel.sent, channel.wakes
        found = count_steps(step, lambda: Calls(cluster.hidden, cluster.wrappers))
        cost = _cost(found, channel.sent - sent, channel.wakes - wakes)
        cluster.end(rank)
        arm.drain()
        return cost

    return cluster.run(work)


def _cost(steps: list[tuple[Operators, Calls]], messages: int, wakes: int) -> Cost:
    operators = sum((counter.calls for counter, _ in steps), Counter[str]())
    calls = sum((counted.c for _, counted in steps), Counter[str]())
    for _, counted in steps:
        for code, count in counted.python.items():
            calls[getattr(code, "co_qualname", code.co_name)] += count
    return Cost(mean_counts(steps), messages / (2 * STEPS), wakes / (2 * STEPS), operators, calls)


def highest(costs: list[Cost]) -> tuple[HostCounts, float, float]:
    """Return the highest of each count over the ranks, messages and wakes included."""
    most = HostCounts(*(max(values) for values in zip(*(cost.host for cost in costs), strict=True)))
    return most, max(cost.messages for cost in costs), max(cost.wakes for cost in costs)


def main() -> None:
    """Print the counts of some modes."""
    parser = argparse.ArgumentParser(description="What a step costs the host, minus the plain optimizer's part.")
    parser.add_argument("modes", nargs="*", default=MODES, help=f"of {', '.join(MODES)}; not given: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--names", type=int, metavar="N", default=0, help="also the N most frequent names, by rank")
    args = parser.parse_args()
    base = plain()
    print("mode      ranks   aten  python      c  waits  copies  messages  wakes")
    for mode in args.modes:
        for ranks in args.ranks:
            if mode == "majority" and ranks == 1:
                continue
            costs = measure(mode, ranks)
            (aten, python, c, waits, copies), messages, wakes = highest(costs)
            over = (aten - base.host.aten_calls, python - base.host.python_calls, c - base.host.c_calls)
            shown = " ".join(f"{value:7.1f}" for value in (*over, waits, copies, messages, wakes))
            print(f"{mode:10} {ranks:4} {shown}", flush=True)
            for rank, cost in enumerate(costs if args.names else []):
                for what, more in (("operators", cost.operators - base.operators), ("calls", cost.calls - base.calls)):
                    print(f"  rank {rank}, {what}:")
                    for name, count in more.most_common(args.names):
                        print(f"    {count / STEPS:8.1f} {name}")


if __name__ == "__main__":
    main()
