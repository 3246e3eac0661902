"""``optimizer.rounds`` grows with the steps of every algorithm, so that a loop until round ``n`` ends."""

from __future__ import annotations

import pytest

from hvd_async.testing import Cluster
from tests.conformance.weight_ranks import KerasRank, TorchRank, both, every_algorithm
from tests.conftest import LONG_RUN

ROUNDS = 6
STEPS = 400
"""More than any algorithm needs."""


@every_algorithm
@pytest.mark.parametrize(
    ("binding", "size"), [(TorchRank, 1), (TorchRank, 2), (KerasRank, 2)] if LONG_RUN else [(TorchRank, 2)]
)
def test_a_loop_until_this_many_rounds_ends(binding, size, wrapper, options):
    def work(rank: int) -> tuple[int, int]:
        one = binding(binding.least_squares(size), rank, wrapper=wrapper, **options)
        while one.opt.rounds < ROUNDS and len(one.path) < STEPS:
            before = one.opt.rounds
            one.step()
            assert one.opt.rounds >= before
        one.opt.drain()
        return len(one.path), one.opt.rounds

    for steps, rounds in Cluster(size).run(work):
        assert steps < STEPS
        assert rounds >= ROUNDS


@every_algorithm
def test_a_rank_that_is_left_alone_gets_to_its_rounds(wrapper, options):
    """The other rank has run out of data after two steps."""

    def work(rank: int) -> int:
        one = TorchRank(TorchRank.least_squares(2), rank, wrapper=wrapper, **options)
        while len(one.path) < (2 if rank else STEPS) and one.opt.rounds < 2 * ROUNDS:
            one.step()
        one.opt.drain()
        return len(one.path)

    assert Cluster(2).run(work)[0] < STEPS


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

    counts = Cluster(2).run(work)
    assert counts[0] == counts[1] >= 3
