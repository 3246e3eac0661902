"""Ends that the table does not show: whose buffers are averaged, who continues after whom, what is forgotten."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError, WaitTimeoutError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance.eager_ranks import UNIT
from tests.conformance.torch_ranks import TorchVectors
from tests.conformance.weight_ranks import TorchRank

engine: Callable[[], Any] = local_engine
"""This thread's."""


def line(start: float = 1.0, steps: int = 0, **options: Any) -> TorchVectors:
    """One weight and its optimizer: each step moves it by the mean gradient, which is 1."""
    one = TorchVectors([1], UNIT, start, **options)
    for _ in range(steps):
        one.take(1.0)
    return one


def weights(*ones: TorchVectors) -> list[float]:
    """Return the weight of each."""
    return [float(one.weights()[0]) for one in ones]


# -- collectives at ends ----------------------------------------------------------------------------------------


def test_buffers_of_two_optimizers_are_averaged_each_separately_where_one_is_gone_on_a_rank():
    """(They had one name: a second model's were averaged with the first's.)"""

    def train(rank: int) -> list[float]:
        first, second = torch.tensor([2.0 + 298 * rank]), torch.tensor([300.0 - 298 * rank])
        one = line(1.0, 1, named_buffers=[("first.running_mean", first)], quorum="all")
        one.opt.drain()
        if rank == 1:
            del one
            gc.collect()
        line(5.0, 1, named_buffers=[("second.running_mean", second)], quorum="all").opt.drain()
        engine().drain(leaving=True)
        return [float(first), float(second)]

    assert Cluster(2).run(train) == [[151.0, 151.0]] * 2


def test_ranks_in_different_collectives_are_reported_and_not_mixed_up():
    def train(rank: int) -> str:
        one = line(1.0, 1, quorum="all")
        worker = one.opt._async.worker
        with pytest.raises(ReplicaStateError, match=r"rank 0 is in the sum .* while rank 1 is in the other sum"):
            worker.sum(torch.ones(2 + rank), "the other sum" if rank else "the sum")
        total, ranks, _ = worker.sum(torch.ones(2), "the sum")
        return f"{total.tolist()} {ranks}"

    assert Cluster(2).run(train) == ["[2.0, 2.0] [0, 1]"] * 2


def test_a_root_that_is_gone_is_replaced():
    def train(rank: int) -> float:
        statistics = torch.tensor([float(rank)])
        one = line(1.0, 1, named_buffers=[("statistics", statistics)], buffers="root", quorum="all")
        one.opt.drain()
        assert float(statistics) == 0.0
        statistics.fill_(10.0 * rank)
        one.opt.drain() if rank else one.opt.discard()
        return float(statistics)

    assert Cluster(3).run(train) == [0.0, 10.0, 10.0]


# -- ranks that leave, and what is broken off before -------------------------------------------------------------


@pytest.mark.parametrize(("quorum", "first"), [("solo", 0), ("all", 1)])
def test_a_rank_continues_after_the_other_has_left(first: int, quorum: Any):
    """Further than the staleness bound, with the divisor it had; what the other had produced is in."""

    def train(rank: int) -> tuple[list[float], int]:
        one = line(0.0, 1, quorum=quorum, max_staleness=2)
        one.opt.drain()
        for _ in range(0 if rank == first else 9):
            one.take(1.0)
        engine().drain(leaving=True)
        return weights(one), one.opt.stats().gradients_applied

    assert Cluster(2).run(train)[1 - first] == ([-1.0 - 9 * 0.5], 11)


@pytest.mark.parametrize("quorum", ["solo", "all"])
def test_backward_without_step_ends_and_is_reported(quorum, capfd):
    def train(rank: int) -> list[float]:
        one = line(0.0, 2, quorum=quorum)
        if rank == 1:
            one.backward([[4.0]])
        engine().drain(leaving=True)
        return weights(one)

    assert Cluster(2).run(train) == [[-4.0]] * 2
    assert "rank 1 ends after backward() without step(): SGD (optimizer 0)" in capfd.readouterr().err


