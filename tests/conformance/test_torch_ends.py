"""Ends that the table does not show: whose buffers are averaged, who continues after whom, what is forgotten."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance.ends_table import make_torch as make
from tests.conformance.ends_table import step_torch as step


def engine() -> Any:
    """This thread's."""
    own = local_engine()
    assert own is not None
    return own


def line(value: float = 1.0, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    """One weight and its optimizer: each step moves it by the mean gradient."""
    weight = torch.nn.Parameter(torch.tensor([value]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    return weight, hvd.EagerOptimizer(optimizer, named_parameters=[("weight", weight)], **options)


def take(weight: torch.nn.Parameter, optimizer: Any, gradient: float = 1.0) -> None:
    """One step."""
    optimizer.zero_grad()
    (weight * gradient).sum().backward()
    optimizer.step()


# -- collectives at ends ----------------------------------------------------------------------------------------


def test_buffers_of_two_optimizers_are_averaged_each_separately_where_one_is_gone_on_a_rank():
    """(They had one name: a second model's were averaged with the first's.)"""

    def train(rank: int) -> list[float]:
        first, second = torch.tensor([2.0 + 298 * rank]), torch.tensor([300.0 - 298 * rank])
        weight, optimizer = line(named_buffers=[("first.running_mean", first)], quorum="all")
        take(weight, optimizer)
        optimizer.drain()
        if rank == 1:
            del optimizer
            gc.collect()
        weight, other = line(5.0, named_buffers=[("second.running_mean", second)], quorum="all")
        take(weight, other)
        other.drain()
        engine().drain(leaving=True)
        return [float(first), float(second)]

    assert Cluster(2).run(train) == [[151.0, 151.0], [151.0, 151.0]]


def test_ranks_in_different_collectives_are_reported_and_not_mixed_up():
    def train(rank: int) -> str:
        weight, optimizer = line(quorum="all")
        take(weight, optimizer)
        worker = optimizer._async.worker
        with pytest.raises(ReplicaStateError, match=r"rank 0 is in the sum .* while rank 1 is in the other sum"):
            worker.sum(torch.ones(2 + rank), "the other sum" if rank else "the sum")
        total, ranks, _ = worker.sum(torch.ones(2), "the sum")
        return f"{total.tolist()} {ranks}"

    assert Cluster(2).run(train) == ["[2.0, 2.0] [0, 1]"] * 2


def test_a_root_that_is_gone_is_replaced():
    def train(rank: int) -> float:
        statistics = torch.tensor([float(rank)])
        weight, optimizer = line(named_buffers=[("statistics", statistics)], buffers="root", quorum="all")
        take(weight, optimizer)
        optimizer.drain()
        assert float(statistics) == 0.0
        statistics.fill_(10.0 * rank)
        if rank == 0:
            optimizer.discard()
        else:
            optimizer.drain()
        return float(statistics)

    assert Cluster(3).run(train) == [0.0, 10.0, 10.0]


# -- ranks that leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quorum", "first"), [("solo", 0), ("all", 1)])
def test_a_rank_continues_after_the_other_has_left(first: int, quorum: Any):
    """Further than the staleness bound, with the divisor it had; what the other had produced is in."""

    def train(rank: int) -> tuple[float, int]:
        weight, optimizer = line(0.0, quorum=quorum, max_staleness=2)
        take(weight, optimizer)
        optimizer.drain()
        for _ in range(0 if rank == first else 9):
            take(weight, optimizer)
        engine().drain(leaving=True)
        return float(weight), optimizer.stats().gradients_applied

    outcomes = Cluster(2).run(train)
    assert outcomes[1 - first] == (-1.0 - 9 * 0.5, 11)


@pytest.mark.parametrize("quorum", ["solo", "all"])
def test_backward_without_step_ends_and_is_reported(quorum, capfd):
    def train(rank: int) -> float:
        weight, optimizer = line(0.0, quorum=quorum)
        for _ in range(2):
            take(weight, optimizer)
        if rank == 1:
            optimizer.zero_grad()
            (weight * 4.0).sum().backward()
        engine().drain(leaving=True)
        return float(weight)

    assert Cluster(2).run(train) == [-4.0, -4.0]
    assert "rank 1 ends after backward() without step(): SGD (optimizer 0)" in capfd.readouterr().err


# -- optimizers that one rank has not, or has no more -------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_without_batches_drains_two_optimizers_that_the_other_trains(order: tuple[int, int]):
    """It opens what the other opens while it waits, under the number it has there."""

    def train(rank: int) -> list[float]:
        pairs = [line(0.0), line(10.0)]
        pairs[1][1].param_groups[0]["lr"] = 2.0
        named = [(weight, optimizer) for weight, optimizer in pairs]
        if rank == 0:
            for _ in range(3):
                for place in order:
                    take(*named[place])
        named[order[0]][1].drain()
        return [float(weight) for weight, _ in pairs]

    assert Cluster(2).run(train) == [[-1.5, 7.0], [-1.5, 7.0]]


def test_an_optimizer_that_a_waiting_rank_has_not_is_refused_with_its_name():
    def train(rank: int) -> str:
        weight, optimizer = line()
        take(weight, optimizer)
        if rank == 1:
            optimizer.drain()
            return ""
        weight, other = line(2.0)
        with pytest.raises(
            ReplicaMismatchError, match="rank 0 registered an optimizer while rank 1 waits in drain"
        ) as reported:
            take(weight, other)
        optimizer.drain()
        return str(reported.value)

    assert Cluster(2).run(train)[0].startswith("SGD (optimizer 1): ")


def test_dead_optimizers_are_forgotten_everywhere():
    def train(rank: int) -> int:
        for number in range(4):
            weight, optimizer = line(float(number))
            take(weight, optimizer)
            optimizer.drain()
            del optimizer
            gc.collect()
        weight, optimizer = line()
        take(weight, optimizer)
        optimizer.drain()
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
        weight, optimizer = line(quorum=quorum)
        take(weight, optimizer)
        if end != "none":
            getattr(optimizer, end)()
        del optimizer
        gc.collect()
        engine().drain(leaving=True)

    Cluster(2).run(train)
    reported = capfd.readouterr().err
    for rank in range(2):
        assert (f"rank {rank}: SGD (optimizer 0) was deleted after steps and without drain()" in reported) == warns


@pytest.mark.parametrize("wrapper", ["solo", "dpsgd", "adpsgd", "lsgd"])
def test_a_rank_discards_after_an_error_and_trains_another(wrapper: str):
    def train(rank: int) -> float:
        model, optimizer = make(wrapper, True, 0)
        for number in range(2):
            step(model, optimizer, rank, number)
        if rank == 1:
            optimizer.discard()
            with pytest.raises(ReplicaStateError, match="discard"):
                step(model, optimizer, rank, 2)
        else:
            for number in range(2, 5):
                step(model, optimizer, rank, number)
            optimizer.drain()
        later, other = make(wrapper, True, 3)
        for number in range(3):
            step(later, other, rank, number)
        other.drain()
        return float(torch.cat([p.detach().reshape(-1) for p in later.parameters()]).sum())

    outcomes = Cluster(3).run(train)
    assert len(set(outcomes)) == 1
    assert abs(outcomes[0]) < 100


def test_handed_over_gradients_hold_up_their_own_optimizer_only_and_it_is_named():
    def train(rank: int) -> float:
        weight, optimizer = line(0.0, quorum="solo")
        for _ in range(2):
            take(weight, optimizer)
        optimizer.zero_grad()
        weight.sum().backward()  # (a step that an error broke off)
        with pytest.raises(ReplicaStateError, match=r"SGD \(optimizer 0\): backward\(\) has handed .*discard\(\)"):
            optimizer.drain()
        optimizer.discard()
        weight, other = line(5.0, quorum="all")
        take(weight, other)
        other.drain()
        return float(weight)

    assert Cluster(2).run(train) == [4.0, 4.0]


@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_a_rank_without_batches_joins_with_two_optimizers(quorum: str):
    """It is done with both before the first has met: the others may begin with either."""

    def train(rank: int) -> list[float]:
        pairs = [line(0.0, quorum=quorum), line(10.0, quorum=quorum)]
        for _ in range(2 * rank):
            for weight, optimizer in pairs:
                take(weight, optimizer)
        for _, optimizer in pairs:
            optimizer._async.register()
        pairs[-1][1]._async.drain_all()
        return [float(weight.detach()) for weight, _ in pairs]

    assert Cluster(2).run(train) == [[-1.0, 9.0]] * 2


def test_a_rank_that_drains_one_optimizer_opens_what_another_is_done_with():
    def train(rank: int) -> float:
        first, second = line(0.0), line(10.0)
        if rank == 0:
            for _, optimizer in (first, second):
                optimizer._async.register()
            second[1]._async.drain_all()
        else:
            take(*first)
            first[1].drain()
        return float(first[0].detach())

    assert Cluster(2).run(train) == [-0.5, -0.5]


def test_a_collective_ends_when_the_optimizer_is_discarded_by_another_thread():
    reported = threading.Event()

    def train(rank: int) -> bool:
        weight, optimizer = line(0.0, quorum="all")
        take(weight, optimizer)
        if rank == 1:
            return reported.wait(30)  # (it keeps its optimizer until then, so that it is waited for)
        worker = optimizer._async.worker
        send, begun = worker.engine.send, threading.Event()

        def watched(event: Any) -> None:
            send(event)
            begun.set()

        worker.engine.send = watched
        helper = threading.Thread(target=lambda: begun.wait(30) and optimizer.discard())
        helper.start()
        with pytest.raises(ReplicaStateError, match="discarded while this rank waited in the sum"):
            worker.sum(torch.ones(2), "the sum")
        helper.join(30)
        reported.set()
        return True

    assert Cluster(2).run(train) == [True, True]


def test_workers_of_before_a_switch_are_let_go():
    def train(rank: int) -> list[bool]:
        model, optimizer = make("sgp", False, 0)
        old = []
        for _ in range(3):
            step(model, optimizer, rank, 0)
            old.append(weakref.ref(optimizer._async.worker))
            optimizer.switch(algorithm="sgp")
        step(model, optimizer, rank, 0)
        optimizer.drain()  # (by now every rank has reported the coordinator, and been asked to forget)
        gc.collect()
        return [reference() is None for reference in old]

    for forgotten in Cluster(2).run(train):
        assert forgotten[:2] == [True, True]
