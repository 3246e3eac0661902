"""Which gradients travel together: all of them, once, in order, as few as the cap allows."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager.gradient_format import by_size

GRADIENTS = st.lists(st.tuples(st.sampled_from(["float32", "float64"]), st.integers(0, 50)), max_size=30)


@given(GRADIENTS, st.sampled_from([1e-6, 1.0, 40.0, 100.0, math.inf]))
def test_buckets_hold_every_gradient_once_and_no_more_than_they_may(gradients, cap):
    buckets = by_size(gradients, cap)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(gradients)))
    assert [bucket[0] for bucket in buckets] == sorted(bucket[0] for bucket in buckets)
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({gradients[place][0] for place in bucket}) == 1
        assert len(bucket) == 1 or sum(gradients[place][1] for place in bucket) <= cap
    for kind in ("float32", "float64"):
        mine = [bucket for bucket in buckets if gradients[bucket[0]][0] == kind]
        for one, after in itertools.pairwise(mine):  # none is begun before the one before it is full
            assert sum(gradients[place][1] for place in [*one, after[0]]) > cap


def test_a_large_gradient_has_a_bucket_of_its_own():
    assert by_size([("a", 5), ("a", 30), ("b", 5), ("a", 5)], 10) == [[0], [1], [2], [3]]
