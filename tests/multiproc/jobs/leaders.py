"""``LeaderOptimizer`` on real ranks: both algorithms, a rank that sleeps, errors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from common import Baton, Part, Report, after_cut, meet, raised
from leader_table import PATIENCE, STEPS, cases, pairs

from tests.conformance.leader_reference import Following

Make = Callable[..., Any]
"""Makes one rank's model and optimizer: a binding's ``LeastSquares``."""


def train(report: Report, rank: int, name: str, following: Following, make: Make) -> None:
    """A case, with what the test needs to replay it."""
    trainer = make(loss_of=following.loss_of, **following.options())
    optimizer = trainer.optimizer
    worker = optimizer._async.worker_now()
    log = worker.log = []
    optimizer.cut()  # all ranks log from here on
    for step in range(1, STEPS + 1):
        trainer.step(rank, step)
    before = trainer.weights()
    optimizer.cut()
    ends = after_cut(trainer)
    stats = optimizer.stats()
    report.put(
        name,
        before=before,
        log=[_plain(entry) for entry in log],
        **ends,
        pulls=stats.pulls,
        led=sorted(stats.led),
    )


def _plain(entry: tuple[Any, ...]) -> list[Any]:
    """As JSON: dictionaries as pairs."""
    return [list(part.items()) if isinstance(part, dict) else part for part in entry]


def asleep(report: Report, rank: int, size: int, make: Make) -> None:
    """Rank 1 takes no step between its first and its second until it has seen a pull that rank 0 has led.

    Meanwhile the others step, until rank 1 says that it has: so nothing depends on who is quicker. Rank 0 has the
    lowest loss, which is in its mean loss for as long as they step.
    """
    options = {"algorithm": "lsgd", "global_period": 2, "loss_window": 10**6}
    trainer = make(loss_of=lambda x, rank, step: float(rank), group=size, **options)
    woken = Baton("asleep.woken")
    trainer.step(rank, 1)
    optimizer = trainer.optimizer
    pulls, step = 0, 2
    if rank == 1:
        worker = optimizer._async.worker_now()
        worker.engine.wait(lambda: 0 in optimizer.stats().led)
        pulls = optimizer.stats().pulls
        woken.lay()
        trainer.step(rank, step)
    else:
        deadline = time.monotonic() + PATIENCE
        while not woken.laid and time.monotonic() < deadline:
            trainer.step(rank, step)
            step += 1
    waits = optimizer.stats().wait_s
    meet("asleep", rank, size)
    optimizer.drain()
    report.put("asleep", pulls=pulls, waits=waits, led=sorted(optimizer.stats().led))


def no_process_sets(report: Report, rank: int, size: int, make: Make) -> None:
    """Horovod was started without them: a group of its own is refused with a hint, on every rank of the job."""
    trainer = make(loss_of=lambda x, rank, step: 1.0, group=pairs(size))
    report.put("no process sets", error=raised(lambda: trainer.step(rank, 1))["text"])


def run(binding: Any, report: Report, part: Part) -> None:
    """The cases that go with the process sets of the job; not a few: the others too."""
    rank, size = binding.hvd.rank(), binding.hvd.size()
    make = functools.partial(binding.LeastSquares, binding.hvd.LeaderOptimizer)
    for name, following in cases(size, part.sets).items():
        train(report, rank, name, following, make)
    if part.share == "few":
        return
    if part.sets == "none":
        no_process_sets(report, rank, size, make)
    else:
        asleep(report, rank, size, make)
