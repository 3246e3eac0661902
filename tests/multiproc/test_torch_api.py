"""Horovod's API without Horovod: each result is that of Horovod itself, from the same program."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from launch import Job, RunJob

pytestmark = pytest.mark.multiproc

CASES = (
    "places", "reductions", "forms_of_reductions", "gathers", "broadcasts", "exchanges", "scatters", "gradients",
    "sets", "objects", "joins", "errors", "shut down",
)  # fmt: skip


@pytest.fixture(scope="module")
def jobs(forked: RunJob) -> Callable[[int, str], Job]:
    """The job of a number of ranks over Horovod ("gloo") or "torch", which runs once."""
    return functools.cache(lambda ranks, transport: forked("torch", "torch_api.py", ranks, transport=transport))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_results_are_horovods(jobs: Callable[[int, str], Job], case: str, ranks: int) -> None:
    ours = jobs(ranks, "torch").check().case(case)
    for own, expected in zip(ours, jobs(ranks, "gloo").case(case), strict=True):
        assert own["found"] == expected["found"]
