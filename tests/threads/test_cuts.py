"""Cuts of gossip by ranks as threads: they change nothing, and a job resumed from one continues alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.config import ALGORITHMS
from tests.threads.gossip_workload import Record, check_sums, job, run

OUTER = [name for name, algorithm in ALGORITHMS.items() if algorithm.outer is not None]
EVEN, UNEVEN = (5, 5, 5, 5), (3, 6, 4, 5)
PUSHES = [("sgp", "star"), ("sgp", "exponential"), ("dpsgd", "ring")]
MESSAGES: list[dict[str, Any]] = [
    {"average_every": 4},
    {"average_every": 4, "compression": "fp16"},
    {"compression": "int8"},
    {"local_size": 2},
    {"local_size": 2, "compression": "int8"},
    {"local_size": 2, "compression": "bf16", "average_every": 4},
]
DIFFUSED: list[dict[str, Any]] = [
    {}, {"average_every": 4}, {"compression": "fp16"}, {"compression": "int8"}, {"gossip_every": 3},
]  # fmt: skip
AVERAGED = {"average_every": 4, "max_staleness": 3, "fragments": 2, "elements": 11}
RESUMED: list[tuple[str, str | None, tuple[int, ...], dict[str, Any]]] = [
    *((*push, first, more) for (push, more), first in zip(product(PUSHES, MESSAGES), cycle((EVEN, UNEVEN, UNEVEN)))),
    *(("exact-diffusion", "ring", first, more) for first, more in zip(cycle((EVEN, UNEVEN, (7, 7, 2, 7))), DIFFUSED)),
    ("noloco", "random-pairs", EVEN, {"gossip_every": 2}),
    ("noloco", "random-pairs", UNEVEN, {"gossip_every": 2, "compression": "bf16"}),
    *(
        (name, None, first, {**AVERAGED, "compression": compression})
        for name in OUTER
        for first, compression in (((6, 6, 6), "none"), ((3, 9, 5), "int8"), ((0, 13, 1), "bf16"))
    ),
]
"""Algorithm, graph, steps before the cut, and options."""


def paths(records: Sequence[Record]) -> list[list[bytes]]:
    """Return what each rank's model held after each step."""
    return [[z.tobytes() for segment in record.segments for z in segment.path] for record in records]


@pytest.mark.parametrize(("algorithm", "graph", "first", "more"), RESUMED, ids=str)
def test_a_job_that_is_resumed_after_a_cut_continues_as_if_it_had_not_stopped(algorithm, graph, first, more):
    if "local_size" in more and len(set(first)) > 1:
        more = {**more, "local_size": 4}  # with other hosts, whose messages wait, there is nothing to save
    rest = (9,) * len(first)
    whole = run(job((first, rest), algorithm, graph, cuts=frozenset({0}), **more))
    resumed = run(job(rest, algorithm, graph, **more), resumed=[record.saved[0] for record in whole])
    for before, after in zip(whole, resumed, strict=True):
        assert [z.tobytes() for z in before.segments[1].path] == [z.tobytes() for z in after.segments[0].path]
        np.testing.assert_array_equal(before.segments[1].z, after.segments[0].z)
        assert after.saved == [None]  # after a drain: nothing but the weights
    if algorithm in OUTER:
        assert len({saved.kept.copies["outer anchor"].tobytes() for record in whole if (saved := record.saved[0])}) == 1
    elif algorithm != "noloco":
        check_sums(job((first, rest), algorithm, graph, cuts=frozenset({0}), **more), whole)


UNCHANGED: list[tuple[int, str, str | None, dict[str, Any]]] = [
    (8, "sgp", "exponential", {}),
    (8, "dpsgd", "complete", {}),
    (8, "sgp", "exponential", {"compression": "int8"}),
    (8, "sgp", "exponential", {"local_size": 2}),
    (8, "sgp", "exponential", {"average_every": 3}),
    (8, "sgp", "exponential", {"local_size": 2, "compression": "int8", "average_every": 3}),
    (8, "allreduce", None, {"average_every": 4}),
    (8, "sgp", "exponential", {"gossip_every": 3}),
    (8, "dpsgd", "complete", {"gossip_every": 2}),
    (8, "sgp", "exponential", {"local_size": 2, "gossip_every": 3}),
    *((5, "exact-diffusion", "ring", more) for more in ({}, {"average_every": 3}, *DIFFUSED[3:])),
    (5, "noloco", "random-pairs", {"gossip_every": 3}),
    *((3, name, None, {"average_every": 4, "max_staleness": 0}) for name in OUTER),
    *((3, name, None, {"average_every": 4, "max_staleness": 3, "fragments": 3}) for name in OUTER),
    *((3, name, None, {"average_every": 4, "compression": "int8"}) for name in OUTER),
]
"""Ranks, algorithm, graph and options."""


@pytest.mark.parametrize(("size", "algorithm", "graph", "more"), UNCHANGED, ids=str)
def test_cuts_change_nothing(size, algorithm, graph, more):
    """A graph of several phases does not begin again, nor what is counted for ``average_every``."""
    steps, own = 11 if algorithm in OUTER else 7, {"cuts": frozenset(range(11)), **more}
    often = run(job(((1,) * size,) * steps, algorithm, graph, **own))
    assert paths(often) == paths(run(job(((steps,) * size,), algorithm, graph, **own)))


@pytest.mark.parametrize(
    ("algorithm", "graph", "more"), [("exact-diffusion", "ring", {}), ("noloco", "random-pairs", {"gossip_every": 2})]
)
def test_what_was_saved_does_not_change_afterwards(algorithm, graph, more):
    one = job(((4,) * 3, (4,) * 3), algorithm, graph, cuts=frozenset({0}), **more)
    whole, first = (run(each)[0].saved[0] for each in (one, dataclasses.replace(one, steps=one.steps[:1])))
    assert whole is not None
    assert first is not None
    assert whole.kept.copies.keys() == first.kept.copies.keys() != set()
    for name, copy in whole.kept.copies.items():
        np.testing.assert_array_equal(copy, first.kept.copies[name])