@pytest.mark.parametrize("broken_off", ["step", "drain"])
def test_what_is_broken_off_can_be_done_again(broken_off):
    """HVD_ASYNC_TIMEOUT ends a wait, as Ctrl-C would; continuing must not bring the others down."""

    def train(rank: int) -> list[float]:
        here, one = engine(), line(0.0, 1, quorum="all")
        if broken_off == "drain":
            one.take(1.0)
        if rank:
            assert stalled.wait(30)
        else:
            here.timeout = 0.05
            with pytest.raises(WaitTimeoutError):
                one.take(1.0) if broken_off == "step" else one.opt.drain()
            here.timeout = float("inf")
            stalled.set()
            if broken_off == "drain":
                with pytest.raises(ReplicaStateError, match=r"broken off|was interrupted"):
                    one.take(1.0)
        if broken_off == "step":
            for _ in range(1 + rank):
                one.take(1.0)
        one.opt.drain()
        return weights(one)

    stalled = threading.Event()
    # A gradient of weights that lack the broken-off step's round is left out.
    assert Cluster(2).run(train) == [[0.5 - 3.0 if broken_off == "step" else -2.0]] * 2


def test_a_rank_that_leaves_without_a_step_that_others_wait_for_is_named():
    def train(rank: int) -> None:
        line(0.0, 1 - rank, quorum="solo")

    first, _ = Cluster(2).outcomes(train, timeout=20)
    assert "rank 1 on host host1 left without a step or drain() of optimizer 0" in str(first)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_an_odd_pass_is_named_at_a_drain_and_goes_with_the_next_step(nonfinite):
    def train(rank: int) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        plain = torch.optim.SGD([parameter], lr=1.0)
        opt: Any = hvd.EagerOptimizer(plain, quorum="all", backward_passes_per_step=2, nonfinite=nonfinite)
        opt._async.worker_now()
        opt.zero_grad()
        for number in range(1, 5):
            (parameter * number).sum().backward()
            if number == 2:
                opt.step()
                opt.zero_grad()
            if number == 3:
                with pytest.warns(UserWarning, match=r"1 backward pass\(es\) short of a step of 2.*p\.grad") as caught:
                    opt.drain()
                assert [one.filename for one in caught] == [__file__]
        opt.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.drain()
        return parameter.item()

    assert Cluster(1).run(train) == [-10.0]


# -- optimizers that one rank has not, or has no more -------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_without_batches_drains_two_optimizers_that_the_other_trains(order: tuple[int, int]):
    """It opens what the other opens while it waits, under the number it has there."""

    def train(rank: int) -> list[float]:
        ones = [line(0.0), line(10.0)]
        ones[1].set_rate(2.0)
        for _ in range(0 if rank else 3):
            for place in order:
                ones[place].take(1.0)
        ones[order[0]].opt.drain()
        return weights(*ones)

    assert Cluster(2).run(train) == [[-1.5, 7.0]] * 2


@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_a_rank_without_batches_joins_with_two_optimizers(quorum: str):
    """It is done with both before the first has met: the others may begin with either."""

    def train(rank: int) -> list[float]:
        ones = [line(0.0, quorum=quorum), line(10.0, quorum=quorum)]
        for _ in range(2 * rank):
            for one in ones:
                one.take(1.0)
        for one in ones:
            one.opt._async.register()
        ones[1].opt._async.drain_all()
        return weights(*ones)

    assert Cluster(2).run(train) == [[-1.0, 9.0]] * 2


def test_a_rank_that_drains_one_optimizer_opens_what_another_is_done_with():
    def train(rank: int) -> list[float]:
        ones = [line(0.0, rank), line(10.0)]
        if rank == 0:
            for one in ones:
                one.opt._async.register()
            ones[1].opt._async.drain_all()
        else:
            ones[0].opt.drain()
        return weights(ones[0])

    assert Cluster(2).run(train) == [[-0.5]] * 2


def test_an_optimizer_that_a_waiting_rank_has_not_is_refused_with_its_name():
    def train(rank: int) -> str:
        one = line(1.0, 1)
        said = ""
        if rank == 0:
            expected = "rank 0 registered an optimizer while rank 1 waits in drain"
            with pytest.raises(ReplicaMismatchError, match=expected) as reported:
                line(2.0, 1)
            said = str(reported.value)
        one.opt.drain()
        return said

    assert Cluster(2).run(train)[0].startswith("SGD (optimizer 1): ")


def test_dead_optimizers_are_forgotten_everywhere():
    def train(rank: int) -> int:
        for number in range(5):
            one = line(float(number), 1, compression=hvd.Compression.fp16)
            one.opt.drain()
            if number < 4:
                weight = weakref.ref(one.parameters[0])
                del one
                gc.collect()
                assert weight() is None, "a model goes with its optimizer"
        return len(engine().participants())

    cluster = Cluster(2)
    assert cluster.run(train) == [1, 1]
    assert not cluster.coordinator._machines  # (the last one: both have left)


