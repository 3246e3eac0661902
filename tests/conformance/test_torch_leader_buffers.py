"""torch: batch-norm statistics of ranks that follow: averaged at pulls and at ends, or each rank's own."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.testing import Cluster
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_drive import TIMEOUT, wait_for_pulls
from tests.conformance.leader_reference import ALL, Following, drawn, several
from tests.conformance.reference import Array
from tests.conformance.torch_leader_ranks import NormedTrainer

SGD = CASES[0]
PAIRS = Following("lsgd", several(4, 2), 3, 8)
ELASTIC = Following("easgd", global_period=3)


def trainer(rank: int, following: Following, size: int = 4, **options: Any) -> NormedTrainer:
    return NormedTrainer(least_squares(size, SGD), rank, following, **options)


class SpiedLog(list[Any]):
    """A receiver's log that keeps the statistics that each pull was sent with, and those that steps took up."""

    def __init__(self, receiver: Any) -> None:
        super().__init__()
        self.receiver, self.sent, self.taken = receiver, dict[int, Array](), list[tuple[int, Array]]()
        settle = receiver.merge_statistics

        def spied(own: torch.Tensor, step: int, clip: Any) -> Any:
            averages: list[Any] = []

            def seen(vector: Any, one: Any, other: Any) -> Any:
                averages.append(other)
                return clip(vector, one, other)

            settled = settle(own, step, seen)
            if settled is not None:
                averaged = averages[0] if averages else settled
                self.taken.append((step, averaged.double().numpy().copy()))
            return settled

        receiver.merge_statistics = spied

    def append(self, entry: Any) -> None:
        if entry[0] == "sent":
            self.sent[entry[1]] = self.receiver._statistics.double().numpy().copy()
        super().append(entry)


def average(parts: list[Array]) -> Array | None:
    """Of those ranks that have something to say (the last element)."""
    total = sum(parts)
    return total[:-1] / total[-1] if total[-1] else None


def spied(rank: int, following: Following, together: threading.Barrier, **options: Any) -> tuple[NormedTrainer, Any]:
    own = trainer(rank, following, **options)
    log = own.worker().receiver.log = SpiedLog(own.worker().receiver)
    together.wait(TIMEOUT)
    return own, log


# -- at pulls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
def test_in_step_each_pull_averages_over_its_ranks_and_the_next_step_takes_it_up(following):
    """By hand: the group's at its pulls, all ranks' at theirs; counters are each rank's own."""

    def train(rank: int) -> tuple[list[Array], int]:
        own, path = trainer(rank, following), []
        for step in range(1, 24):
            own.step()
            path.append(own.mean())
            wait_for_pulls(own.worker(), following.pulls(rank, step))
        return path, int(own.norm.num_batches_tracked)

    paths, counts = zip(*Cluster(4).run(train), strict=True)
    assert counts == (23,) * 4
    means, come = np.zeros((4, 2)), list[Any]([None] * 4)
    for step in range(1, 24):
        for rank in range(4):
            moved = np.array([2.0**rank, 0.25 * step])
            own = means[rank] + moved
            if come[rank] is not None:  # with this step's move, but not beyond what it would have been
                own = np.clip(come[rank] + moved, np.minimum(own, come[rank]), np.maximum(own, come[rank]))
            means[rank], come[rank] = own, None
            np.testing.assert_allclose(paths[rank][step - 1], own, rtol=1e-6, err_msg=f"rank {rank}, step {step}")
        local = [group for group in following.groups if following is PAIRS and step % 3 == 0]
        for ranks in [*local, *([(0, 1, 2, 3)] if step % following.global_period == 0 else [])]:
            for rank in ranks:
                come[rank] = means[list(ranks)].mean(axis=0)


