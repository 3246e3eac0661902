"""Batch-norm statistics of ranks that follow: averaged by pulls and at ends, or each rank's own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.testing import Cluster
from tests.conformance.leader_cases import leads
from tests.conformance.leader_drive import TIMEOUT, in_step, wait_for_pulls
from tests.conformance.leader_reference import Following, several
from tests.conformance.weight_ranks import SGD, Rank, TorchRank, also_graph, both

PAIRS = Following("lsgd", several(4, 2), 3, 8)
ELASTIC = Following("easgd", global_period=3)
EACH_STEP = Following("easgd", global_period=1)
ALGORITHMS = pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
NAN = float("nan")


def normed(binding: Any, size: int, rank: int, following: Following, **options: Any) -> Rank:
    rank_: Rank = binding(binding.least_squares(size, SGD), rank, following, normed=True, **options)
    return rank_


def mean(one: Rank) -> list[float]:
    """The mean that a rank holds; the variance is ten times as much."""
    first, second = np.split(one.statistics(), 2)
    np.testing.assert_allclose(second, 10.0 * first, rtol=1e-6)
    return [float(value) for value in first]


def set_mean(one: Rank, value: float) -> None:
    one.set_statistics(np.full(2, value), np.full(2, 10.0 * value))


# -- at pulls -------------------------------------------------------------------------------------------------


@also_graph
@ALGORITHMS
def test_in_step_each_pull_averages_over_its_ranks_and_the_next_step_takes_it_up(binding, following):
    """By hand: the group's at its pulls, all ranks' at theirs."""
    steps = 23 if binding is TorchRank else 10

    def train(rank: int) -> list[Any]:
        one, path = normed(binding, 4, rank, following), []
        for _ in range(steps):
            in_step(one, 1)
            path.append(mean(one))
        return path

    paths = Cluster(4).run(train)
    means, come = np.zeros((4, 2)), list[Any]([None] * 4)
    for step in range(1, steps + 1):
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


@also_graph
def test_statistics_that_are_not_finite_are_left_out(binding):
    """A rank's batch held NaN; where no rank's statistics are finite each keeps its own."""

    def train(rank: int) -> list[list[float]]:
        one, path = normed(binding, 3, rank, EACH_STEP), []
        for number, means in enumerate([(NAN,) * 3, (1.0, NAN, 4.0), (2.0, 3.0, NAN), (NAN,) * 3, (7.0, 8.0, 9.0)], 1):
            one.step(mean=means[rank])
            path.append(mean(one))
            wait_for_pulls(one.worker(), number)
        return path

    for rank, path in enumerate(Cluster(3).run(train)):
        # in the third step all continue with (1 + 4) / 2, which is what they send then too
        expected = [NAN, (1.0, NAN, 4.0)[rank], 2.5, 2.5, (7.0, 8.0, 9.0)[rank]]
        np.testing.assert_allclose(path, [[value, value] for value in expected], rtol=1e-6)


@also_graph
def test_pulls_after_an_end_average_what_is_held_by_then(binding):
    """A rank that has not stepped since gives what the end has left it; what was on its way before a cut comes."""
    together = threading.Barrier(2)

    def train(rank: int) -> list[float]:
        one, seen = normed(binding, 2, rank, EACH_STEP), []
        set_mean(one, 1.0)
        for number, end in enumerate((one.opt.drain, one.opt.cut), 1):
            worker = one.worker()
            together.wait(TIMEOUT)
            if rank == 0:
                for _ in range(2):
                    one.step(mean=10.0 * number)
            wait_for_pulls(worker, number)
            together.wait(TIMEOUT)
            end()
            seen.append(mean(one)[0])
        one.step(mean=5.5 if rank else 20.0)
        return [*seen, mean(one)[0]]

    # of 10 and 1, twice; then of 20 and 5.5
    assert Cluster(2).run(train) == [[5.5, 20.0, 12.75], [5.5, 5.5, 12.75]]


# -- at ends --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("following", "buffers", "expected"),
    [
        (leads(2, PAIRS), "average", [2.5] * 4),
        (leads(2, PAIRS), "local", [3.0] * 4),
        (ELASTIC, "local", [1.0, 2.0, 3.0, 4.0]),
    ],
    ids=["lsgd-average", "lsgd-local", "easgd-local"],
)
def test_ends_show_averages_or_the_leaders_own_or_leave_each_rank_its_own(binding, following, buffers, expected):
    """In ``consensus()``, which puts back what was there, and after ``drain()``."""

    def train(rank: int) -> tuple[float, ...]:
        one = normed(binding, 4, rank, following, buffers=buffers)
        one.step(mean=1.0 + rank)
        with one.opt.consensus():
            inside = mean(one)[0]
        after = mean(one)[0]
        one.opt.drain()
        return inside, after, mean(one)[0]

    assert Cluster(4).run(train) == [(value, 1.0 + rank, value) for rank, value in enumerate(expected)]


@both
@pytest.mark.parametrize("version", ["0.2.0", "now", "other buffers"])
def test_averages_that_no_step_has_taken_up_continue_after_a_cut(binding, version):
    """A checkpoint of 0.2.0 has one flag for all statistics; one of other buffers leaves each rank its own."""
    saved = [dict[str, Any]() for _ in range(2)]

    def train(rank: int) -> None:
        one = normed(binding, 2, rank, EACH_STEP)
        one.step(mean=4.0 * rank)
        wait_for_pulls(one.worker(), 1)
        one.opt.cut()
        state, weights, statistics = one.saved()
        copies = {name.rpartition(".")[2]: name for name in _copies(state)}
        held = _copies(state)
        if version != "now":
            averaged, sent = (np.split(np.asarray(held[copies[name]]), 2) for name in ("statistics", "sent"))
            extra = [0.0] * 3 if version == "other buffers" else []
            for name, values in (("statistics", averaged[0]), ("sent", np.append(sent[0], 1.0))):
                like = held[copies[name]]
                array = np.append(values, extra).astype(np.float32)
                held[copies[name]] = torch.from_numpy(array) if isinstance(like, torch.Tensor) else array
        saved[rank] = {"state": state, "weights": weights, "statistics": statistics}

    def resume(rank: int) -> list[float]:
        one = normed(binding, 2, rank, EACH_STEP)
        one.resume(tuple(saved[rank].values()), 1)
        one.step(mean=4.0 * rank)
        return mean(one)

    Cluster(2).run(train)
    own = [[0.0, 0.0], [4.0, 4.0]]
    assert Cluster(2).run(resume) == (own if version == "other buffers" else [[2.0, 2.0]] * 2)


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    """The vectors of a saved state, by name."""
    return state["hvd_async"]["copies"] if "hvd_async" in state else state


# -- torch's dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(torch.float64, torch.float16), (torch.float32, torch.int64)])
def test_statistics_of_several_kinds(kinds):
    """Floating ones are averaged each in its own kind, integers and empty ones are left alone."""

    def train(rank: int) -> Any:
        first, last = (torch.full((2, 3), 2 * rank + 1).to(kind) for kind in kinds)
        named = [("a.running_mean", first), ("b.running_mean", torch.zeros(0)), ("c.running_mean", last)]
        in_step(TorchRank(TorchRank.least_squares(2, SGD), rank, EACH_STEP, named_buffers=named), 2)
        assert (first.dtype, last.dtype) == kinds
        return first.tolist(), last.tolist()

    for rank, (first, last) in enumerate(Cluster(2).run(train)):
        assert first == [[2.0] * 3] * 2
        assert last == [[2.0 if kinds[1].is_floating_point else 2 * rank + 1] * 3] * 2


def test_counters_of_batches_are_the_ranks_own_until_the_leaders_are_taken():
    def train(rank: int) -> list[int]:
        count = torch.tensor(5 + rank)
        following = Following("lsgd", several(2, 2), 1, 1, loss_of=lambda z, own, step: 1.0 - own)
        one = TorchRank(TorchRank.least_squares(2, SGD), rank, following, named_buffers=[("n", count)], buffers="local")
        in_step(one, 2)
        seen = [int(count)]
        with one.opt.consensus():
            seen.append(int(count))
        seen.append(int(count))
        one.opt.drain()
        return [*seen, int(count)]

    assert Cluster(2).run(train) == [[5, 6, 5, 6], [6, 6, 6, 6]]
