"""Elastic states among ranks as threads: what comes from one rank brings what belongs to it, and settings in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import hvd_async.tensorflow.elastic as keras_elastic
import hvd_async.torch as hvd_torch
from hvd_async.algorithms.eager.gradient_format import PendingGradient
from hvd_async.algorithms.eager.rank import Remains
from hvd_async.errors import ReplicaStateError
from hvd_async.stats import Stats
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.drive import scripted_engine
from tests.conformance.elastic_board import Board, Exchange, among_others, over_a_board, trained
from tests.conformance.model_ranks import KerasModel, TorchModel

GAMMA, ONES = 0.9, np.ones((1, 2))


class TorchJob(TorchModel):
    """One rank's script in torch."""

    def __init__(self, wrapper: str = "GossipOptimizer", **options: Any) -> None:
        super().__init__(wrapper, np.ones((2, 1)), **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.opt, GAMMA)
        self.state = hvd_torch.elastic.TorchState(model=self.model, optimizer=self.opt, schedule=self.schedule, batch=0)

    def step(self) -> None:
        self.take(ONES)
        self.schedule.step()
        self.state.batch += 1


class KerasJob(KerasModel):
    """The same in Keras, with a schedule that multiplies the rate."""

    def __init__(self, wrapper: str = "GossipOptimizer", **options: Any) -> None:
        super().__init__(wrapper, np.ones((2, 1)), **options)
        self.state = keras_elastic.TensorFlowKerasState(self.model, self.opt, batch=0)

    def step(self) -> None:
        self.take(ONES)
        self.set_rate(GAMMA * self.rate())
        self.state.batch += 1


@pytest.fixture(autouse=True)
def _over_a_board():
    with over_a_board():
        yield


def changed(
    sizes: tuple[int, int],
    make: Callable[[], Any],
    before: Callable[[int, Any], object],
    after: Callable[[int, Any], Any],
) -> list[Any]:
    """Return what comes of ranks after a membership change, new ones among them.

    Args:
        sizes: numbers of ranks before and after it.
        make: makes a rank's job.
        before, after: have it train.
    """

    def begun(rank: int) -> Any:
        job = make()
        job.state.sync()
        before(rank, job)
        return job

    old, new = sizes
    return among_others(new, trained(old, begun)[:new], make, after)


KINDS = [
    ("GossipOptimizer", {"algorithm": "adpsgd", "max_local_steps": 50}),
    ("EagerOptimizer", {"quorum": "solo"}),
    ("LeaderOptimizer", {"algorithm": "easgd"}),
]
both = pytest.mark.parametrize("job", [TorchJob, KerasJob], ids=["torch", "keras"])


@both
@pytest.mark.parametrize(("wrapper", "options"), KINDS, ids=["adpsgd", "solo", "easgd"])
def test_a_schedules_position_brings_its_learning_rate(job, wrapper, options):
    """One rank was far behind; a third is new. All continue at the rate that the position they took stands for."""

    def behind(rank: int, one: Any) -> None:
        one.opt._async.worker_now()
        for _ in range(3 if rank else 9):
            one.step()

    def rates(rank: int, one: Any) -> tuple[int, float, float]:
        before = one.rate()
        one.step()
        one.opt.drain()
        return one.state.batch, before, one.rate()

    for batch, before, after in changed((2, 3), lambda: job(wrapper, **options), behind, rates):
        assert batch == 10
        assert before == pytest.approx(0.1 * GAMMA**9)
        assert after == pytest.approx(0.1 * GAMMA**10)


@both
@pytest.mark.parametrize("algorithm", ["osgp", "diloco"])
def test_whole_hosts_leave_and_join(job, algorithm):
    def make() -> Any:
        return job(algorithm=algorithm, hierarchical=2, average_every=3)

    def before(rank: int, one: Any) -> None:
        for _ in range(4):
            one.step()

    def after(rank: int, one: Any) -> list[bytes]:
        path = [(one.step(), one.weights().tobytes())[1] for _ in range(4)]
        one.opt.drain()
        return path

    for size in (2, 6):
        paths = changed((4, size), make, before, after)
        assert paths[::2] == paths[1::2]


