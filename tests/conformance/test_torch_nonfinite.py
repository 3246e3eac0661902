"""The look for NaN on a GPU: which vectors are emptied, and when that is told. Reference: ``torch.isfinite``."""

from __future__ import annotations

import pytest
import torch

from hvd_async.torch.nonfinite import Checks
from hvd_async.torch.testing import FakeGpu

BUCKETS, ELEMENTS = 5, 7
SPOILT = {"nothing": {}, "NaN": {1: float("nan")}, "infinities": {0: float("inf"), 4: float("-inf")}}


@pytest.fixture
def gpu():
    with (found := FakeGpu()).installed():
        yield found


def vectors(spoilt: dict[int, float]) -> dict[int, torch.Tensor]:
    made = {bucket: torch.full((ELEMENTS,), 1e30) for bucket in range(BUCKETS)}
    for bucket, value in spoilt.items():
        made[bucket][3] = value
    return made


@pytest.mark.parametrize("spoilt", SPOILT.values(), ids=SPOILT)
def test_vectors_that_are_not_finite_are_emptied_and_told_once(gpu, spoilt):
    checks = Checks(BUCKETS)
    for _ in range(3):
        step = vectors(spoilt)
        for bucket in reversed(range(BUCKETS)):
            checks.empty_unless_finite(bucket, step[bucket])
        checks.send()
        for bucket, vector in step.items():
            assert vector.tolist() == [0.0 if bucket in spoilt else vectors({})[bucket][0].item()] * ELEMENTS
        assert sorted(checks.emptied()) == sorted(spoilt)
        assert checks.emptied() == []


def test_flags_of_another_stream_are_others(gpu):
    """A kernel on one stream may not write flags that another stream makes zero: nothing orders the two."""
    checks, step = Checks(BUCKETS), vectors({1: float("nan"), 2: float("nan")})
    for bucket in (1, 2):
        with gpu.on(gpu.new_stream(step[bucket].device)):
            checks.empty_unless_finite(bucket, step[bucket])
    assert len(checks._queued) == 2
    assert checks.emptied() == [1, 2]