@pytest.mark.parametrize(
    ("quorum", "end", "warns"),
    [("solo", "none", True), ("solo", "drain", False), ("solo", "discard", False), ("all", "none", False)],
)
def test_an_optimizer_that_is_deleted_without_a_drain_is_reported(quorum: Any, end: str, warns: bool, capfd: Any):
    """(As at the return of a function that trains: late gradients were lost without a word.)"""

    def train(rank: int) -> None:
        one = line(1.0, 1, quorum=quorum)
        if end != "none":
            getattr(one.opt, end)()
        del one
        gc.collect()
        engine().drain(leaving=True)

    Cluster(2).run(train)
    reported = capfd.readouterr().err
    for rank in range(2):
        assert (f"rank {rank}: SGD (optimizer 0) was deleted after steps and without drain()" in reported) == warns


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        ("EagerOptimizer", {"quorum": "solo"}),
        ("GossipOptimizer", {"algorithm": "dpsgd"}),
        ("GossipOptimizer", {"algorithm": "adpsgd", "topology": "ring"}),
        ("LeaderOptimizer", {"algorithm": "lsgd", "group": 3, "global_period": 4}),
    ],
    ids=["solo", "dpsgd", "adpsgd", "lsgd"],
)
def test_a_rank_discards_after_an_error_and_trains_another(wrapper: str, options: Any):
    problem = TorchRank.least_squares(3)

    def train(rank: int) -> bytes:
        one = TorchRank(problem, rank, wrapper=wrapper, normed=True, **options).train(2)
        if rank == 1:
            one.opt.discard()
            with pytest.raises(ReplicaStateError, match="discard"):
                one.train(1)
        else:
            one.train(3).opt.drain()
        return TorchRank(problem, rank, wrapper=wrapper, normed=True, **options).train(3).drained()

    assert len(set(Cluster(3).run(train))) == 1


def test_settings_are_not_changed_without_a_rank_that_would_be_waited_for():
    problem = TorchRank.least_squares(3)

    def train(rank: int) -> Any:
        one = TorchRank(problem, rank, algorithm="sgp").train(1)
        if rank == 2:
            one.opt.discard()
            return None
        for change in (
            lambda: one.opt.switch(algorithm="dpsgd"),
            lambda: one.opt.load_state_dict(one.opt.state_dict()),
        ):
            with pytest.raises(ReplicaStateError, match="this optimizer is gone on rank 2"):
                change()
        return one.train(1).drained(), one.opt.settings["algorithm"]

    first, second, _ = Cluster(3).run(train)
    assert first == second
    assert first[1] == "sgp"


def test_handed_over_gradients_hold_up_their_own_optimizer_only_and_it_is_named():
    def train(rank: int) -> list[float]:
        one = line(0.0, 2)
        one.backward([[1.0]])  # (a step that an error broke off)
        with pytest.raises(ReplicaStateError, match=r"SGD \(optimizer 0\): backward\(\) has handed .*discard\(\)"):
            one.opt.drain()
        one.opt.discard()
        other = line(5.0, 1, quorum="all")
        other.opt.drain()
        return weights(other)

    assert Cluster(2).run(train) == [[4.0]] * 2


def test_a_collective_ends_when_the_optimizer_is_discarded_by_another_thread():
    reported = threading.Event()

    def train(rank: int) -> bool:
        one = line(0.0, 1, quorum="all")
        if rank == 1:
            return reported.wait(30)  # (it keeps its optimizer until then, so that it is waited for)
        worker = one.opt._async.worker
        send, begun = worker.engine.send, threading.Event()

        def watched(event: Any) -> None:
            send(event)
            begun.set()

        worker.engine.send = watched
        helper = threading.Thread(target=lambda: begun.wait(30) and one.opt.discard())
        helper.start()
        with pytest.raises(ReplicaStateError, match="discarded while this rank waited in the sum"):
            worker.sum(torch.ones(2), "the sum")
        helper.join(30)
        reported.set()
        return True

    assert Cluster(2).run(train) == [True, True]


def test_workers_of_before_a_switch_are_let_go():
    def train(rank: int) -> list[bool]:
        one, old = TorchRank(TorchRank.least_squares(2), rank), []
        for _ in range(3):
            old.append(weakref.ref(one.train(1).worker()))
            one.opt.switch(algorithm="sgp")
        one.train(1).opt.drain()  # (by now every rank has reported the coordinator, and been asked to forget)
        gc.collect()
        return [reference() is None for reference in old]

    for forgotten in Cluster(2).run(train):
        assert forgotten[:2] == [True, True]