@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
@pytest.mark.parametrize("sick", [(), (2,), (0, 1)], ids=str)
def test_whatever_comes_late_a_step_takes_up_what_a_pull_has_averaged(following, sick):
    """Over the ranks whose statistics were finite when they sent them: NaN of a rank goes nowhere."""
    together = threading.Barrier(4)

    def train(rank: int) -> tuple[Any, list[Array]]:
        own, log = spied(rank, following, together)
        for step in range(1, 41):
            own.gradient()
            if rank in sick and step % 3:
                own.norm.running_mean[0] = torch.nan
            own.opt.step()
            if step % 5 == 0:  # 20 steps of all have made one more due
                together.wait(TIMEOUT)
                wait_for_pulls(own.worker(), step // 5)
        own.opt.drain()
        assert np.isfinite(own.mean()).all()
        return log

    logs = Cluster(4, jitter=0.002).run(train)
    for rank, log in enumerate(logs):
        known = {pull: average([other.sent[pull] for other in logs if pull in other.sent]) for pull in log.sent}
        assert [step for step, _ in log.taken] == [entry[1] for entry in log if entry[0] == "averaged"]
        for step, taken in log.taken:
            before = log[: log.index(("averaged", step))]
            sent = [entry[1] for entry in before if entry[0] == "sent"]
            fits = [pull for pull in sent if known[pull] is not None and np.allclose(known[pull], taken, rtol=1e-6)]
            assert fits, f"rank {rank} takes up at step {step} what no pull has averaged"
            assert np.isfinite(taken).all()
        assert log.taken
        if rank not in sick:
            assert all(part[-1] == 1.0 for part in log.sent.values())


def test_statistics_that_are_nan_everywhere_stay_where_they_are():
    def train(rank: int) -> bool:
        own = trainer(rank, dataclasses.replace(ELASTIC, global_period=1))
        for step in range(1, 4):
            own.gradient()
            own.norm.running_mean.fill_(torch.nan)
            own.opt.step()
            wait_for_pulls(own.worker(), step)
        return bool(torch.isnan(own.norm.running_mean).all())

    assert Cluster(4).run(train) == [True] * 4


@pytest.mark.parametrize("steps", [(0, 9, 9, 9), (9, 9, 9, 0), (0, 0, 30, 0)], ids=str)
@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
def test_a_rank_without_a_batch_holds_no_average_up(following, steps):
    """Its statistics are what they were at first; it takes part all the same."""

    def train(rank: int) -> tuple[list[float], int]:
        own = trainer(rank, following).train(steps[rank])
        own.opt.drain()
        return own.mean().tolist(), own.opt.stats().pulls

    ends = Cluster(4).run(train, timeout=20)
    assert len({tuple(mean) for mean, _ in ends}) == 1
    assert max(pulls for _, pulls in ends) > 0


def test_a_rank_that_rests_after_a_drain_brings_what_all_hold_since():
    """And not what it had before."""
    after, together = threading.Barrier(2), threading.Barrier(2)
    following = Following("easgd", global_period=2)

    def train(rank: int) -> Any:
        own, log = spied(rank, following, together, size=2)
        own.train(1).opt.drain()
        drained, first, pulls = own.mean().tolist(), len(log.sent), own.opt.stats().pulls
        after.wait(TIMEOUT)
        if rank == 0:
            own.train(4)
            wait_for_pulls(own.worker(), pulls + 1)
        after.wait(TIMEOUT)
        own.opt.drain()
        return drained, [part.tolist() for part in list(log.sent.values())[first:]]

    (held, _), (other, sent) = Cluster(2).run(train)
    assert held == other
    assert sent
    assert sent[0][:2] == pytest.approx(held)


@pytest.mark.parametrize("kinds", [(torch.float64, torch.float16), (torch.float32, torch.int64)])
def test_statistics_of_several_kinds(kinds):
    """Floating ones are averaged each in its own kind, integers and empty ones are left alone."""
    following = Following("easgd", global_period=1)

    def train(rank: int) -> Any:
        one, two = (torch.full((2, 3), 2 * rank + 1).to(kind) for kind in kinds)
        own = trainer(rank, following, 2)
        own.opt._async.replica.named_buffers = [("one", one), ("empty", torch.zeros(0)), ("two", two)]
        for step in (1, 2):
            own.step()
            wait_for_pulls(own.worker(), step)
        assert (one.dtype, two.dtype) == kinds
        return one.tolist(), two.tolist()

    for rank, (one, two) in enumerate(Cluster(2).run(train)):
        assert one == [[2.0] * 3] * 2
        assert two == [[2.0 if kinds[1].is_floating_point else 2 * rank + 1] * 3] * 2


@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
def test_bytes_of_averages_are_those_of_a_ring_of_the_pulls_ranks(following):
    """5 numbers: mean and variance of two features, and who has something to say."""

    def train(rank: int) -> None:
        own = trainer(rank, following)
        for step in range(1, 9):
            own.step()
            wait_for_pulls(own.worker(), following.pulls(rank, step))
        received = 0
        for _, group, leader in own.opt.stats().history:
            ranks = 4 if group == ALL else 2
            received += int(2 * (ranks - 1) / ranks * 5 * 4)
            received += int(2 * 3 / 4 * 6 * 4) if leader == -1 else 6 * 4 * (leader != rank)
        assert own.opt.stats().bytes_received == received > 0

    Cluster(4).run(train)


# -- at ends --------------------------------------------------------------------------------------------------


def best(rank: int) -> Following:
    return dataclasses.replace(PAIRS, told=lambda z, own, step: drawn(z, own, step) - 2.0 * (own == rank))


@pytest.mark.parametrize(
    ("following", "buffers", "mean", "count"),
    [
        (best(2), "average", 2.5, 5), (best(2), "local", 3.0, 7), (best(0), "local", 1.0, 5),
        (ELASTIC, "average", 2.5, 5), (ELASTIC, "local", None, None),
    ],
)  # fmt: skip
def test_ends_show_averages_or_the_leaders_own_or_leave_each_rank_its_own(following, buffers, mean, count):
    """In ``consensus()``, which puts back what was there, and after ``drain()``."""

    def train(rank: int) -> None:
        own = trainer(rank, following, buffers=buffers).train(1)
        own.norm.running_mean.fill_(1.0 + rank)
        own.norm.num_batches_tracked.fill_(5 + rank)
        expected = (1.0 + rank if mean is None else mean, 5 + rank if count is None else count)
        with own.opt.consensus():
            assert (own.mean().tolist(), int(own.norm.num_batches_tracked)) == ([expected[0]] * 2, expected[1])
        assert (own.mean().tolist(), int(own.norm.num_batches_tracked)) == ([1.0 + rank] * 2, 5 + rank)
        own.opt.drain()
        assert (own.mean().tolist(), int(own.norm.num_batches_tracked)) == ([expected[0]] * 2, expected[1])

    Cluster(4).run(train)


def test_local_statistics_are_not_touched_by_pulls():
    def train(rank: int) -> Any:
        own = trainer(rank, PAIRS, buffers="local").train(20)
        own.opt.cut()  # (all that was due has landed)
        return own.mean().tolist(), own.opt.stats().pulls

    for rank, (mean, pulls) in enumerate(Cluster(4).run(train)):
        assert mean == [20 * 2.0**rank, 0.25 * 210]
        assert pulls > 0


def test_nan_of_one_rank_is_left_out_of_what_ends_show():
    def train(rank: int) -> list[float]:
        own = trainer(rank, PAIRS).train(1)
        own.norm.running_mean.fill_(torch.nan if rank == 1 else float(rank))
        with own.opt.consensus():
            assert own.mean().tolist() == pytest.approx([5 / 3] * 2)
        own.opt.drain()
        return own.mean().tolist()

    for mean in Cluster(4).run(train):
        assert mean == pytest.approx([5 / 3] * 2)