@both
def test_a_new_rank_gets_the_algorithm_that_was_switched_to(job):
    def make() -> Any:
        return job(algorithm="sgp", peers={0: 1, 2: 1}, schedule={0: "allreduce", 1: "sgp"})

    def switched(rank: int, one: Any) -> None:
        one.opt.set_epoch(1)
        one.step()
        one.opt.switch(algorithm="slowmo", average_every=2, outer_lr=0.5, max_staleness=0)
        for _ in range(4):
            one.step()

    def proceed(rank: int, one: Any) -> Any:
        settings, rounds = one.opt.settings, one.opt.rounds
        for _ in range(3):
            one.step()
        one.opt.set_epoch(1)  # nothing is due: the new rank is in this epoch, too
        one.opt.drain()
        return settings, rounds, one.weights().tolist()

    seen = changed((2, 3), make, switched, proceed)
    assert seen[0][0]["algorithm"] == "slowmo"
    assert seen[2] == seen[0] == seen[1]
    assert seen[2][1] >= 2  # rounds continue from those of the weights that it took


@both
@pytest.mark.parametrize("end", ["drain", "cut"])
@pytest.mark.parametrize("algorithm", ["slowmo", "diloco"])
def test_a_loaded_outer_momentum_outlives_a_change_of_the_ranks_before_the_first_step(job, algorithm, end):
    def load(rank: int, one: Any) -> None:
        for _ in range(3):
            one.step()
        getattr(one.opt, end)()
        one.kept = one.opt._async.worker.common_state()
        if job is TorchJob:
            one.opt.load_state_dict(one.opt.state_dict())
        else:
            one.opt.set_state(one.opt.get_state())

    def momenta(rank: int, one: Any) -> Any:
        own, now = getattr(one, "kept", None), one.opt._async.worker_now().common_state()
        one.step()
        one.opt.drain()
        return own, now

    every = changed((2, 3), lambda: job(algorithm=algorithm, average_every=1), load, momenta)
    own = {name: np.asarray(value) for name, value in every[0][0].items()}
    assert all(value.any() for value in own.values())
    assert len(own) == 1
    for _, now in every:
        np.testing.assert_equal({name: np.asarray(value) for name, value in now.items()}, own)


def test_a_new_rank_gets_the_backward_passes_of_a_step():
    def said_later(rank: int, one: Any) -> None:
        one.opt.set_backward_passes_per_step(2)
        twice(one)

    def twice(one: Any) -> None:
        one.opt.zero_grad()
        one.backward(ONES)
        one.backward(ONES)
        one.opt.step()

    def proceed(rank: int, one: Any) -> Any:
        twice(one)
        twice(one)  # (the ranks have met: buckets leave during backward)
        one.opt.drain()
        return one.weights().tolist()

    seen = changed((2, 3), lambda: TorchJob("EagerOptimizer", quorum="all"), said_later, proceed)
    weights = np.ones(2)  # a plain run: every rank has the same gradient, in each of two passes
    for _ in range(3):
        weights = weights - 0.1 * 2 * 2 * weights.sum() * np.ones(2)
    np.testing.assert_allclose(seen, [weights] * 3, rtol=1e-5)


# -- what is counted across a membership change ------------------------------------------------------------------------


