"""Two optimizers, of which rank 0 gives up the first: ``several.py KIND deleted|drained twice|drained in reverse``."""

from __future__ import annotations

import gc
import sys

import lifetimes
from common import Report

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError


def main() -> None:
    kind, case = sys.argv[1:]
    hvd.init()
    gives_up, report = hvd.rank() == 0, Report(hvd.rank())
    (model, first), (other, second) = lifetimes.wrapped(kind), lifetimes.wrapped(kind)
    for each in ((model, first), (other, second)):
        lifetimes.steps(*each)
    if case == "deleted":
        first.cut()
    elif gives_up:
        first.discard()
    kept = [] if gives_up else [first]
    del first
    gc.collect()
    if case == "deleted":
        for optimizer in kept:
            lifetimes.steps(model, optimizer)
        lifetimes.steps(other, second)
        second.drain()
    else:
        ends = [*kept, second] if case == "drained twice" else [second, *kept]
        try:
            for optimizer in ends:
                optimizer.drain()
        except ReplicaStateError as error:
            report.put("error", text=str(error))
    report.put("done")
    hvd.shutdown()


if __name__ == "__main__":
    main()
