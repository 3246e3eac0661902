"""Horovod's API without Horovod: each result is that of Horovod itself, from the same program."""

from __future__ import annotations

import pytest
from launch import RunJob

pytestmark = pytest.mark.multiproc

CASES = (
    "places", "reductions", "forms_of_reductions", "gathers", "broadcasts", "exchanges", "scatters", "gradients",
    "sets", "objects", "joins", "errors", "shut down",
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_results_are_horovods(job: RunJob, case: str, ranks: int) -> None:
    theirs = job("torch_api.py", ranks, "gloo", server="torch").case(case)
    ours = job("torch_api.py", ranks, "torch").check().case(case)
    for own, expected in zip(ours, theirs, strict=True):
        assert own["found"] == expected["found"]
