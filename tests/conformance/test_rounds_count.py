"""``optimizer.rounds`` grows with the steps of every algorithm, so that a loop until round ``n`` ends."""

from __future__ import annotations

import pytest

from hvd_async.testing import Cluster
from tests.conformance.gossip_ranks import alike
from tests.conformance.weight_ranks import KerasRank, TorchRank, both, every_algorithm
from tests.conftest import LONG_RUN

ROUNDS = 8
STEPS = 400
"""More than any algorithm needs."""


@every_algorithm
@pytest.mark.parametrize(
    ("binding", "size", "left"),
    [
        (TorchRank, 2, STEPS),
        (TorchRank, 2, 2),
        *([(TorchRank, 1, STEPS), (KerasRank, 2, STEPS)] if LONG_RUN else []),
    ],
)
def test_a_loop_until_this_many_rounds_ends(binding, size, left, wrapper, options):
    """Also on a rank that is left alone, since another runs out of data after two steps."""

    def work(rank: int) -> tuple[int, int]:
        one = binding(binding.least_squares(size), rank, wrapper=wrapper, **options)
        while one.opt.rounds < ROUNDS and len(one.path) < (left if rank else STEPS):
            before = one.opt.rounds
            one.step()
            assert one.opt.rounds >= before
        one.opt.drain()
        return len(one.path), one.opt.rounds

    for steps, rounds in Cluster(size).run(work)[: size if left == STEPS else 1]:
        assert steps < STEPS
        assert rounds >= ROUNDS


@both
@pytest.mark.parametrize("algorithm", ["local", "sgp"])
def test_averages_of_drains_are_rounds(binding, algorithm):
    """With a drain before each average is due, a loop until round ``n`` ends as well."""

    def work(rank: int) -> int:
        one = binding(binding.least_squares(2), rank, algorithm=algorithm, average_every=8)
        for _ in range(3):
            before = one.opt.rounds
            one.train(1).opt.drain()
            assert one.opt.rounds > before
        before = one.opt.rounds
        one.opt.drain()  # nothing has moved: nothing is averaged
        assert one.opt.rounds == before
        return int(before)

    assert alike(work, 2) >= 3
