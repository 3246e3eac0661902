"""An interrupt at every line of a step: gradients are applied once, no later than was agreed, or the rank says why not.

| interrupted                                   | what holds                                                        |
|-----------------------------------------------|-------------------------------------------------------------------|
| before anything was handed over               | the step was not taken: the next one is it                        |
| while a bucket or a step was handed over      | this rank is broken, and says so                                  |
| while waiting for the round                   | the next step ends this one, and brings no gradient               |
| between waiting and applying, between rounds  | the rounds that were not applied still wait; the next step does   |
| while a round is applied or counted           | this rank is broken, and says so                                  |
| while a drain is begun or ended               | broken, or to be called again                                     |
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.gradient_format import GradientFormat, ReducedRound
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conftest import LONG_RUN
from tests.threads.interrupting import Interrupt

STEPS = 4
EVERY = 1 if LONG_RUN else 5
"""In a long run every line is interrupted, otherwise every fifth."""


def train(
    interrupt: Interrupt, config: EagerConfig, early: bool, end: str
) -> tuple[str, EagerWorker, list[ReducedRound]]:
    """A few steps of which the second is interrupted, or the drain; how it ended, and what was applied."""
    engine = local_engine()
    assert engine is not None
    empty, applied = np.zeros(2, np.float32), list[ReducedRound]()
    wire = GradientFormat(zeros=lambda bucket: empty, nbytes=(8, 8))
    worker = EagerWorker(engine, config, wire, lambda flush: None, applied.append)
    worker.connect(["w"], [1])

    def step(number: int) -> None:
        counted = [r.index for r in applied] == list(range(1, 1 + worker.version))
        assert counted or not worker.whole.fine, "a version that is not what was applied, and nothing says so"
        rows: dict[int, Any] = {b: np.array([1.0, 1.0], np.float32) for b in range(2) if b not in worker.gone}
        if early and 1 in rows and worker.ready:
            worker.hand_over(1, rows.pop(1))
        worker.step(rows, [{"lr": 1.0}])

    def interrupted(call: Any) -> None:
        try:
            with interrupt.armed():
                call()
        except KeyboardInterrupt:
            return

    try:
        for number in range(STEPS):
            if number == 1 and end == "step":
                interrupted(lambda: step(1))
            else:
                step(number)
        if end == "drain":
            interrupted(worker.drain)
        if worker.stats().total_produced is None:
            worker.drain()
    except ReplicaStateError as error:
        return "broken" if "restart from a checkpoint" in str(error) else str(error), worker, applied
    return "right", worker, applied


@pytest.mark.parametrize(
    ("config", "early"),
    [
        (EagerConfig("all", 0, 0.0, 0, 2), False),
        (EagerConfig("solo", 2, 0.0, 0, 2), True),
        (EagerConfig("solo", 3, 0.0, 0, 2, "rounds"), True),
    ],
    ids=["all", "early", "pace-rounds"],
)
@pytest.mark.parametrize("end", ["step", "drain"])
def test_an_interrupt_at_any_line_is_survived_or_said(config, early, end):
    seen: set[str] = set()
    for line in range(0, 10_000, EVERY):
        interrupt = Interrupt(line)
        ((how, worker, applied),) = Cluster(1).run(lambda rank, i=interrupt: train(i, config, early, end), timeout=30)
        if not interrupt.struck:
            assert line > 100, "next to nothing was traced"
            break
        seen.add(how)
        if how == "right":
            stats = worker.stats()
            assert [r.index for r in applied] == list(range(1, len(applied) + 1))
            for bucket in range(2):
                assert sum(r.sums[bucket][0] for r in applied) == sum(r.counts[bucket] for r in applied)
            assert stats.gradients_applied == stats.gradients_produced == stats.total_produced
            assert STEPS - 1 <= stats.gradients_applied <= STEPS
            assert max(stats.staleness, default=0) <= config.max_staleness
    assert seen == {"right", "broken"}


@pytest.mark.parametrize("name", ["whole.py", "runtime/no_such.py", "no_such_folder"])
def test_a_name_that_selects_no_file_is_refused(name):
    with pytest.raises(ValueError, match="Was it renamed"):
        Interrupt(0, without=("runtime/memory.py", name))
