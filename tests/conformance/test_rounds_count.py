"""``optimizer.rounds`` grows with the steps of every algorithm, so that a loop until round ``n`` ends."""

from __future__ import annotations

import pytest

from hvd_async.testing import Cluster
from tests.conformance.simple_ranks import KerasRank, TorchRank, both, every_algorithm
from tests.conftest import LONG_RUN

ROUNDS = 6
STEPS = 400
"""More than any algorithm needs."""


@every_algorithm
@pytest.mark.parametrize(
    ("made", "size"), [(TorchRank, 1), (TorchRank, 2), (KerasRank, 2)] if LONG_RUN else [(TorchRank, 2)]
)
def test_a_loop_until_this_many_rounds_ends(made, size, wrapper, options):
    def work(rank: int) -> tuple[int, int]:
        trainer = made(wrapper, options, rank)
        opt, step = trainer.opt, trainer.step
        steps = 0
        while opt.rounds < ROUNDS and steps < STEPS:
            before = opt.rounds
            step()
            steps += 1
            assert opt.rounds >= before
        opt.drain()
        return steps, opt.rounds

    for steps, rounds in Cluster(size).run(work):
        assert steps < STEPS
        assert rounds >= ROUNDS


@every_algorithm
def test_a_rank_that_is_left_alone_gets_to_its_rounds(wrapper, options):
    """The other rank has run out of data after two steps."""

    def work(rank: int) -> int:
        trainer = TorchRank(wrapper, options, rank)
        opt, step = trainer.opt, trainer.step
        steps = 0
        while steps < (2 if rank else STEPS) and opt.rounds < 2 * ROUNDS:
            step()
            steps += 1
        opt.drain()
        return steps

    steps = Cluster(2).run(work)[0]
    assert steps < STEPS


@both
@pytest.mark.parametrize("algorithm", ["local", "sgp"])
def test_averages_of_drains_are_rounds(made, algorithm):
    """With a drain before each average is due, a loop until round ``n`` ends as well."""

    def work(rank: int) -> int:
        trainer = made("GossipOptimizer", {"algorithm": algorithm, "average_every": 8}, rank)
        opt, step = trainer.opt, trainer.step
        for _ in range(3):
            before = opt.rounds
            step()
            opt.drain()
            assert opt.rounds > before
        before = opt.rounds
        opt.drain()  # nothing has moved: nothing is averaged
        assert opt.rounds == before
        return int(opt.rounds)

    counts = Cluster(2).run(work)
    assert counts[0] == counts[1] >= 3
