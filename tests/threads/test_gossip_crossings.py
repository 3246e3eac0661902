"""Crossings of gossip's options: algorithm, compression, averages of all ranks, staleness, hosts and their ranks, ends.

Each row of the table is one job that equals the float64 reference, step by step and at two drains, and one in which
ranks end early, cut and drain, and nothing is lost or counts twice.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.config import COMPRESSIONS
from tests.conftest import LONG_RUN
from tests.covering import covering
from tests.threads.gossip_holdups import as_late_as_allowed
from tests.threads.gossip_workload import Job, check, check_sums, job, run

ALGORITHMS = (("sgp", "star", 0), ("osgp", "star", 1), ("osgp", "exponential", 2), ("dpsgd", "ring", 0))
"""With a graph and a staleness. On a star of 3 hosts push-sum weights are not 1."""
HOSTS = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2))
"""Hosts, and ranks of each."""
EVERY = (0, 3)


@dataclass(frozen=True)
class Crossing:
    """One row of the table."""

    algorithm: tuple[str, str, int]
    compression: str
    average_every: int
    hosts: int
    ranks: int

    def __str__(self) -> str:
        name, graph, late = self.algorithm
        return f"{name}-{graph}-{late}-{self.compression}-{self.average_every}-{self.hosts}x{self.ranks}"

    def job(self, counts: tuple[tuple[int, ...], ...], **options: Any) -> Job:
        """Return a job whose ranks take these steps before each end; each tuple is repeated for further ranks."""
        name, graph, late = self.algorithm
        size = self.hosts * self.ranks
        steps = [tuple(itertools.islice(itertools.cycle(each), size)) for each in counts]
        return job(
            steps, name, graph, max_staleness=late, compression=self.compression, average_every=self.average_every,
            local_size=self.ranks, weights="metropolis" if name == "dpsgd" else "uniform", elements=7, **options,
        )  # fmt: skip


TABLE = [
    Crossing(algorithm, compression, every, hosts, ranks)
    for algorithm, compression, every, (hosts, ranks) in covering(
        (ALGORITHMS, tuple(COMPRESSIONS), EVERY, HOSTS), 4 if LONG_RUN else 2
    )
]
"""Any two options in all their values; all four in a long run."""


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_step_equals_the_reference(row):
    one = row.job(((7,), (4,)))
    records = run(one, tweak=as_late_as_allowed if row.ranks > 1 else lambda worker: None)
    check(one, records)
    for place, record in enumerate(records):
        first = records[place - place % row.ranks]
        for own, others in zip(record.segments, first.segments, strict=True):
            np.testing.assert_array_equal(own.path, others.path)
        assert record.stats.averagings == (7 // 3 + 4 // 3 if row.average_every else 0)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_ranks_that_end_early_cut_and_drain_lose_nothing(row):
    """Hosts whose ranks all are done before, and hosts of which one goes on."""
    one = row.job(((4,), (5, 0, 3, 8), (2, 6, 1), (6, 6, 2, 2, 4)), cuts=frozenset({0, 1}), saves=False)
    check_sums(one, run(one, jitter=0.001))