class TwoBuckets:
    """One rank's script with two parameters in a bucket each."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterList([torch.ones(1), torch.ones(1)])
        plain = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.opt = hvd_torch.EagerOptimizer(plain, quorum="all", bucket_cap_mb=1e-6)
        self.state = hvd_torch.elastic.TorchState(model=self.model, optimizer=self.opt)

    def backward(self, spoilt: int | None = None) -> None:
        """Half a step, in which the gradient of one parameter is NaN, and its bucket goes empty."""
        self.opt.zero_grad()
        sum(p.sum() * (np.nan if i == spoilt else 1.0) for i, p in enumerate(self.model)).backward()

    def take(self, spoilt: int | None = None) -> None:
        """A step."""
        self.backward(spoilt)
        self.opt.step()


def test_gradients_are_counted_by_bucket_across_a_change_of_the_ranks():
    """A bucket that lacks one before the change and another that lacks one after it: 3 gradients each, not 2 and 2."""

    def before(rank: int, one: Any) -> None:
        for spoilt in (0, None):
            one.take(spoilt)
        one.opt.drain()

    def after(rank: int, one: Any) -> tuple[int, int]:
        for spoilt in (1, None):
            one.take(spoilt)
        one.opt.drain()
        return one.opt.stats().gradients_produced, one.opt.stats().gradients_applied

    assert changed((2, 2), TwoBuckets, before, after) == [(3, 6)] * 2


def test_a_step_that_two_changes_of_the_ranks_interrupt_is_counted_once():
    """Its gradients have left in ``backward()`` before the first; the second comes before ``step()``."""

    def first(rank: int) -> Any:
        one = TwoBuckets()
        one.state.sync()
        for _ in range(2):
            one.take()
        one.backward()
        return one

    def meet(rank: int, one: Any) -> Any:
        one.opt._async.worker_now()
        return one

    def rest(rank: int, one: Any) -> int:
        one.take()
        one.opt.drain()
        return int(one.opt.stats().steps)

    jobs = [*among_others(2, trained(2, first), TwoBuckets, meet)]
    for one in jobs:
        one.opt._async.leave()
    assert among_others(2, jobs, TwoBuckets, rest) == [3, 3]


def test_a_broken_off_step_is_taken_back_once_although_ranks_agree_twice_before_they_register():
    with scripted_engine(2):
        driver = TwoBuckets().opt._async
    driver.stats_before = Stats(steps=6)
    driver.remains = Remains(3, pending=[PendingGradient(None, [])] * 2, begun=6, ended=5)
    for _ in range(2):
        driver.continue_at(3, 5, False)
    assert driver.stats_before.steps == 5


@both
def test_a_step_whose_round_was_there_before_it_is_taken_back_if_a_loss_interrupts_it(job):
    """The other rank was a step ahead, and dies; this one notices it when it has handed its gradient over."""

    def behind(rank: int) -> Any:
        one = job("EagerOptimizer", quorum="solo")
        one.state.sync()
        worker = one.opt._async.worker_now()
        if rank == 0:
            one.step()
            one.step()
            return one
        worker.engine.wait(lambda: len(worker._rounds) == 2)
        one.step()
        with patch.object(worker.engine, "wait", side_effect=InjectedError("lost")), pytest.raises(InjectedError):
            one.step()
        return one

    def rest(rank: int, one: Any) -> tuple[int, int, int]:
        one.step()
        one.opt.drain()
        return one.state.batch, one.opt.stats().steps, one.opt.stats().gradients_produced

    assert among_others(1, trained(2, behind)[1:], job, rest) == [(2, 2, 2)]


# -- a commit between two passes of a step -----------------------------------------------------------------------------


def test_a_commit_between_two_passes_is_refused_in_torch():
    Exchange.board = Board(2)

    def work(rank: int) -> None:
        one = TorchJob("EagerOptimizer", quorum="all", backward_passes_per_step=2)
        one.state.sync()
        one.opt.drain()  # the ranks meet
        one.opt.zero_grad()
        one.backward(ONES)
        with pytest.raises(ReplicaStateError, match=r"commit\(\) after 1 backward pass.*Call it after step\(\)"):
            one.state.commit()
        one.backward(ONES)
        one.opt.step()
        one.state.commit()
        one.opt.zero_grad()
        one.state.commit()
        one.opt.drain()
        assert one.opt.stats().gradients_produced == 1

    Cluster(2).run(work)


@pytest.mark.parametrize(
    ("wrapper", "options", "twice"),
    [("EagerOptimizer", {"quorum": "all"}, True), ("GossipOptimizer", {"algorithm": "allreduce"}, False)],
)
def test_passes_before_a_change_of_the_ranks_count_in_keras(wrapper, options, twice):
    """A callback commits after every batch, so a step may be under way."""
    passes = 3

    def make() -> Any:
        return KerasJob(wrapper, backward_passes_per_step=passes, **options)

    def first(rank: int) -> Any:
        one = make()
        one.state.sync()
        for gradient in (1.0, 1.0, 1.0, 10.0):  # a step, and a pass of the next
            one.apply(np.full((2, 1), gradient))
        return one

    def rest(rank: int, one: Any) -> Any:
        for gradient in (100.0, 1000.0):
            one.apply(np.full((2, 1), gradient))
        one.opt.drain()
        return one.weights().tolist()

    jobs = trained(2, first)
    if twice:
        jobs = [*among_others(2, jobs, make, lambda rank, one: one)]
        for one in jobs:
            one.opt._async.leave()
    seen = among_others(2, jobs, make, rest)
    np.testing.assert_allclose(seen, [[1 - 0.1 * (3 + 1110)] * 2] * 2, rtol=1e-5)
