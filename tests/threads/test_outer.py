"""Local steps and outer optimizers of ranks as threads: every step equals the reference, whatever comes late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.outer_reference import Outer, train
from tests.threads.gossip_workload import EXACT, Job, Record, job, run

ALGORITHMS = ["local", "slowmo", "diloco"]
UNEVEN = [((13, 0, 3, 8),), ((0, 0, 0, 0), (9, 2, 2, 1), (0, 3, 0, 0)), ((9, 9, 9, 9), (1, 7, 12, 2), (8, 8, 8, 8))]


def outer_of(one: Job) -> Outer:
    config = one.plan.config
    return Outer(
        *(config.algorithm, config.average_every, config.max_staleness, config.fragments),
        *(config.outer_lr, config.outer_momentum),
    )


def check(one: Job, records: list[Record]) -> None:
    """Each step and drain equals the reference; ranks that drained have the same bits."""
    problem, outer = one.problem, outer_of(one)
    for end, counts in enumerate(one.steps):
        segments = [record.segments[end] for record in records]
        outcome = train(problem, counts, outer)
        for segment, path in zip(segments, outcome.path, strict=True):
            np.testing.assert_allclose(np.array(segment.path), np.array(path), **EXACT)
            np.testing.assert_allclose(segment.z, outcome.drained(), **EXACT)
            assert segment.z.tobytes() == segments[0].z.tobytes()
        problem = problem.after(outcome)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "more", [{"max_staleness": 0}, {}, {"max_staleness": 2, "fragments": 2}, {"fragments": 3}], ids=str
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_step_equals_the_reference(algorithm: str, more: dict[str, Any], size: int):
    one = job([13] * size, algorithm, None, average_every=4, **more)
    records = run(one)
    check(one, records)


@pytest.mark.parametrize("steps", UNEVEN)
@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_uneven_steps_and_several_drains(algorithm: str, late: int, steps: Any):
    one = job(steps, algorithm, None, average_every=4, max_staleness=late, fragments=2)
    check(one, run(one, jitter=0.001))
