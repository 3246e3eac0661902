"""Names that are ours instead of Horovod's, wrong use, starting again: ``--framework torch|tensorflow``, 2 ranks."""

from __future__ import annotations

import importlib
from typing import Any

from common import BINDINGS, Baton, Report, arguments, meet, raised, whole_expected


def train(whole: Any, rank: int, first: int, steps: int) -> None:
    """Steps ``first`` + 1 to ``first`` + ``steps``."""
    for step in range(first + 1, first + steps + 1):
        whole.step(rank, step)


def join(binding: Any, report: Report, rank: int) -> None:
    """Drains; rank 1, which has fewer batches, comes last."""
    whole = binding.WholeTraining(quorum="solo")
    train(whole, rank, 0, 3 - 2 * rank)
    here = Baton("join")
    if rank == 0:
        here.lay_when_done(0)
    else:
        here.wait()
    report.put("join", last=binding.hvd.join(), weights=whole.weights(), expected=whole_expected([3, 1]))


def start_again(binding: Any, report: Report, rank: int) -> None:
    """shutdown() and init() in one process: a new optimizer works, and one from before continues."""
    old = binding.WholeTraining(quorum="solo")
    train(old, rank, 0, 3)
    binding.hvd.shutdown()
    after_shutdown = old.weights()
    meet("down", rank, 2)  # a rank that begins again sooner may find the other one's former address
    binding.hvd.init()
    new = binding.WholeTraining(quorum="majority")
    train(new, rank, 0, 4)
    new.optimizer.drain()
    train(old, rank, 3, 2)
    old.optimizer.drain()
    report.put(
        "start again",
        after_shutdown=after_shutdown,
        after_shutdown_expected=whole_expected([3, 3]),
        new=new.weights(),
        new_expected=whole_expected([4, 4]),
        old=old.weights(),
        old_expected=whole_expected([5, 5]),
        counts=[old.optimizer.stats().steps, old.optimizer.stats().gradients_produced],
    )


def main() -> None:
    framework = arguments("framework").framework
    binding, own = (importlib.import_module(name) for name in BINDINGS[framework])
    too_early = raised(binding.WholeTraining)
    binding.hvd.init()
    rank = binding.hvd.rank()
    report = Report(rank)
    report.put("too early", **too_early)
    join(binding, report, rank)
    own.run(report)
    start_again(binding, report, rank)
    binding.hvd.shutdown()
    report.put("end")


if __name__ == "__main__":
    main()
